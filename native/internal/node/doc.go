// Package node reaches the guests of one host.
//
// Everything is keyed by placement: the pool of connections, the open streams and the limit on them. When a placement
// ends, all of it ends in the same instant, on both sides; an address that its slot hands to the next sandbox is never
// reached through something that was opened for the one before.
//
// Read placement.go first: a Placement's life is what the rest serves.
package node

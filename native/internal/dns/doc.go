// Package dns forwards the guests' questions to the configured resolvers and nothing else: no cache, no names of its own.
//
// A question keeps its bytes; only its id is replaced, so that an answer counts when it comes from the asked address to
// the asking port with a fresh id and the same question. Guests are untrusted: a client may have few questions open, and
// everything has a size and a time.
//
// Start with forwarder.go.
package dns

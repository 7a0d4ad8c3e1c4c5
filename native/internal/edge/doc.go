// Package edge is the door to every sandbox and to the API: one listener, no policy.
//
// target.go decides what a request is for. The API's requests go to control as they are (api.go). A sandbox's requests
// go straight to its guest (sandbox.go, forward.go), along routes that control streams to the edge (table.go, follow.go).
// What the table doesn't know it asks (asker.go): a miss is never an answer. The table alone ends a placement, and ending
// it cuts all of its traffic (internal/node).
//
// Start with server.go.
package edge

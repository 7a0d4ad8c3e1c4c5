// Package moments brings what a host has saved of a guest to the artifact store, and back from there.
//
// Theory of operation. Files are cut into chunks of whole pages, 64 KiB at most, each known by its SHA-256; where, says what is in them
// (chunks.go). Chunks that the store has through a known earlier moment are named, not sent; the others are compressed, one by one, and sent in packs. A manifest says of each file in which order which
// chunk of which pack it is made of, holes left out; it is flat, so that a moment that others stand on starts no slower than the first.
// It is sent last: once it is there, all of it is. Whoever fetches believes nothing: the manifest is checked against the digest that
// control names, each chunk against its own, and the files appear by one rename.
package moments

import (
	"context"
	"errors"
	"fmt"
	"io"
)

// Codes of what goes wrong, as control and agent know them.
const (
	CodeUnavailable = "MOMENT_UNAVAILABLE"
	CodeCorrupt     = "MOMENT_CORRUPT"
	CodeIncomplete  = "MOMENT_INCOMPLETE"
	CodeForbidden   = "FORBIDDEN"
	CodeGone        = "RESUME_FAILED"
	CodeFull        = "HOST_DISK_FULL"
	CodeInvalid     = "INVALID_REQUEST"
	CodeInternal    = "INTERNAL"
)

// Error is a failure with a stable code.
type Error struct {
	Code, Text string
	cause      error
}

func (e *Error) Error() string {
	if e.cause == nil {
		return e.Text
	}
	return e.Text + ": " + e.cause.Error()
}

func (e *Error) Unwrap() error { return e.cause }

func failure(code string, cause error, format string, args ...any) *Error {
	return &Error{code, fmt.Sprintf(format, args...), cause}
}

// CodeOf is the stable code of a failure.
func CodeOf(err error) string {
	var known *Error
	if errors.As(err, &known) {
		return known.Code
	}
	return CodeInternal
}

// Remote is the artifact store, as a host reaches it. All calls may be repeated. Errors: *Error.
type Remote interface {
	// Manifest reads all of one, which nobody has checked yet.
	Manifest(ctx context.Context, digest string) ([]byte, error)
	// Last reads the manifest of what was last sent of a placement or snapshot.
	Last(ctx context.Context, of string) ([]byte, error)
	// Pack reads a part of a pack that a moment is made of.
	Pack(ctx context.Context, moment, pack string, offset, length int64) (io.ReadCloser, error)
	// Missing says which of these packs the store does not have, and keeps where they may be sent.
	Missing(ctx context.Context, of string, packs []string) ([]string, error)
	// PutPack sends one. `of`: the placement or snapshot whose moment is sent.
	PutPack(ctx context.Context, of, pack string, content []byte) error
	// PutManifest sends what makes the moment. Errors: CodeIncomplete when not all of its packs are there.
	PutManifest(ctx context.Context, of, digest string, bases []string, content []byte) error
}

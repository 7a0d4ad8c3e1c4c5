// Package objects keeps blobs under names that are their digests: in a folder, which control gives hosts of other machines to read.
//
// Theory of operation. An object is there whole, or it is not: it appears by one rename. A blob's name is its SHA-256, which is compared
// before it appears, whoever brings it. Readers believe nothing of what comes: they count and digest it again.
package objects

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"io/fs"
	"regexp"
	"strings"
)

// Blobs is the kind of files of images (manifests, configurations, layers), and the first part of their names.
const Blobs = "blobs"

// Failures that mean something to callers; everything else is the store's own.
var (
	// ErrMissing says that there is no object of this name.
	ErrMissing = errors.New("there is no such object")
	// ErrCorrupt says that content is not what its name says.
	ErrCorrupt = errors.New("the content is not what its name says")
	// ErrDenied says that the store does not know these credentials, or gives them too little.
	ErrDenied = errors.New("the object store does not allow it")
	// ErrName says that a name is none.
	ErrName = errors.New("it is no name of an object")
)

// Name of an object: `KIND/sha256/HEX` below the folder.
type Name struct{ Kind, Digest string }

// Info is what is known of an object without reading it.
type Info struct {
	Name Name
	Size int64
}

// Store is the port. All calls may be repeated.
type Store interface {
	// Put has an object of this size there, whole or not at all. One that is there is replaced. Errors: ErrCorrupt.
	Put(ctx context.Context, name Name, size int64, content io.Reader) error
	// Get reads an object from a byte on; length < 0: to its end. Errors: ErrMissing.
	Get(ctx context.Context, name Name, offset, length int64) (io.ReadCloser, error)
	// Head looks at an object. Errors: ErrMissing.
	Head(ctx context.Context, name Name) (Info, error)
	// List visits every object of a kind, in no order; it ends with the visitor's first error.
	List(ctx context.Context, kind string, visit func(Info) error) error
	// Delete has no object of this name there.
	Delete(ctx context.Context, name Name) error
}

var digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// Blob is the name of a blob.
func Blob(digest string) Name { return Name{Blobs, digest} }

// Check refuses what is no name, before it becomes a path or a key.
func (n Name) Check() error {
	if n.Kind != Blobs || !digestForm.MatchString(n.Digest) {
		return ErrName
	}
	return nil
}

// Path is where an object is, below whatever the store's objects are below.
func (n Name) Path() string {
	return n.Kind + "/sha256/" + strings.TrimPrefix(n.Digest, "sha256:")
}

// named is the reverse of Path.
func named(kind, base string) (Name, bool) {
	name := Name{kind, "sha256:" + base}
	return name, name.Check() == nil
}

// verified reads exactly as many bytes as an object should have. The last bytes are held back until the digest is known, so that whoever
// is given a blob never has all of a wrong one.
type verified struct {
	from     io.Reader
	left     int64
	sum      hash.Hash
	expected string
}

func verify(name Name, size int64, content io.Reader) io.Reader {
	return &verified{from: content, left: size, sum: sha256.New(), expected: strings.TrimPrefix(name.Digest, "sha256:")}
}

func (v *verified) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if v.left == 0 {
		return 0, v.end()
	}
	n, err := v.from.Read(p[:min(int64(len(p)), v.left)])
	v.left -= int64(n)
	v.sum.Write(p[:n])
	if v.left == 0 {
		if end := v.end(); !errors.Is(end, io.EOF) {
			return 0, end
		}
		return n, nil
	}
	if errors.Is(err, io.EOF) {
		return 0, ErrCorrupt
	}
	return n, err
}

// end compares, and looks that nothing comes after the last byte.
func (v *verified) end() error {
	if n, err := io.ReadFull(v.from, make([]byte, 1)); n > 0 {
		return ErrCorrupt
	} else if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if hex.EncodeToString(v.sum.Sum(nil)) != v.expected {
		return ErrCorrupt
	}
	return io.EOF
}

// missing is what fs.ErrNotExist means here.
func missing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return ErrMissing
	}
	return err
}

package images

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Store keeps blobs by their digest: `blobs/sha256/HEX`. A blob that is there is whole; `partial/` holds what is being
// written, `quarantine/` what was not what it claimed, `locks/` one file for each digest that is being fetched.
type Store struct {
	root string
	mu   sync.Mutex
	busy map[string]*sync.Mutex
}

// OpenStore uses a directory, and makes it where it is missing.
func OpenStore(root string) (*Store, error) {
	for _, name := range []string{"blobs/sha256", "partial", "quarantine", "locks"} {
		if err := os.MkdirAll(filepath.Join(root, name), 0o750); err != nil {
			return nil, failure(CodeInternal, err, "the image store cannot be made")
		}
	}
	return ReadStore(root), nil
}

// ReadStore uses a directory that is another user's to write: nothing is made in it.
func ReadStore(root string) *Store {
	return &Store{root: root, busy: make(map[string]*sync.Mutex)}
}

// path is only called with digests that have the right form.
func (s *Store) path(digest string) string {
	return filepath.Join(s.root, "blobs", "sha256", strings.TrimPrefix(digest, "sha256:"))
}

// Has says whether a blob is there, with the size that is expected of it.
func (s *Store) Has(digest string, size int64) bool {
	info, err := os.Lstat(s.path(digest))
	return err == nil && info.Mode().IsRegular() && (size < 0 || info.Size() == size)
}

// Open reads a blob. Its content is to be checked by the reader, who reads all of it anyway.
func (s *Store) Open(digest string) (*os.File, error) {
	if !digestForm.MatchString(digest) {
		return nil, failure(CodeInvalid, nil, "%.80q is no SHA-256 digest", digest)
	}
	file, err := os.OpenFile(s.path(digest), os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, failure(CodeUnavailable, err, "blob %s is not in the store", digest)
	}
	if err != nil {
		return nil, failure(CodeInternal, err, "blob %s cannot be read", digest)
	}
	return file, nil
}

// Document reads a small blob whole and checks it; a wrong one goes to quarantine.
func (s *Store) Document(digest string) ([]byte, error) {
	file, err := s.Open(digest)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	content, err := io.ReadAll(io.LimitReader(file, documentBytesMax+1))
	if err != nil {
		return nil, failure(CodeInternal, err, "blob %s cannot be read", digest)
	}
	if digestOf(content) != digest {
		s.Quarantine(digest)
		return nil, failure(CodeCorrupt, nil, "blob %s in the store is not what its name says", digest)
	}
	return content, nil
}

// keep has a file of partial/ appear as the blob that it should be; one of another size or digest goes to quarantine.
func (s *Store) keep(file *os.File, want Descriptor, got int64, sum hash.Hash) error {
	if want.Size >= 0 && got != want.Size {
		s.keepAside(file, want.Digest)
		return failure(CodeCorrupt, nil, "blob %s should have %d bytes, %s came", want.Digest, want.Size, amount(got, want.Size))
	}
	if found := text(sum); found != want.Digest {
		s.keepAside(file, want.Digest)
		return failure(CodeCorrupt, nil, "blob %s was asked for, what came is %s", want.Digest, found)
	}
	if err := errors.Join(file.Chmod(0o640), file.Sync()); err != nil {
		return failure(CodeInternal, err, "blob %s cannot be written", want.Digest)
	}
	if err := os.Rename(file.Name(), s.path(want.Digest)); err != nil {
		return failure(CodeInternal, err, "blob %s cannot be written", want.Digest)
	}
	return nil
}

func amount(got, want int64) string {
	if got > want {
		return "more"
	}
	return fmt.Sprint(got)
}

// Add keeps content whose digest nobody has said before, such as a manifest that is made here.
func (s *Store) Add(ctx context.Context, content []byte) (string, error) {
	want := Descriptor{Digest: digestOf(content), Size: int64(len(content))}
	return want.Digest, s.resume(ctx, func(_ context.Context, _ Descriptor, at int64) (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(content[at:])), nil
	}, want)
}

// Quarantine takes a blob that is not what its name says out of the store. Of each digest one is kept.
func (s *Store) Quarantine(digest string) {
	_ = os.Rename(s.path(digest), s.aside(digest))
}

func (s *Store) keepAside(file *os.File, digest string) {
	_ = os.Rename(file.Name(), s.aside(digest))
}

func (s *Store) aside(digest string) string {
	return filepath.Join(s.root, "quarantine", strings.TrimPrefix(digest, "sha256:"))
}

// lock is held by one goroutine of one process for each digest.
func (s *Store) lock(ctx context.Context, digest string) (func(), error) {
	s.mu.Lock()
	inner := s.busy[digest]
	if inner == nil {
		inner = new(sync.Mutex)
		s.busy[digest] = inner
	}
	s.mu.Unlock()
	inner.Lock()
	release, err := lockFile(ctx, filepath.Join(s.root, "locks", strings.TrimPrefix(digest, "sha256:")))
	if err != nil {
		inner.Unlock()
		return nil, err
	}
	return func() { release(); inner.Unlock() }, nil
}

func digestOf(content []byte) string {
	sum := sha256.Sum256(content)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func digestOfAll(content io.Reader) (string, error) {
	sum := sha256.New()
	_, err := io.Copy(sum, content)
	return text(sum), err
}

func text(sum hash.Hash) string { return "sha256:" + hex.EncodeToString(sum.Sum(nil)) }

package images

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
)

// arriving is the file of a blob that is being fetched: whoever reads it gets what there is and waits for more. The fetch never waits for
// a reader, since what it has got lies in the file.
type arriving struct {
	file  *os.File
	mu    sync.Mutex
	more  sync.Cond
	there int64
	ended bool
	err   error
}

func newArriving(file *os.File) *arriving {
	a := &arriving{file: file}
	a.more.L = &a.mu
	return a
}

// has tells readers that the first bytes of the file are there already.
func (a *arriving) has(there int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.there = there
	a.more.Broadcast()
}

func (a *arriving) Write(p []byte) (int, error) {
	n, err := a.file.Write(p)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.there += int64(n)
	a.more.Broadcast()
	return n, err
}

// end tells readers that no more comes: after a failure they get it as theirs when they have read what came.
func (a *arriving) end(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil {
		err = io.EOF
	}
	a.ended, a.err = true, err
	a.more.Broadcast()
}

// follow reads from the beginning.
func (a *arriving) follow() io.Reader { return &follower{of: a} }

type follower struct {
	of *arriving
	at int64
}

func (f *follower) Read(p []byte) (int, error) {
	a := f.of
	a.mu.Lock()
	for a.there <= f.at && !a.ended {
		a.more.Wait()
	}
	there, err := a.there, a.err
	a.mu.Unlock()
	if there <= f.at {
		return 0, err
	}
	n, err := a.file.ReadAt(p[:min(int64(len(p)), there-f.at)], f.at)
	f.at += int64(n)
	if n > 0 {
		return n, nil
	}
	return n, err
}

// getter reads a blob from a byte on.
type getter func(ctx context.Context, want Descriptor, at int64) (io.ReadCloser, error)

// errGivenUp says that whoever read a blob while it came wants no more of it.
var errGivenUp = errors.New("nobody wants the rest")

// through has a blob in the store, beginning where an earlier run ended, and has it read by `read` while it comes; came is called
// when all of it is in the store. What `read` gets is not checked before its end: that is the reader's business.
//
// Idempotency: what is in the store is only read. Errors: as resume; else the reader's.
func (s *Store) through(ctx context.Context, get getter, want Descriptor, came func(), read func(io.Reader) error) error {
	if want.Size < 0 {
		return failure(CodeRefused, nil, "blob %s has no size", want.Digest)
	}
	unlock, err := s.lock(ctx, want.Digest)
	if err != nil {
		return err
	}
	// Others that want the blob need not wait for this one's reader.
	unlocked := sync.OnceFunc(unlock)
	defer unlocked()
	if s.Has(want.Digest, want.Size) {
		unlocked()
		came()
		return s.read(want.Digest, read)
	}
	name := s.partial(want.Digest)
	file, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return failure(CodeInternal, err, "a blob cannot be written")
	}
	defer file.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	coming := newArriving(file)
	ended := make(chan error, 1)
	go func() {
		err := read(coming.follow())
		// A layer that is broken is fetched to its end nevertheless: then it is known whether it came so, and is kept aside.
		if err != nil && CodeOf(err) != CodeCorrupt {
			cancel(errGivenUp)
		}
		ended <- err
	}()
	err = s.complete(ctx, coming, get, want)
	givenUp := errors.Is(context.Cause(ctx), errGivenUp)
	full := CodeOf(err) == CodeDiskFull || CodeOf(context.Cause(ctx)) == CodeDiskFull
	if err != nil && (givenUp || full || CodeOf(err) == CodeCorrupt) {
		// There is no going on from wrong bytes (which are in quarantine); a disk that is full, be it by another layer, is to be less so.
		_ = os.Remove(name)
	}
	unlocked()
	if err == nil {
		came()
	}
	coming.end(err)
	if said := <-ended; err == nil || givenUp {
		return said
	}
	return err
}

func (s *Store) partial(digest string) string {
	return filepath.Join(s.root, "partial", "fetch-"+strings.TrimPrefix(digest, "sha256:"))
}

// read gives a blob of the store to a reader. One that turns out not to be what its name says goes to quarantine.
func (s *Store) read(digest string, read func(io.Reader) error) error {
	file, err := s.Open(digest)
	if err != nil {
		return err
	}
	defer file.Close()
	err = read(file)
	if err != nil && CodeOf(err) == CodeCorrupt && !s.isRight(digest) {
		s.Quarantine(digest)
	}
	return err
}

// isRight digests a blob of the store: an image may say wrong things of a blob that is right, and that others use.
func (s *Store) isRight(digest string) bool {
	file, err := s.Open(digest)
	if err != nil {
		return false
	}
	defer file.Close()
	found, err := digestOfAll(file)
	return err != nil || found == digest
}

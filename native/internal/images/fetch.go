package images

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"atoll.local/native/internal/objects"
)

// attempts to go on with one blob, those that bring something more not counted; between them is a pause that doubles from the first one
// on. All together outlive a restart of control.
const attempts = 7

var firstPause = 200 * time.Millisecond

// Fetch has an image of an object store in this store: its manifest by the digest that the caller knows, and what that names.
//
// Idempotency: blobs that are here are not fetched again; of two that want one, one fetches it; what a run that was cut off has got of a
// blob is where the next one goes on. Errors: IMAGE_UNAVAILABLE, IMAGE_ACCESS_DENIED, IMAGE_CORRUPT (kept in quarantine), IMAGE_REFUSED,
// HOST_DISK_FULL (nothing of that blob stays).
func Fetch(ctx context.Context, store *Store, from objects.Reader, digest string, told Progress) (*Record, error) {
	if !digestForm.MatchString(digest) {
		return nil, failure(CodeInvalid, nil, "%.80q is no SHA-256 digest", digest)
	}
	content, err := fetchDocument(ctx, store, from, digest)
	if err != nil {
		return nil, err
	}
	image, err := imageOf(digest, content)
	if err != nil {
		return nil, err
	}
	if image.Config.Size < 0 || image.Config.Size > documentBytesMax {
		return nil, failure(CodeRefused, nil, "the image's configuration has more than %d bytes", documentBytesMax)
	}
	if err := store.resume(ctx, from, image.Config); err != nil {
		return nil, err
	}
	config, err := store.Document(image.Config.Digest)
	if err != nil {
		return nil, err
	}
	platform, _ := ParsePlatform("")
	read, err := parseConfig(config, image, platform)
	if err != nil {
		return nil, err
	}
	err = inParallel(ctx, image.Layers, told, func(ctx context.Context, blob Descriptor) error { return store.resume(ctx, from, blob) })
	if err != nil {
		return nil, err
	}
	// Last, so that a manifest in the store says that all of its image is there.
	if _, err := store.Add(ctx, content); err != nil {
		return nil, err
	}
	return recordOf(image, read, platform), nil
}

func fetchDocument(ctx context.Context, store *Store, from objects.Reader, digest string) ([]byte, error) {
	if store.Has(digest, -1) {
		return store.Document(digest)
	}
	body, err := from.Get(ctx, objects.Blob(digest), 0, -1)
	if err != nil {
		return nil, fetchFailure(err, digest)
	}
	defer body.Close()
	content, err := io.ReadAll(io.LimitReader(body, documentBytesMax+1))
	if err != nil {
		return nil, fetchFailure(err, digest)
	}
	if len(content) > documentBytesMax {
		return nil, failure(CodeRefused, nil, "manifest %s has more than %d bytes", digest, documentBytesMax)
	}
	if found := digestOf(content); found != digest {
		_ = os.WriteFile(store.aside(digest), content, 0o600)
		return nil, failure(CodeCorrupt, nil, "manifest %s was asked for, what came is %s", digest, found)
	}
	return content, nil
}

// resume has a blob in the store, beginning where an earlier run ended.
func (s *Store) resume(ctx context.Context, from objects.Reader, want Descriptor) error {
	if want.Size < 0 {
		return failure(CodeRefused, nil, "blob %s has no size", want.Digest)
	}
	unlock, err := s.lock(ctx, want.Digest)
	if err != nil {
		return err
	}
	defer unlock()
	if s.Has(want.Digest, want.Size) {
		return nil
	}
	name := filepath.Join(s.root, "partial", "fetch-"+strings.TrimPrefix(want.Digest, "sha256:"))
	file, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return failure(CodeInternal, err, "a blob cannot be written")
	}
	defer file.Close()
	err = s.complete(ctx, file, from, want)
	if code := CodeOf(err); err != nil && (code == CodeDiskFull || code == CodeCorrupt) {
		// There is no going on from a full disk's last bytes, or from wrong ones (which are in quarantine).
		_ = os.Remove(name)
	}
	return err
}

func (s *Store) complete(ctx context.Context, file *os.File, from objects.Reader, want Descriptor) error {
	sum := sha256.New()
	got, err := io.Copy(sum, objects.NewContextReader(ctx, file))
	if err != nil {
		return failure(CodeInternal, err, "what there is of blob %s cannot be read", want.Digest)
	}
	for tried := 0; got < want.Size || (want.Size == 0 && tried == 0); {
		more, err := s.append(ctx, io.MultiWriter(file, sum), from, want, got)
		got += more
		if err == nil {
			break
		}
		if tried++; more > 0 {
			tried = 1
		}
		if ctx.Err() != nil || tried >= attempts || CodeOf(err) != CodeUnavailable || errors.Is(err, objects.ErrMissing) {
			return err
		}
		select {
		case <-time.After(firstPause << (tried - 1)):
		case <-ctx.Done():
			return err
		}
	}
	return s.keep(file, want, got, sum)
}

// append writes what comes from a byte on, and at most one byte too much, which tells a longer blob from the right one. An answer that
// ends early, as if that were all, is a blob that is too short.
func (s *Store) append(ctx context.Context, to io.Writer, from objects.Reader, want Descriptor, at int64) (int64, error) {
	body, err := from.Get(ctx, objects.Blob(want.Digest), at, -1)
	if err != nil {
		return 0, fetchFailure(err, want.Digest)
	}
	defer body.Close()
	more, err := io.Copy(to, objects.NewContextReader(ctx, io.LimitReader(body, want.Size-at+1)))
	if err != nil {
		return more, fetchFailure(err, want.Digest)
	}
	return more, nil
}

func fetchFailure(err error, digest string) error {
	switch {
	case errors.Is(err, objects.ErrMissing):
		return failure(CodeUnavailable, err, "%s is not in the object store", digest)
	case errors.Is(err, objects.ErrDenied):
		return failure(CodeDenied, err, "%s is not given to this host", digest)
	}
	return failure(CodeUnavailable, err, "%s could not be fetched", digest)
}

// Publish has all of an image of this store in an object store, its manifest last.
//
// Idempotency: what is there with the right size is not sent again. Errors: as Fetch.
func Publish(ctx context.Context, store *Store, to objects.Store, digest string, told Progress) (*Record, error) {
	image, config, platform, err := load(store, digest)
	if err != nil {
		return nil, err
	}
	send := func(ctx context.Context, blob Descriptor) error { return publishBlob(ctx, store, to, blob) }
	if err := send(ctx, image.Config); err != nil {
		return nil, err
	}
	if err := inParallel(ctx, image.Layers, told, send); err != nil {
		return nil, err
	}
	if err := send(ctx, Descriptor{Digest: digest, Size: int64(len(image.manifest))}); err != nil {
		return nil, err
	}
	return recordOf(image, config, platform), nil
}

func publishBlob(ctx context.Context, store *Store, to objects.Store, blob Descriptor) error {
	name := objects.Blob(blob.Digest)
	if known, err := to.Head(ctx, name); err == nil && known.Size == blob.Size {
		return nil
	}
	file, err := store.Open(blob.Digest)
	if err != nil {
		return err
	}
	defer file.Close()
	err = to.Put(ctx, name, blob.Size, file)
	switch {
	case errors.Is(err, objects.ErrCorrupt):
		store.Quarantine(blob.Digest)
		return failure(CodeCorrupt, err, "blob %s in the store is not what its name says", blob.Digest)
	case err != nil:
		return fetchFailure(err, blob.Digest)
	}
	return nil
}

// inParallel does something with each layer, several at a time; the first failure ends all.
func inParallel(ctx context.Context, layers []Descriptor, told Progress, do func(context.Context, Descriptor) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var all sync.WaitGroup
	var says sync.Mutex
	room := make(chan struct{}, parallel)
	for i, blob := range layers {
		all.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			if ctx.Err() != nil {
				return
			}
			if err := do(ctx, blob); err != nil {
				cancel(err)
				return
			}
			says.Lock()
			defer says.Unlock()
			told("fetched", i, blob)
		})
	}
	all.Wait()
	return context.Cause(ctx)
}

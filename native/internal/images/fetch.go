package images

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"atoll.local/native/internal/objects"
)

// attempts to have one blob, those that bring something more not counted; between them is a pause that doubles from the first one
// on, up to the last. All together (36 s) outlive a restart of control, on a busy machine too.
const attempts = 12

var firstPause, lastPause = 200 * time.Millisecond, 5 * time.Second

// Fetch has an image of an object store in this store: its manifest by the digest that the caller knows, and what that names.
//
// Idempotency: blobs that are here are not fetched again; of two that want one, one fetches it; what a run that was cut off has got of a
// blob is where the next one goes on. Errors: IMAGE_UNAVAILABLE, IMAGE_ACCESS_DENIED, IMAGE_CORRUPT (kept in quarantine), IMAGE_REFUSED,
// HOST_DISK_FULL (nothing of that blob stays).
func Fetch(ctx context.Context, store *Store, from objects.Reader, digest string, told Progress) (*Record, error) {
	content, record, err := fetchDocuments(ctx, store, from, digest)
	if err != nil {
		return nil, err
	}
	err = inParallel(ctx, record.Layers, told, func(ctx context.Context, blob Descriptor) error { return store.resume(ctx, blobsOf(from), blob) })
	if err != nil {
		return nil, err
	}
	// Last, so that a manifest that came so says that all of its image is there.
	if _, err := store.Add(ctx, content); err != nil {
		return nil, err
	}
	return record, nil
}

// FetchDocuments has an image's manifest and configuration in this store, and none of its layers: Unpack fetches them as it unpacks.
//
// Errors and idempotency: as Fetch.
func FetchDocuments(ctx context.Context, store *Store, from objects.Reader, digest string) (*Record, error) {
	content, record, err := fetchDocuments(ctx, store, from, digest)
	if err != nil {
		return nil, err
	}
	_, err = store.Add(ctx, content)
	return record, err
}

func fetchDocuments(ctx context.Context, store *Store, from objects.Reader, digest string) ([]byte, *Record, error) {
	if !digestForm.MatchString(digest) {
		return nil, nil, failure(CodeInvalid, nil, "%.80q is no SHA-256 digest", digest)
	}
	content, err := fetchDocument(ctx, store, from, digest)
	if err != nil {
		return nil, nil, err
	}
	image, err := imageOf(digest, content)
	if err != nil {
		return nil, nil, err
	}
	if image.Config.Size < 0 || image.Config.Size > documentBytesMax {
		return nil, nil, failure(CodeRefused, nil, "the image's configuration has more than %d bytes", documentBytesMax)
	}
	if err := store.resume(ctx, blobsOf(from), image.Config); err != nil {
		return nil, nil, err
	}
	config, err := store.Document(image.Config.Digest)
	if err != nil {
		return nil, nil, err
	}
	platform, _ := ParsePlatform("")
	read, err := parseConfig(config, image, platform)
	if err != nil {
		return nil, nil, err
	}
	return content, recordOf(image, read, platform), nil
}

func fetchDocument(ctx context.Context, store *Store, from objects.Reader, digest string) ([]byte, error) {
	if store.Has(digest, -1) {
		return store.Document(digest)
	}
	content, err := readDocument(ctx, from, digest)
	for tried := 1; err != nil && again(ctx, err, tried); tried++ {
		content, err = readDocument(ctx, from, digest)
	}
	if err != nil {
		return nil, err
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

func readDocument(ctx context.Context, from objects.Reader, digest string) ([]byte, error) {
	body, err := from.Get(ctx, objects.Blob(digest), 0, -1)
	if err != nil {
		return nil, fetchFailure(err, digest)
	}
	defer body.Close()
	content, err := io.ReadAll(io.LimitReader(body, documentBytesMax+1))
	if err != nil {
		return nil, fetchFailure(err, digest)
	}
	return content, nil
}

// again waits before the next attempt, so many having failed, the last one by err; false: there is none.
func again(ctx context.Context, err error, tried int) bool {
	if ctx.Err() != nil || tried >= attempts || CodeOf(err) != CodeUnavailable || errors.Is(err, objects.ErrMissing) {
		return false
	}
	select {
	case <-time.After(min(firstPause<<(tried-1), lastPause)):
		return true
	case <-ctx.Done():
		return false
	}
}

// resume has a blob in the store, beginning where an earlier run ended.
func (s *Store) resume(ctx context.Context, get getter, want Descriptor) error {
	return s.through(ctx, get, want, func() {}, func(io.Reader) error { return nil })
}

func (s *Store) complete(ctx context.Context, to *arriving, get getter, want Descriptor) error {
	sum := sha256.New()
	got, err := io.Copy(sum, objects.NewContextReader(ctx, to.file))
	if err != nil {
		return failure(CodeInternal, err, "what there is of blob %s cannot be read", want.Digest)
	}
	to.has(got)
	for tried := 0; got < want.Size || (want.Size == 0 && tried == 0); {
		more, err := s.append(ctx, io.MultiWriter(to, sum), get, want, got)
		got += more
		if err == nil {
			break
		}
		if tried++; more > 0 {
			tried = 1
		}
		if !again(ctx, err, tried) {
			return err
		}
	}
	return s.keep(to.file, want, got, sum)
}

// append writes what comes from a byte on, and at most one byte too much, which tells a longer blob from the right one. An answer that
// ends early, as if that were all, is a blob that is too short.
func (s *Store) append(ctx context.Context, to io.Writer, get getter, want Descriptor, at int64) (int64, error) {
	body, err := get(ctx, want, at)
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

// blobsOf reads blobs of an object store.
func blobsOf(from objects.Reader) getter {
	return func(ctx context.Context, want Descriptor, at int64) (io.ReadCloser, error) {
		return from.Get(ctx, objects.Blob(want.Digest), at, -1)
	}
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
	return each(ctx, layers, func(ctx context.Context, i int, says func(string)) error {
		err := do(ctx, layers[i])
		if err == nil {
			says("fetched")
		}
		return err
	}, told)
}

// each does something with each layer, several at a time, in goroutines that may tell of it; the first failure ends all.
func each(ctx context.Context, layers []Descriptor, do func(ctx context.Context, i int, says func(string)) error, told Progress) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var all sync.WaitGroup
	var saying sync.Mutex
	room := make(chan struct{}, parallel)
	for i, blob := range layers {
		room <- struct{}{}
		all.Go(func() {
			defer func() { <-room }()
			if ctx.Err() != nil {
				return
			}
			err := do(ctx, i, func(event string) {
				saying.Lock()
				defer saying.Unlock()
				told(event, i, blob)
			})
			if err != nil {
				cancel(err)
			}
		})
	}
	all.Wait()
	return context.Cause(ctx)
}

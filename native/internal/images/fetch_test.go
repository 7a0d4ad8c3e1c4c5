package images

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"atoll.local/native/internal/objects"
)

// shelf is an object store that tests spoil; it counts what is asked of it.
type shelf struct {
	mu      sync.Mutex
	content map[string][]byte
	asked   map[string][]int64
	// cut ends the first answer for a digest after so many bytes.
	cut map[string]int
	// away is how many calls more fail, as while control is started again.
	away int
}

func (s *shelf) Get(_ context.Context, name objects.Name, offset, _ int64) (io.ReadCloser, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away > 0 {
		s.away--
		return nil, errors.New("connection refused")
	}
	content, found := s.content[name.Digest]
	if !found {
		return nil, objects.ErrMissing
	}
	s.asked[name.Digest] = append(s.asked[name.Digest], offset)
	rest := io.Reader(bytes.NewReader(content[offset:]))
	if cut, known := s.cut[name.Digest]; known {
		delete(s.cut, name.Digest)
		rest = io.MultiReader(io.LimitReader(rest, int64(cut)), broken{})
	}
	return io.NopCloser(rest), nil
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// shelved is an image of two layers on a shelf: its digest, and its layers'.
func shelved(t *testing.T) (*shelf, string, []string) {
	t.Helper()
	s := &shelf{content: map[string][]byte{}, asked: map[string][]int64{}, cut: map[string]int{}}
	put := func(content []byte) Descriptor {
		digest := digestOf(content)
		s.content[digest] = content
		return Descriptor{Digest: digest, Size: int64(len(content))}
	}
	platform, _ := ParsePlatform("")
	var layers []Descriptor
	var digests []string
	for _, text := range []string{"one", "two"} {
		layer := put(bytes.Repeat([]byte(text), 50_000))
		layer.MediaType = typeLayerTar
		layers, digests = append(layers, layer), append(digests, layer.Digest)
	}
	config, _ := json.Marshal(map[string]any{
		"os": platform.OS, "architecture": platform.Architecture, "rootfs": map[string]any{"type": "layers", "diff_ids": digests},
	})
	manifest, _ := json.Marshal(document{SchemaVersion: 2, MediaType: typeOCIManifest, Config: put(config), Layers: layers})
	return s, put(manifest).Digest, digests
}

func fetched(t *testing.T, from objects.Reader, digest string) (*Store, error) {
	t.Helper()
	store, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	_, err = Fetch(t.Context(), store, from, digest, quiet)
	return store, err
}

func left(t *testing.T, store *Store, place string) []os.DirEntry {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(store.root, place))
	if err != nil {
		t.Fatal(err)
	}
	return entries
}

func TestAnImageIsFetchedOnceHoweverManyWantIt(t *testing.T) {
	from, digest, layers := shelved(t)
	store, _ := OpenStore(t.TempDir())
	var all sync.WaitGroup
	failures := make([]error, 6)
	for i := range failures {
		all.Go(func() { _, failures[i] = Fetch(t.Context(), ReadStore(store.root), from, digest, quiet) })
	}
	all.Wait()
	if err := errors.Join(failures...); err != nil {
		t.Fatal(err)
	}
	for _, layer := range layers {
		if len(from.asked[layer]) != 1 || !store.Has(layer, int64(len(from.content[layer]))) {
			t.Fatalf("%s was asked for %d times", layer, len(from.asked[layer]))
		}
	}
	if rest := left(t, store, "partial"); len(rest) != 0 {
		t.Fatal("left:", rest)
	}
}

func soon(t *testing.T) {
	t.Helper()
	first, last := firstPause, lastPause
	firstPause, lastPause = time.Millisecond, 2*time.Millisecond
	t.Cleanup(func() { firstPause, lastPause = first, last })
}

func TestAStoreThatIsAwayForAWhileIsWaitedFor(t *testing.T) {
	soon(t)
	from, digest, _ := shelved(t)
	from.away = attempts - 1
	if _, err := fetched(t, from, digest); err != nil {
		t.Fatal(err)
	}
	from.away = 1000
	store, err := fetched(t, from, digest)
	if CodeOf(err) != CodeUnavailable || errors.Is(err, objects.ErrMissing) || store.Has(digest, -1) {
		t.Fatal("it said", err)
	}
	if from.away != 1000-attempts {
		t.Fatal("asked", 1000-from.away, "times")
	}
}

func TestAManifestThatBreaksOffIsAskedForAgain(t *testing.T) {
	soon(t)
	from, digest, _ := shelved(t)
	from.cut[digest] = 10
	if _, err := fetched(t, from, digest); err != nil {
		t.Fatal(err)
	}
	if asked := from.asked[digest]; len(asked) != 2 || asked[1] != 0 {
		t.Fatal("asked from", asked)
	}
}

func TestALayerThatBreaksOffIsGoneOnWith(t *testing.T) {
	from, digest, layers := shelved(t)
	from.cut[layers[0]] = 70_000
	if _, err := fetched(t, from, digest); err != nil {
		t.Fatal(err)
	}
	if asked := from.asked[layers[0]]; len(asked) != 2 || asked[1] != 70_000 {
		t.Fatal("asked from", asked)
	}
}

func TestWhatAKilledRunHasGotIsWhereTheNextOneBegins(t *testing.T) {
	from, digest, layers := shelved(t)
	store, _ := OpenStore(t.TempDir())
	partial := filepath.Join(store.root, "partial", "fetch-"+strings.TrimPrefix(layers[1], "sha256:"))
	if err := os.WriteFile(partial, from.content[layers[1]][:100_000], 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Fetch(t.Context(), store, from, digest, quiet); err != nil {
		t.Fatal(err)
	}
	if asked := from.asked[layers[1]]; len(asked) != 1 || asked[0] != 100_000 {
		t.Fatal("asked from", asked)
	}
}

func TestWhatIsNotWhatItsNameSaysIsKeptAsideAndNoImageAppears(t *testing.T) {
	for name, spoil := range map[string]func([]byte) []byte{
		"tampered": func(b []byte) []byte { return append([]byte{b[0] ^ 1}, b[1:]...) },
		"short":    func(b []byte) []byte { return b[:len(b)-1] },
		"long":     func(b []byte) []byte { return append(bytes.Clone(b), 0) },
	} {
		t.Run(name, func(t *testing.T) {
			from, digest, layers := shelved(t)
			from.content[layers[0]] = spoil(from.content[layers[0]])
			store, err := fetched(t, from, digest)
			if err == nil || CodeOf(err) != CodeCorrupt {
				t.Fatal("it said", err)
			}
			if store.Has(digest, -1) || store.Has(layers[0], -1) || len(left(t, store, "quarantine")) != 1 {
				t.Fatal("a wrong blob is in the store, or not in quarantine")
			}
		})
	}
}

func TestAManifestIsTheOneThatWasAskedFor(t *testing.T) {
	from, digest, _ := shelved(t)
	from.content[digest] = append(bytes.Clone(from.content[digest]), ' ')
	store, err := fetched(t, from, digest)
	if CodeOf(err) != CodeCorrupt || store.Has(digest, -1) || len(left(t, store, "quarantine")) != 1 {
		t.Fatal("it said", err)
	}
}

func TestWhatAStoreHasNotIsUnavailable(t *testing.T) {
	from, digest, layers := shelved(t)
	delete(from.content, layers[1])
	store, err := fetched(t, from, digest)
	if CodeOf(err) != CodeUnavailable || store.Has(digest, -1) {
		t.Fatal("it said", err)
	}
}

func TestAPublishedImageIsFetchedFromTheFolder(t *testing.T) {
	from, digest, layers := shelved(t)
	store, err := fetched(t, from, digest)
	if err != nil {
		t.Fatal(err)
	}
	folder := objects.OpenFolder(t.TempDir())
	for range 2 {
		if _, err := Publish(t.Context(), store, folder, digest, quiet); err != nil {
			t.Fatal(err)
		}
	}
	again, err := fetched(t, folder, digest)
	if err != nil || !again.Has(layers[1], -1) {
		t.Fatal("it said", err)
	}
}

package images

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"

	"atoll.local/native/internal/images/unpack"
	"atoll.local/native/internal/objects"
)

// shelve makes an image of these layers on a shelf.
func shelve(t *testing.T, layers ...map[string]string) (*shelf, *made) {
	t.Helper()
	image := makeImage(t, layers...)
	s := &shelf{content: map[string][]byte{digestOf(image.manifest): image.manifest}, asked: map[string][]int64{}, cut: map[string]int{}}
	for digest, blob := range image.blobs {
		s.content[digest] = blob
	}
	return s, image
}

// had is an image's tree, made with layers from the shelf.
func had(t *testing.T, store *Store, from objects.Reader, digest, cache string) error {
	t.Helper()
	if _, err := FetchDocuments(t.Context(), store, from, digest); err != nil {
		t.Fatal(err)
	}
	_, err := Unpack(t.Context(), store, digest, cache, Making{Limits: unpack.DefaultLimits, From: from})
	return err
}

// nothing says that no tree and nothing unfinished is in a cache.
func nothing(t *testing.T, cache string) {
	t.Helper()
	if found, _ := os.ReadDir(filepath.Join(cache, "sha256")); len(found) != 0 {
		t.Errorf("the cache has %v", found)
	}
}

func TestLayersAreUnpackedInOrderHoweverTheyCome(t *testing.T) {
	layers := make([]map[string]string, 12)
	for i := range layers {
		layers[i] = map[string]string{"all": strconv.Itoa(i), "only" + strconv.Itoa(i): "x"}
	}
	from, image := shelve(t, layers...)
	cache, store := t.TempDir(), newStore(t)
	if err := had(t, store, slowFirst{from, image.layers[0]}, digestOf(image.manifest), cache); err != nil {
		t.Fatal(err)
	}
	root := treeOf(cache, digestOf(image.manifest))
	if content(t, filepath.Join(root, "all")) != "11" || content(t, filepath.Join(root, "only0")) != "x" {
		t.Error("a layer is missing, or they were put on top of each other in another order")
	}
	if found, _ := os.ReadDir(filepath.Dir(root)); len(found) != 2 {
		t.Errorf("beside tree and manifest there is something: %v", found)
	}
	for _, layer := range image.layers {
		if !store.Has(layer, -1) {
			t.Errorf("%s was not kept", layer)
		}
	}
}

// slowFirst gives one blob last.
type slowFirst struct {
	objects.Reader
	late string
}

func (s slowFirst) Get(ctx context.Context, name objects.Name, offset, length int64) (io.ReadCloser, error) {
	if name.Digest == s.late {
		time.Sleep(100 * time.Millisecond)
	}
	return s.Reader.Get(ctx, name, offset, length)
}

// gated gives the first half of one blob, and the rest when it is let.
type gated struct {
	*shelf
	digest string
	open   chan struct{}
}

func (g *gated) Get(ctx context.Context, name objects.Name, offset, length int64) (io.ReadCloser, error) {
	if name.Digest != g.digest {
		return g.shelf.Get(ctx, name, offset, length)
	}
	whole := g.content[name.Digest]
	half := bytes.NewReader(whole[:len(whole)/2])
	return io.NopCloser(io.MultiReader(half, &waiting{g.open, ctx}, bytes.NewReader(whole[len(whole)/2:]))), nil
}

type waiting struct {
	open chan struct{}
	ctx  context.Context
}

func (w *waiting) Read([]byte) (int, error) {
	select {
	case <-w.open:
		return 0, io.EOF
	case <-w.ctx.Done():
		return 0, w.ctx.Err()
	}
}

// big is a layer of some files that cannot be squeezed to nothing.
func big() map[string]string {
	files := map[string]string{}
	for i := range bigFiles {
		var body strings.Builder
		for j := range 100 {
			body.WriteString(digestOf([]byte(strconv.Itoa(1000*i + j))))
		}
		files["file"+strconv.Itoa(i)] = body.String()
	}
	return files
}

const bigFiles = 40

func TestALayerIsUnpackedWhileItComes(t *testing.T) {
	for name, layers := range map[string][]map[string]string{"the first": {big()}, "another": {{"a": "1"}, big()}} {
		t.Run(name, func(t *testing.T) {
			shelf, image := shelve(t, layers...)
			from := &gated{shelf, image.layers[len(layers)-1], make(chan struct{})}
			cache, ended := t.TempDir(), make(chan error, 1)
			go func() { ended <- had(t, newStore(t), from, digestOf(image.manifest), cache) }()
			pattern := filepath.Join(cache, "sha256", ".unfinished-*", "*", "*")
			for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
				if found, _ := filepath.Glob(pattern); len(found) > bigFiles/4 {
					break
				}
				if time.Now().After(deadline) {
					t.Fatal("nothing was unpacked before all had come")
				}
			}
			if _, err := os.Stat(treeOf(cache, digestOf(image.manifest))); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("a tree is there before its layers are: %v", err)
			}
			close(from.open)
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestACutInALayerIsGoneOnWithWhileItIsUnpacked(t *testing.T) {
	from, image := shelve(t, big(), big())
	from.cut[image.layers[0]] = 10_000
	cache := t.TempDir()
	if err := had(t, newStore(t), from, digestOf(image.manifest), cache); err != nil {
		t.Fatal(err)
	}
	if asked := from.asked[image.layers[0]]; len(asked) != 2 || asked[1] != 10_000 {
		t.Error("asked from", asked)
	}
}

// TestNoTreeIsMadeOfWhatIsWrong: whatever is wrong, and in whichever layer, nothing is published and nothing is left.
func TestNoTreeIsMadeOfWhatIsWrong(t *testing.T) {
	for name, spoil := range map[string]struct {
		with func([]byte) []byte
		code string
	}{
		"tampered": {func(b []byte) []byte { return append([]byte{b[0] ^ 1}, b[1:]...) }, CodeCorrupt},
		"within":   {func(b []byte) []byte { c := bytes.Clone(b); c[len(c)/2] ^= 1; return c }, CodeCorrupt},
		"short":    {func(b []byte) []byte { return b[:len(b)-1] }, CodeCorrupt},
		"long":     {func(b []byte) []byte { return append(bytes.Clone(b), 0) }, CodeCorrupt},
		"gone":     {func([]byte) []byte { return nil }, CodeUnavailable},
	} {
		for _, which := range []int{0, 1} {
			t.Run(name+strconv.Itoa(which), func(t *testing.T) {
				from, image := shelve(t, big(), big(), map[string]string{"small": "x"}) // maps come in another order each time, so no layer is the other
				digest := image.layers[which]
				if from.content[digest] = spoil.with(from.content[digest]); from.content[digest] == nil {
					delete(from.content, digest)
				}
				cache, store := t.TempDir(), newStore(t)
				if err := had(t, store, from, digestOf(image.manifest), cache); CodeOf(err) != spoil.code {
					t.Errorf("it said %v", err)
				}
				nothing(t, cache)
				if store.Has(digest, -1) {
					t.Error("a wrong blob is in the store")
				}
			})
		}
	}
}

func TestABombIsGivenUpWhileItComes(t *testing.T) {
	from, image := shelve(t, map[string]string{"a": "1"}, map[string]string{"zeros": strings.Repeat("\x00", 64<<20)})
	cache, store := t.TempDir(), newStore(t)
	if _, err := FetchDocuments(t.Context(), store, from, digestOf(image.manifest)); err != nil {
		t.Fatal(err)
	}
	limits := unpack.DefaultLimits
	limits.GrowthFrom = 1 << 20
	open := make(chan struct{})
	defer close(open)
	// The rest of it never comes, and is not waited for.
	_, err := Unpack(t.Context(), store, digestOf(image.manifest), cache, Making{Limits: limits, From: &gated{from, image.layers[1], open}})
	if CodeOf(err) != CodeRefused {
		t.Errorf("it said %v", err)
	}
	nothing(t, cache)
	if n := partials(t, store); n != 0 {
		t.Errorf("%d files of it are left", n)
	}
}

func TestTwoImagesWithOneLayerFetchItOnce(t *testing.T) {
	from, image := shelve(t, big(), map[string]string{"a": "1"})
	other := *image
	var document document
	_ = json.Unmarshal(image.manifest, &document)
	document.Annotations = map[string]string{"another": "image"}
	other.manifest, _ = json.Marshal(document)
	from.content[digestOf(other.manifest)] = other.manifest
	cache, store := t.TempDir(), newStore(t)
	var all sync.WaitGroup
	failures := make([]error, 4)
	for i := range failures {
		digest := digestOf([][]byte{image.manifest, other.manifest}[i%2])
		all.Go(func() { failures[i] = had(t, ReadStore(store.root), from, digest, cache) })
	}
	all.Wait()
	if err := errors.Join(failures...); err != nil {
		t.Fatal(err)
	}
	for _, layer := range image.layers {
		if len(from.asked[layer]) != 1 {
			t.Errorf("%s was asked for %d times", layer, len(from.asked[layer]))
		}
	}
}

// TestWhatAnImageSaysOfALayerTakesItFromNobody: an image with a wrong DiffID is refused, and the blob, which others use, stays.
func TestWhatAnImageSaysOfALayerTakesItFromNobody(t *testing.T) {
	good := makeImage(t, map[string]string{"a": "1"})
	store := newStore(t)
	record, err := pull(t, store, "oci-layout:"+good.layout(t), Options{})
	if err != nil {
		t.Fatal(err)
	}
	bad := &made{blobs: map[string][]byte{good.layers[0]: good.blobs[good.layers[0]]}, layers: good.layers}
	config, _ := json.Marshal(map[string]any{
		"os": "linux", "architecture": runtime.GOARCH, "rootfs": map[string]any{"type": "layers", "diff_ids": []string{digestOf([]byte("lie"))}},
	})
	bad.blobs[digestOf(config)] = config
	bad.manifest, _ = json.Marshal(document{
		SchemaVersion: 2, MediaType: typeOCIManifest, Config: Descriptor{MediaType: typeOCIConfig, Digest: digestOf(config), Size: int64(len(config))},
		Layers: record.Layers,
	})
	if _, err := pull(t, store, "oci-layout:"+bad.layout(t), Options{}); CodeOf(err) != CodeCorrupt {
		t.Errorf("it said %v", err)
	}
	if !store.Has(good.layers[0], -1) || len(left(t, store, "quarantine")) != 0 {
		t.Error("a right blob was taken away")
	}
}

// TestAPullThatIsCutGoesOnByRange: with a registry that knows ranges, and with one that does not.
func TestAPullThatIsCutGoesOnByRange(t *testing.T) {
	for _, knows := range []bool{true, false} {
		image := makeImage(t, big(), map[string]string{"a": "1"})
		var mu sync.Mutex
		var ranges []string
		silent := log.New(io.Discard, "", 0)
		inner := registry.New(registry.Logger(silent))
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodGet || !strings.HasSuffix(r.URL.Path, "/blobs/"+image.layers[0]) {
				inner.ServeHTTP(w, r)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			ranges = append(ranges, r.Header.Get("Range"))
			whole := image.blobs[image.layers[0]]
			if len(ranges) == 1 {
				w.Header().Set("Content-Length", strconv.Itoa(len(whole)))
				_, _ = w.Write(whole[:len(whole)/2])
				panic(http.ErrAbortHandler)
			}
			if !knows {
				r.Header.Del("Range")
			}
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(whole))
		}))
		server.Config.ErrorLog = silent
		image.push(t, server.URL, "team/cut")
		record, err := pull(t, newStore(t), "registry:"+strings.TrimPrefix(server.URL, "http://")+"/team/cut:v1", Options{})
		server.Close()
		if err != nil || record.Unpacked.Entries != bigFiles+1 {
			t.Fatalf("ranges known: %v: %v", knows, err)
		}
		if half := len(image.blobs[image.layers[0]]) / 2; len(ranges) != 2 || ranges[1] != "bytes="+strconv.Itoa(half)+"-" {
			t.Errorf("asked for %q", ranges)
		}
	}
}

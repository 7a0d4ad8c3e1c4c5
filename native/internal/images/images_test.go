package images

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"

	"atoll.local/native/internal/images/unpack"
)

func tarOf(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for name, body := range files {
		if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(body))}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// made is an image with its blobs, to be written as a layout or pushed to a registry.
type made struct {
	manifest []byte
	blobs    map[string][]byte
	layers   []string
}

func makeImage(t *testing.T, layers ...map[string]string) *made {
	t.Helper()
	image := &made{blobs: make(map[string][]byte)}
	document := document{SchemaVersion: 2, MediaType: typeOCIManifest}
	config := map[string]any{"os": "linux", "architecture": runtime.GOARCH, "config": map[string]any{"Env": []string{"A=1"}, "User": "me", "WorkingDir": "/w"}}
	var diffs []string
	for _, one := range layers {
		raw := tarOf(t, one)
		var zipped bytes.Buffer
		z := gzip.NewWriter(&zipped)
		_, _ = z.Write(raw)
		_ = z.Close()
		digest := digestOf(zipped.Bytes())
		image.blobs[digest] = zipped.Bytes()
		image.layers = append(image.layers, digest)
		diffs = append(diffs, digestOf(raw))
		document.Layers = append(document.Layers, Descriptor{MediaType: typeLayerTar + "+gzip", Digest: digest, Size: int64(zipped.Len())})
	}
	config["rootfs"] = map[string]any{"type": "layers", "diff_ids": diffs}
	content, _ := json.Marshal(config)
	image.blobs[digestOf(content)] = content
	document.Config = Descriptor{MediaType: typeOCIConfig, Digest: digestOf(content), Size: int64(len(content))}
	image.manifest, _ = json.Marshal(document)
	return image
}

func (m *made) layout(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "blobs/sha256"), 0o755); err != nil {
		t.Fatal(err)
	}
	index := document{SchemaVersion: 2, MediaType: typeOCIIndex, Manifests: []Descriptor{{
		MediaType: typeOCIManifest, Digest: digestOf(m.manifest), Size: int64(len(m.manifest)), Annotations: map[string]string{refName: "v1"},
	}}}
	content, _ := json.Marshal(index)
	files := map[string][]byte{"index.json": content, blobName(digestOf(m.manifest)): m.manifest, "oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`)}
	for digest, blob := range m.blobs {
		files[blobName(digest)] = blob
	}
	for name, blob := range files {
		if err := os.WriteFile(filepath.Join(root, name), blob, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func (m *made) push(t *testing.T, server, name string) {
	t.Helper()
	put := func(method, path, kind string, body []byte, want int) {
		request, _ := http.NewRequest(method, server+path, bytes.NewReader(body))
		request.Header.Set("Content-Type", kind)
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if answer.StatusCode != want {
			t.Fatalf("%s %s: %s", method, path, answer.Status)
		}
	}
	for digest, blob := range m.blobs {
		put("POST", fmt.Sprintf("/v2/%s/blobs/uploads/?digest=%s", name, digest), "application/octet-stream", blob, http.StatusCreated)
	}
	put("PUT", fmt.Sprintf("/v2/%s/manifests/v1", name), typeOCIManifest, m.manifest, http.StatusCreated)
}

func quiet(string, int, Descriptor) {}

func pull(t *testing.T, store *Store, source string, options Options) (*Record, error) {
	t.Helper()
	from, err := OpenSource(source, options)
	if err != nil {
		return nil, err
	}
	defer from.Close()
	platform, _ := ParsePlatform("")
	return Pull(t.Context(), store, from, platform, unpack.DefaultLimits, quiet)
}

func newStore(t *testing.T) *Store {
	t.Helper()
	store, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return store
}

func partials(t *testing.T, store *Store) int {
	t.Helper()
	left, err := os.ReadDir(filepath.Join(store.root, "partial"))
	if err != nil {
		t.Fatal(err)
	}
	return len(left)
}

func TestLayoutToRoot(t *testing.T) {
	image := makeImage(t, map[string]string{"etc/hello": "1", "etc/gone": "1"}, map[string]string{"etc/.wh.gone": "", "etc/hello": "2"})
	store, cache := newStore(t), t.TempDir()
	record, err := pull(t, store, "oci-layout:"+image.layout(t)+":v1", Options{})
	if err != nil {
		t.Fatal(err)
	}
	if record.Digest != digestOf(image.manifest) || record.User != "me" || record.WorkingDir != "/w" || len(record.Layers) != 2 {
		t.Errorf("%+v", record)
	}
	var all sync.WaitGroup
	for range 4 { // who comes at the same time gets the same tree
		all.Go(func() {
			if _, err := Unpack(context.Background(), store, record.Digest, cache, Making{Limits: unpack.DefaultLimits}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	tree := filepath.Join(cache, "sha256", strings.TrimPrefix(record.Digest, "sha256:"))
	if content, _ := os.ReadFile(filepath.Join(tree, "rootfs/etc/hello")); string(content) != "2" {
		t.Errorf("hello is %q", content)
	}
	if left, _ := os.ReadDir(filepath.Join(cache, "sha256")); len(left) != 1 {
		t.Errorf("left in the cache: %v", left)
	}
}

func TestRegistryOnceEach(t *testing.T) {
	image := makeImage(t, map[string]string{"a": strings.Repeat("a", 1000)}, map[string]string{"b": "b"}, map[string]string{"c": "c"})
	var fetched atomic.Int64
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
			fetched.Add(1)
		}
		inner.ServeHTTP(w, r)
	}))
	defer server.Close()
	image.push(t, server.URL, "team/app")
	store := newStore(t)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			if _, err := pull(t, store, "registry:"+server.Listener.Addr().String()+"/team/app:v1", Options{}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if fetched.Load() != 4 {
		t.Errorf("%d blobs were fetched, there are 4", fetched.Load())
	}
	for source, code := range map[string]string{"/team/app:v2": CodeUnavailable, "/team/none:v1": CodeUnavailable} {
		if _, err := pull(t, store, "registry:"+server.Listener.Addr().String()+source, Options{}); CodeOf(err) != code {
			t.Errorf("%s: %v", source, err)
		}
	}
}

func TestCredentialsAndMirror(t *testing.T) {
	image := makeImage(t, map[string]string{"a": "a"})
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	open := httptest.NewServer(inner)
	defer open.Close()
	image.push(t, open.URL, "library/app")
	locked := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if name, password, _ := r.BasicAuth(); name != "me" || password != "secret" {
			w.Header().Set("WWW-Authenticate", `Basic realm="here"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	defer locked.Close()
	place := "registry:" + locked.Listener.Addr().String() + "/library/app:v1"
	_, err := pull(t, newStore(t), place, Options{Username: "me", Password: "wr0ng"})
	if CodeOf(err) != CodeDenied || strings.Contains(err.Error(), "wr0ng") {
		t.Errorf("%v", err)
	}
	if _, err := pull(t, newStore(t), place, Options{Username: "me", Password: "secret"}); err != nil {
		t.Error(err)
	}
	mirrors := map[string]string{"index.docker.io": open.Listener.Addr().String()}
	if _, err := pull(t, newStore(t), "registry:app:v1", Options{Mirrors: mirrors}); err != nil {
		t.Error(err)
	}
}

func TestAMirrorIsNotShownTheRegistrysCredentials(t *testing.T) {
	var shown []string
	mirror := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		shown = append(shown, r.Header.Get("Authorization"))
		if r.Header.Get("Authorization") == "" {
			w.Header().Set("WWW-Authenticate", "Basic")
		}
		w.WriteHeader(http.StatusUnauthorized)
	}))
	defer mirror.Close()
	// The registry itself does not answer, and it is the mirror that this is about.
	mirrors := map[string]string{"127.0.0.1:1": mirror.Listener.Addr().String()}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	from, err := OpenSource("registry:127.0.0.1:1/app:v1", Options{Mirrors: mirrors, Username: "ann", Password: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	platform, _ := ParsePlatform("")
	if _, err := from.Resolve(ctx, platform); err == nil {
		t.Fatal("an image came from nowhere")
	}
	if len(shown) == 0 || strings.Join(shown, "") != "" {
		t.Errorf("the mirror was shown %q", shown)
	}
}

func TestPlainHTTPStaysHere(t *testing.T) {
	request := httptest.NewRequest(http.MethodGet, "http://192.168.1.9/v2/", nil)
	if _, err := (&guarded{inner: http.DefaultTransport}).RoundTrip(request); err == nil || !strings.Contains(err.Error(), "plain HTTP") {
		t.Errorf("%v", err)
	}
}

// TestBrokenBlobs: what is not what its digest says never appears in the store.
func TestBrokenBlobs(t *testing.T) {
	for name, spoil := range map[string]func([]byte) []byte{
		"tampered":  func(b []byte) []byte { b = bytes.Clone(b); b[len(b)/2] ^= 1; return b },
		"truncated": func(b []byte) []byte { return b[:len(b)-3] },
		"longer":    func(b []byte) []byte { return append(bytes.Clone(b), 'x') },
		"empty":     func([]byte) []byte { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			image := makeImage(t, map[string]string{"a": "a"})
			layer := image.layers[0]
			image.blobs[layer] = spoil(image.blobs[layer])
			store := newStore(t)
			if _, err := pull(t, store, "oci-layout:"+image.layout(t), Options{}); CodeOf(err) != CodeCorrupt {
				t.Errorf("%v", err)
			}
			if store.Has(layer, -1) || store.Has(digestOf(image.manifest), -1) || partials(t, store) != 0 {
				t.Error("something is in the store")
			}
		})
	}
}

func TestBlobSpoiltLater(t *testing.T) {
	image := makeImage(t, map[string]string{"a": "a"})
	store, cache, from := newStore(t), t.TempDir(), image.layout(t)
	record, err := pull(t, store, "oci-layout:"+from, Options{})
	if err != nil {
		t.Fatal(err)
	}
	path := store.path(image.layers[0])
	spoilt := bytes.Clone(image.blobs[image.layers[0]])
	spoilt[len(spoilt)/2] ^= 1
	if err := os.WriteFile(path, spoilt, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := Unpack(t.Context(), store, record.Digest, cache, Making{Limits: unpack.DefaultLimits}); CodeOf(err) != CodeCorrupt {
		t.Errorf("%v", err)
	}
	if left, _ := os.ReadDir(filepath.Join(cache, "sha256")); len(left) != 0 {
		t.Errorf("left in the cache: %v", left)
	}
	// The spoilt one is in quarantine, so that the next pull mends the store.
	if _, err := pull(t, store, "oci-layout:"+from, Options{}); err != nil {
		t.Error(err)
	}
	if _, err := Unpack(t.Context(), store, record.Digest, cache, Making{Limits: unpack.DefaultLimits}); err != nil {
		t.Error(err)
	}
}

func TestUnpackAfterKill(t *testing.T) {
	image := makeImage(t, map[string]string{"a": "a"})
	store, cache := newStore(t), t.TempDir()
	record, err := pull(t, store, "oci-layout:"+image.layout(t), Options{})
	if err != nil {
		t.Fatal(err)
	}
	hex := strings.TrimPrefix(record.Digest, "sha256:")
	half := filepath.Join(cache, "sha256", ".unfinished-"+hex, "rootfs", "half")
	if err := os.MkdirAll(half, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Unpack(t.Context(), store, record.Digest, cache, Making{Limits: unpack.DefaultLimits}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(cache, "sha256", hex, "rootfs", "half")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what a killed run left is in the tree: %v", err)
	}
}

func TestSavedArchive(t *testing.T) {
	one, two := tarOf(t, map[string]string{"a": "1"}), tarOf(t, map[string]string{"b": "2"})
	config := fmt.Sprintf(`{"os":"linux","architecture":%q,"config":{},"rootfs":{"type":"layers","diff_ids":[%q,%q]}}`, runtime.GOARCH, digestOf(one), digestOf(two))
	name := filepath.Join(t.TempDir(), "saved.tar")
	saved := tarOf(t, map[string]string{
		"manifest.json": `[{"Config":"c.json","RepoTags":["app:v1"],"Layers":["1/layer.tar","2/layer.tar"]}]`,
		"c.json":        config, "1/layer.tar": string(one), "2/layer.tar": string(two),
	})
	if err := os.WriteFile(name, saved, 0o644); err != nil {
		t.Fatal(err)
	}
	store, cache := newStore(t), t.TempDir()
	record, err := pull(t, store, "docker-archive:"+name, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Unpack(t.Context(), store, record.Digest, cache, Making{Limits: unpack.DefaultLimits}); err != nil {
		t.Fatal(err)
	}
	if _, err := pull(t, newStore(t), "archive:"+name+":v2", Options{}); CodeOf(err) != CodeInvalid {
		t.Errorf("%v", err)
	}
}

func TestDocumentsRefused(t *testing.T) {
	digest := digestOf(nil)
	for name, row := range map[string]struct{ content, code string }{
		"no json":       {"{", CodeCorrupt},
		"old schema":    {`{"schemaVersion":1}`, CodeRefused},
		"index":         {`{"schemaVersion":2,"manifests":[{"digest":"sha256:x"}]}`, CodeRefused},
		"both":          {`{"schemaVersion":2,"manifests":[{}],"layers":[{}]}`, CodeRefused},
		"short digest":  {`{"schemaVersion":2,"config":{"digest":"sha256:../../x"}}`, CodeRefused},
		"foreign layer": {fmt.Sprintf(`{"schemaVersion":2,"config":{"digest":%q},"layers":[{"digest":%q,"urls":["http://x"]}]}`, digest, digest), CodeRefused},
		"no layer":      {fmt.Sprintf(`{"schemaVersion":2,"config":{"digest":%q},"layers":[{"digest":%q,"mediaType":"text/plain"}]}`, digest, digest), CodeRefused},
	} {
		if _, err := imageOf(digest, []byte(row.content)); CodeOf(err) != row.code {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzDocuments(f *testing.F) {
	f.Add([]byte(`{"schemaVersion":2,"config":{"digest":"sha256:x"},"layers":[]}`))
	f.Fuzz(func(t *testing.T, content []byte) {
		image, err := imageOf(digestOf(content), content)
		if (image == nil) == (err == nil) {
			t.Error("neither an image nor an error, or both")
		}
	})
}

package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/distribution/distribution/v3/registry/handlers"
	"github.com/sirupsen/logrus"
)

// world is a registry without tokens, on a directory of its own.
type world struct {
	t         *testing.T
	server    *httptest.Server
	collector *collector
	touched   *touches
}

func TestMain(m *testing.M) {
	logrus.SetOutput(io.Discard)
	os.Exit(m.Run())
}

// knows has everybody do everything, but for those who say that they are strangers.
func knows(r *http.Request, _, _ string) bool { return r.Header.Get("Stranger") == "" }

func newWorld(t *testing.T, change func(*Config)) *world {
	t.Helper()
	config := Config{Root: t.TempDir(), UploadsMax: 8, UploadMax: 1 << 20, KeptSeconds: 3600}
	if change != nil {
		change(&config)
	}
	engine := config.engine()
	engine.Auth = nil
	touched := &touches{names: names{config.Root}}
	kept, err := newManifests(t.Context(), config, touched, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(newGuard(handlers.NewApp(t.Context(), engine), config, kept, knows))
	t.Cleanup(server.Close)
	return &world{t, server, &collector{config: config, touched: touched, log: slog.New(slog.DiscardHandler)}, touched}
}

func (w *world) do(method, path, kind string, body []byte) *http.Response {
	w.t.Helper()
	if !strings.HasPrefix(path, "http") {
		path = w.server.URL + path
	}
	request, err := http.NewRequestWithContext(w.t.Context(), method, path, bytes.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	if kind != "" {
		request.Header.Set("Content-Type", kind)
	}
	request.Header.Set("Accept", manifestKind)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		w.t.Fatal(err)
	}
	said, _ := io.ReadAll(response.Body)
	if response.StatusCode >= 400 {
		w.t.Logf("%s %s: %d %s", method, path, response.StatusCode, said)
	}
	_ = response.Body.Close()
	return response
}

func sum(content []byte) string {
	whole := sha256.Sum256(content)
	return "sha256:" + hex.EncodeToString(whole[:])
}

func (w *world) blob(content string) string {
	w.t.Helper()
	begun := w.do("POST", "/v2/team/app/blobs/uploads/", "", nil)
	sign := "?"
	if strings.Contains(begun.Header.Get("Location"), "?") {
		sign = "&"
	}
	done := w.do("PUT", begun.Header.Get("Location")+sign+"digest="+sum([]byte(content)), "application/octet-stream", []byte(content))
	if done.StatusCode != http.StatusCreated {
		w.t.Fatalf("upload: %d", done.StatusCode)
	}
	return sum([]byte(content))
}

const manifestKind = "application/vnd.oci.image.manifest.v1+json"

func manifest(layer string, size int) []byte {
	config := `{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"` + layer + `","size":` + fmt.Sprint(size) + `}`
	return []byte(`{"schemaVersion":2,"mediaType":"` + manifestKind + `","config":` + config + `,"layers":[]}`)
}

// age makes every file of the store look unused for a day.
func (w *world) age() {
	w.t.Helper()
	old := time.Now().Add(-24 * time.Hour)
	err := filepath.WalkDir(w.collector.config.Root, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		return os.Chtimes(path, old, old)
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) collect(dryRun bool) *Collected {
	w.t.Helper()
	done, err := w.collector.collect(w.t.Context(), dryRun)
	if err != nil {
		w.t.Fatal(err)
	}
	return done
}

func TestCollectionTakesWhatNothingRefersTo(t *testing.T) {
	w := newWorld(t, nil)
	w.collect(false) // of an empty store
	used, loose := w.blob("used"), w.blob("loose")
	if made := w.do("PUT", "/v2/team/app/manifests/one", manifestKind, manifest(used, 4)); made.StatusCode != http.StatusCreated {
		t.Fatalf("manifest: %d", made.StatusCode)
	}
	if done := w.collect(false); len(done.Blobs) != 0 || done.Kept == 0 {
		t.Fatalf("what has just come was taken, or not seen: %+v", done)
	}
	w.age()
	if done := w.collect(true); len(done.Blobs) != 1 || done.Blobs[0] != loose {
		t.Fatalf("dry run: %+v", done)
	}
	if found := w.do("HEAD", "/v2/team/app/blobs/"+loose, "", nil); found.StatusCode != http.StatusOK {
		t.Fatalf("a dry run removed something: %d", found.StatusCode)
	}
	// That look counts: who was told that it is there may rely on it.
	if done := w.collect(false); len(done.Blobs) != 0 {
		t.Fatalf("what a client has just been told of was taken: %+v", done)
	}
	w.age()
	if done := w.collect(false); len(done.Blobs) != 1 || done.Bytes != 5 {
		t.Fatalf("collection: %+v", done)
	}
	if found := w.do("HEAD", "/v2/team/app/blobs/"+loose, "", nil); found.StatusCode != http.StatusNotFound {
		t.Fatalf("still there: %d", found.StatusCode)
	}
	if found := w.do("GET", "/v2/team/app/blobs/"+used, "", nil); found.StatusCode != http.StatusOK {
		t.Fatalf("what an image needs was taken: %d", found.StatusCode)
	}
}

func TestAStrangersLookKeepsNothing(t *testing.T) {
	w := newWorld(t, func(config *Config) { config.UploadsMax = 0 })
	if begun := w.do("POST", "/v2/team/app/blobs/uploads/", "", nil); begun.StatusCode != http.StatusTooManyRequests {
		t.Fatalf("a place for an upload where there is none: %d", begun.StatusCode)
	}
	ask := func(method, path string, stranger bool) int {
		r := httptest.NewRequestWithContext(t.Context(), method, path, nil)
		if stranger {
			r.Header.Set("Stranger", "yes")
		}
		said := httptest.NewRecorder()
		w.server.Config.Handler.ServeHTTP(said, r)
		return said.Code
	}
	// The engine says what it thinks of them: they wait for no place.
	if said := ask("POST", "/v2/team/app/blobs/uploads/", true); said != http.StatusAccepted {
		t.Fatalf("it was not led to the engine: %d", said)
	}
	w = newWorld(t, nil)
	loose := w.blob("loose")
	w.age()
	ask("HEAD", "/v2/team/app/blobs/"+loose, true)
	ask("POST", "/v2/other/app/blobs/uploads/?from=team/app&mount="+loose, true)
	if done := w.collect(true); len(done.Blobs) != 1 {
		t.Fatalf("a stranger has kept it: %+v", done)
	}
	ask("HEAD", "/v2/team/app/blobs/"+loose, false)
	if done := w.collect(true); len(done.Blobs) != 0 {
		t.Fatalf("a client's look did not count: %+v", done)
	}
}

func TestPushesDuringCollectionLoseNothing(t *testing.T) {
	w := newWorld(t, nil)
	const count = 40
	blobs := make([]string, count)
	for at := range blobs {
		blobs[at] = w.blob(fmt.Sprintf("content %03d", at))
	}
	w.age()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				_, _ = w.collector.collect(t.Context(), false)
			}
		}
	}()
	kept := 0
	for at, layer := range blobs {
		path := fmt.Sprintf("/v2/team/app/manifests/tag%03d", at)
		made := w.do("PUT", path, manifestKind, manifest(layer, 11))
		if made.StatusCode == http.StatusCreated {
			kept++
			continue
		}
		// Taken before the client named it: the client sends it again.
		w.blob(fmt.Sprintf("content %03d", at))
		if again := w.do("PUT", path, manifestKind, manifest(layer, 11)); again.StatusCode != http.StatusCreated {
			t.Fatalf("after a new upload: %d", again.StatusCode)
		}
	}
	close(stop)
	<-stopped
	w.age()
	w.collect(false)
	for at, layer := range blobs {
		for _, path := range []string{fmt.Sprintf("/v2/team/app/manifests/tag%03d", at), "/v2/team/app/blobs/" + layer} {
			if found := w.do("GET", path, "", nil); found.StatusCode != http.StatusOK {
				t.Fatalf("%s: %d (%d were there without a second upload)", path, found.StatusCode, kept)
			}
		}
	}
}

func TestNoRoomIsSaid(t *testing.T) {
	full := newWorld(t, func(config *Config) { config.SpareBytes = 1 << 62 })
	if begun := full.do("POST", "/v2/team/app/blobs/uploads/", "", nil); begun.StatusCode != http.StatusInsufficientStorage {
		t.Fatalf("full disk: %d", begun.StatusCode)
	}
	w := newWorld(t, nil)
	begun := w.do("POST", "/v2/team/app/blobs/uploads/", "", nil)
	if large := w.do("PATCH", begun.Header.Get("Location"), "", make([]byte, 2<<20)); large.StatusCode != http.StatusRequestEntityTooLarge {
		t.Fatalf("too large: %d", large.StatusCode)
	}
}

func TestADiskThatGetsFullInAnUploadIsSaid(t *testing.T) {
	w := newWorld(t, func(config *Config) { config.UploadMax, config.SpareBytes = 1<<30, 1<<20 })
	stands := w.server.Config.Handler.(*guard)
	content := strings.Repeat("0123456789abcdef", 3*lookBytes/16)
	for name, left := range map[string][]int64{
		"in the body": {1 << 40, 1 << 40, 0},
		// What the engine could not write, whatever it says of that.
		"in the engine": {1 << 40, 1 << 40, 1 << 40, 1 << 40, 0},
	} {
		begun := w.do("POST", "/v2/team/app/blobs/uploads/", "", nil)
		looks := 0
		stands.free = func() (int64, bool) {
			looks++
			return left[min(looks, len(left))-1], true
		}
		next := stands.next
		if name == "in the engine" {
			stands.next = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				http.Error(w, "write: no space left on device", http.StatusInternalServerError)
			})
		}
		request, err := http.NewRequestWithContext(t.Context(), "PATCH", w.server.URL+begun.Header.Get("Location"), io.MultiReader(strings.NewReader(content)))
		if err != nil {
			t.Fatal(err)
		}
		said, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(said.Body)
		_ = said.Body.Close()
		if said.StatusCode != http.StatusInsufficientStorage || !strings.Contains(string(body), "disk is full") {
			t.Fatalf("%s: %d %s", name, said.StatusCode, body)
		}
		stands.next = next
		stands.free = func() (int64, bool) { return 1 << 40, true }
		w.blob("there is room again " + name)
	}
}

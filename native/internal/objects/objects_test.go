package objects

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

func digestOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "sha256:" + hex.EncodeToString(sum[:])
}

func TestAFolderKeepsWhatItsNameSaysAndNothingElse(t *testing.T) {
	folder, ctx := OpenFolder(t.TempDir()), context.Background()
	name := Blob(digestOf("content"))
	for _, wrong := range []string{"contenT", "conten", "content!"} {
		if err := folder.Put(ctx, name, 7, strings.NewReader(wrong)); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("%q: %v", wrong, err)
		}
	}
	if _, err := folder.Head(ctx, name); !errors.Is(err, ErrMissing) {
		t.Fatal("a wrong one is there:", err)
	}
	if err := folder.Put(ctx, name, 7, strings.NewReader("content")); err != nil {
		t.Fatal(err)
	}
	part, err := folder.Get(ctx, name, 3, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer part.Close()
	if read, _ := io.ReadAll(part); string(read) != "te" {
		t.Fatalf("read %q", read)
	}
	var found []Info
	if err := folder.List(ctx, Blobs, func(one Info) error { found = append(found, one); return nil }); err != nil {
		t.Fatal(err)
	}
	if len(found) != 1 || found[0] != (Info{name, 7}) {
		t.Fatal("listed", found)
	}
	for range 2 {
		if err := folder.Delete(ctx, name); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := folder.Get(ctx, name, 0, -1); !errors.Is(err, ErrMissing) {
		t.Fatal(err)
	}
	if err := folder.Put(ctx, Blob("sha256:../../etc"), 0, strings.NewReader("")); !errors.Is(err, ErrName) {
		t.Fatal(err)
	}
}

func TestAConnectionOnWhichNothingComesIsGivenUp(t *testing.T) {
	release := make(chan struct{})
	silent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "con")
		w.(http.Flusher).Flush()
		<-release
	}))
	defer silent.Close()
	defer close(release)
	control, err := OpenControl(ControlSettings{URLs: []string{silent.URL}})
	if err != nil {
		t.Fatal(err)
	}
	control.quiet = 50 * time.Millisecond
	body, err := control.Get(t.Context(), Blob(digestOf("content")), 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	if read, err := io.ReadAll(body); err == nil || string(read) != "con" {
		t.Fatalf("read %q, %v", read, err)
	}
}

func TestControlIsAskedReplicaAfterReplicaAndItsCredentialGoesNowhereElse(t *testing.T) {
	name := Blob(digestOf("content"))
	shown := ""
	thief := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { shown += r.Header.Get("Authorization") }))
	defer thief.Close()
	leading := httptest.NewServer(http.RedirectHandler(thief.URL, http.StatusTemporaryRedirect))
	defer leading.Close()
	good := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer key" || r.Header.Get("Range") != "bytes=3-" {
			t.Error("asked with", r.Header)
		}
		w.WriteHeader(http.StatusPartialContent)
		_, _ = io.WriteString(w, "tent")
	}))
	defer good.Close()
	control, err := OpenControl(ControlSettings{URLs: []string{leading.URL, good.URL}, Credential: "key"})
	if err != nil {
		t.Fatal(err)
	}
	body, err := control.Get(t.Context(), name, 3, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	if read, _ := io.ReadAll(body); string(read) != "tent" || shown != "" {
		t.Fatalf("read %q", read)
	}
	if _, err := OpenControl(ControlSettings{URLs: []string{"http://10.0.0.1:3443"}}); err == nil {
		t.Fatal("a credential would go over the network in clear")
	}
}

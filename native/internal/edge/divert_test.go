package edge

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"testing"
	"time"
)

// large gives bytes that don't repeat, in a size that is no multiple of anything.
func large(size int) []byte {
	content := make([]byte, size)
	source := rand.NewChaCha8([32]byte{7})
	_, _ = source.Read(content)
	return content
}

func TestAnAnswerOfKnownLengthIsWhole(t *testing.T) {
	sizes := []int{divertFrom - 1, divertFrom, divertFrom + 1, 5<<20 + 12345}
	content := large(sizes[len(sizes)-1])
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		size, _ := strconv.Atoi(r.URL.Query().Get("size"))
		w.Header().Set("Content-Length", strconv.Itoa(size))
		if pieces := r.URL.Query().Get("pieces"); pieces != "" {
			step, _ := strconv.Atoi(pieces)
			for start := 0; start < size; start += step {
				_, _ = w.Write(content[start:min(start+step, size)])
				_ = http.NewResponseController(w).Flush()
			}
			return
		}
		_, _ = w.Write(content[:size])
	})
	bothWires(t, func(t *testing.T, transport *http.Transport) {
		for _, size := range sizes {
			for _, pieces := range []string{"", "1000", "70000"} {
				before := te.metrics.bytesOut.Load()
				path := fmt.Sprintf("/?size=%d&pieces=%s", size, pieces)
				response, err := transport.RoundTrip(te.request(t, http.MethodGet, path, g.id, 0, nil))
				if err != nil {
					t.Fatal(err)
				}
				body, err := io.ReadAll(response.Body)
				_ = response.Body.Close()
				if err != nil || sha256.Sum256(body) != sha256.Sum256(content[:size]) {
					t.Fatalf("%s: %d bytes, %v", path, len(body), err)
				}
				eventually(t, "the bytes are counted", func() bool { return te.metrics.bytesOut.Load()-before == int64(size) })
			}
		}
	})
}

// A guest that breaks off, and a sandbox that ends, leave no answer that looks whole, and no client that hangs.
func TestADownloadThatIsCutIsNotWhole(t *testing.T) {
	content := bytes.Repeat([]byte("x"), 1<<20)
	hold := make(chan struct{})
	te, g, control := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", strconv.Itoa(4*len(content)))
		_, _ = w.Write(content)
		_ = http.NewResponseController(w).Flush()
		if r.URL.Path == "/break" {
			panic(http.ErrAbortHandler)
		}
		select {
		case <-r.Context().Done():
		case <-hold:
		}
	})
	defer close(hold)
	transport := h1Transport(t)
	for _, path := range []string{"/break", "/hold"} {
		response, err := transport.RoundTrip(te.request(t, http.MethodGet, path, g.id, 0, nil))
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(content))
		if _, err := io.ReadFull(response.Body, got); err != nil || !bytes.Equal(got, content) {
			t.Fatalf("%s: what was sent did not come: %v", path, err)
		}
		began := time.Now()
		if path == "/hold" {
			control.end(g.id)
		}
		rest, err := io.ReadAll(response.Body)
		_ = response.Body.Close()
		if err == nil || len(rest) != 0 {
			t.Errorf("%s: it ended as if it were whole: %d bytes more, %v", path, len(rest), err)
		}
		if took := time.Since(began); took > cutLimit {
			t.Errorf("%s: cut after %v", path, took)
		}
	}
}

// Two downloads over one connection to the guest, one after the other: each has its own bytes.
func TestAConnectionIsFitForTheNextDownload(t *testing.T) {
	content := large(3 << 20)
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		start, _ := strconv.Atoi(r.URL.Query().Get("start"))
		w.Header().Set("Content-Length", strconv.Itoa(1<<20))
		w.Header().Set("Peer", r.RemoteAddr)
		_, _ = w.Write(content[start : start+1<<20])
	})
	transport := h1Transport(t)
	peers := map[string]bool{}
	for round := range 12 {
		start := (round % 3) << 19
		response, err := transport.RoundTrip(te.request(t, http.MethodGet, fmt.Sprintf("/?start=%d", start), g.id, 0, nil))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		_ = response.Body.Close()
		if err != nil || !bytes.Equal(body, content[start:start+1<<20]) {
			t.Fatalf("round %d: %d bytes, %v", round, len(body), err)
		}
		peers[response.Header.Get("Peer")] = true
	}
	if len(peers) != 1 {
		t.Errorf("12 downloads used %d connections to the guest", len(peers))
	}
}

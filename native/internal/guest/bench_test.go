package guest

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
)

// The benchmarks drive a real guest over loopback, client and server in one process:
// go test -run xxx -bench . ./internal/guest

func (b *box) discard(r *http.Request) int64 {
	b.t.Helper()
	response, err := b.client.Do(r)
	must(b.t, err)
	defer response.Body.Close()
	n, err := io.Copy(io.Discard, response.Body)
	must(b.t, err)
	if response.StatusCode != http.StatusOK {
		b.t.Fatal(response.StatusCode)
	}
	return n
}

func (b *box) processRequest(request m) *http.Request {
	b.t.Helper()
	text, err := json.Marshal(request)
	must(b.t, err)
	r := b.request("POST", "/process.Process/Start", bytes.NewReader(envelope(0, text)))
	r.Header.Set("Content-Type", "application/connect+json")
	return r
}

func BenchmarkStartTrue(b *testing.B) {
	guest := newBox(b)
	for b.Loop() {
		guest.discard(guest.processRequest(m{"process": m{"cmd": "/bin/true"}}))
	}
}

func BenchmarkStdout(b *testing.B) {
	guest := newBox(b)
	const size = 64 << 20
	b.SetBytes(size)
	for b.Loop() {
		guest.discard(guest.processRequest(m{"process": m{"cmd": "head", "args": []string{"-c", "67108864", "/dev/zero"}}}))
	}
}

func BenchmarkUpload(b *testing.B) {
	guest := newBox(b)
	content := strings.Repeat("x", 64<<20)
	b.SetBytes(int64(len(content)))
	for b.Loop() {
		if status, body := guest.put("f", content); status != http.StatusOK {
			b.Fatal(body)
		}
	}
}

func BenchmarkDownload(b *testing.B) {
	guest := newBox(b)
	_, _ = guest.put("f", strings.Repeat("x", 64<<20))
	b.SetBytes(64 << 20)
	for b.Loop() {
		guest.discard(guest.request("GET", "/files"+query("path", "f"), nil))
	}
}

func BenchmarkStat(b *testing.B) {
	guest := newBox(b)
	for b.Loop() {
		if e := guest.unary("filesystem.Filesystem/Stat", m{"path": "~"}, nil); e != nil {
			b.Fatal(e)
		}
	}
}

package edge

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestTooManyRequestsOfOneSandbox(t *testing.T) {
	te, g, control := oneGuest(t, streaming, func(c *Config) { c.Limits.PerSandbox = 3 })
	for range 3 {
		response, err := h1Transport(t).RoundTrip(te.request(t, http.MethodGet, "/", g.id, 0, nil))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = response.Body.Close() }()
	}
	response, body := te.get(t, "/", g.id, 0)
	expect(t, response, body, 429, `{"sandboxId":"`+g.id+
		`","message":"The sandbox has too many concurrent incoming connections (limit: 3)","code":429,"connectionLimit":3}`)
	other := newGuest(t)
	control.put(other.serveGuest(say("other")))
	te.waitFor(t, other.id)
	response, body = te.get(t, "/", other.id, 0)
	expect(t, response, body, 200, "other")
}

func TestTooManyConnections(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control, func(c *Config) { c.Limits.Connections = 5 })
	control.setAPI(say("ok"))
	var held []net.Conn
	for range 5 {
		conn, err := net.Dial("tcp", te.address)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, conn)
	}
	eventually(t, "five are counted", func() bool { return te.metrics.connections.Load() == 5 })
	r, _ := http.NewRequest(http.MethodGet, te.url+"/", nil)
	response, body := do(t, r)
	if response.StatusCode != 429 || !strings.Contains(body, "Too many connections") || !response.Close {
		t.Fatalf("%d %s", response.StatusCode, body)
	}
	for _, conn := range held {
		_ = conn.Close()
	}
	eventually(t, "there is room again", func() bool { return te.metrics.connections.Load() == 0 })
	response, body = do(t, r)
	expect(t, response, body, 200, "ok")
	// Far above the limit nobody is heard.
	for range 5 + overLimit {
		conn, err := net.Dial("tcp", te.address)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
	}
	eventually(t, "all are counted", func() bool { return te.metrics.connections.Load() == 5+overLimit })
	conn, err := net.Dial("tcp", te.address)
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Fatal("it was heard")
	}
}

func TestTooManyRequestsOverFewConnections(t *testing.T) {
	te, g, _ := oneGuest(t, streaming, func(c *Config) { c.Limits.Requests = 4 })
	transport := h2cTransport(t)
	for n := range 6 {
		response, err := transport.RoundTrip(te.request(t, http.MethodGet, "/", g.id, 0, nil))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = response.Body.Close() }()
		if want := map[bool]int{true: 200, false: 429}[n < 4]; response.StatusCode != want {
			t.Fatalf("request %d: %d, want %d", n, response.StatusCode, want)
		}
	}
	if te.metrics.connections.Load() != 1 || te.metrics.requestsRefused.Load() != 2 {
		t.Fatalf("%d connections, %d refused", te.metrics.connections.Load(), te.metrics.requestsRefused.Load())
	}
}

func TestLargeHeadersAreRefused(t *testing.T) {
	te, g, _ := oneGuest(t, say("guest"))
	r := te.request(t, http.MethodGet, "/", g.id, 0, nil)
	r.Header.Set("X-Large", strings.Repeat("x", 40<<10))
	response, body := do(t, r)
	expect(t, response, body, 200, "guest")
	r.Header.Set("X-Large", strings.Repeat("x", 100<<10))
	response, err := h1Transport(t).RoundTrip(r)
	if err == nil && response.StatusCode != 431 {
		t.Fatal(response.Status)
	}
}

func TestSlowHeadersAreCutOff(t *testing.T) {
	te, _, _ := oneGuest(t, say("guest"), func(c *Config) { c.Limits.HeaderTimeoutS = 1 })
	for _, first := range []string{"", "GET / HTTP/1.1\r\nHost: x\r\nX-", "PRI * HT"} {
		conn, err := net.Dial("tcp", te.address)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		_, _ = io.WriteString(conn, first)
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
		began := time.Now()
		if _, err := io.ReadAll(conn); err != nil || time.Since(began) > 5*time.Second {
			t.Errorf("%q: %v after %v", first, err, time.Since(began))
		}
	}
}

func TestStoppingLetsRequestsFinish(t *testing.T) {
	release := make(chan struct{})
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "begun\n")
		w.(http.Flusher).Flush()
		if r.URL.Path == "/short" {
			<-release
			_, _ = io.WriteString(w, "done\n")
			return
		}
		<-r.Context().Done()
	}, func(c *Config) { c.Limits.DrainS = 1 })
	readers := map[string]*bufio.Reader{}
	for _, path := range []string{"/short", "/long"} {
		response, err := h1Transport(t).RoundTrip(te.request(t, http.MethodGet, path, g.id, 0, nil))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = response.Body.Close() }()
		readers[path] = bufio.NewReader(response.Body)
		_, _ = readers[path].ReadString('\n')
	}
	port := g.serve(0, upgrading(func(_ net.Conn, early *bufio.Reader) { _, _ = io.ReadAll(early) }))
	_, upgradedReader, _ := te.upgraded(t, "/", g.id, port, "websocket")
	te.stop()
	eventually(t, "it is draining", te.draining.Load)
	close(release)
	if line, err := readers["/short"].ReadString('\n'); err != nil || line != "done\n" {
		t.Fatalf("%q %v", line, err)
	}
	if _, err := readers["/long"].ReadString('\n'); err == nil || err == io.EOF {
		t.Fatal(err)
	}
	if _, err := upgradedReader.ReadByte(); err == nil {
		t.Fatal("an upgraded connection outlives the edge")
	}
	select {
	case <-te.stopped:
	case <-time.After(5 * time.Second):
		t.Fatal("it does not stop")
	}
	if _, err := net.Dial("tcp", te.address); err == nil {
		t.Fatal("it still listens")
	}
}

func TestAdmin(t *testing.T) {
	te, g, control := oneGuest(t, say("guest"))
	control.setAPI(say("api"))
	_, _ = te.get(t, "/?signature=hidden", g.id, 0)
	_, _ = te.get(t, "/", g.id, 9)
	r, _ := http.NewRequest(http.MethodGet, te.url+"/x", nil)
	_, _ = do(t, r)
	admin := httptest.NewServer(te.adminHandler())
	defer admin.Close()
	r, _ = http.NewRequest(http.MethodGet, admin.URL+"/healthz", nil)
	response, body := do(t, r)
	var health struct {
		Name    string
		Version string
		Healthy bool
		Routes  int
		Synced  bool
	}
	if err := json.Unmarshal([]byte(body), &health); err != nil || response.StatusCode != 200 || health.Name != "edge" ||
		!health.Healthy || !health.Synced || health.Routes != 1 || health.Version == "" {
		t.Fatalf("%s %v", body, err)
	}
	r, _ = http.NewRequest(http.MethodGet, admin.URL+"/metrics", nil)
	_, body = do(t, r)
	if !containsAll(body, "atoll_edge_routes 1\n", "atoll_edge_synced 1\n", `atoll_edge_sandbox_requests_total{class="2xx"} 1`,
		`atoll_edge_api_requests_total{class="2xx"} 1`, `atoll_edge_refused_total{status="502"} 1`, "process_resident_memory_bytes ") {
		t.Fatal(body)
	}
	for _, secret := range []string{g.id, edgeToken, "hidden"} {
		if strings.Contains(body, secret) || strings.Contains(te.logs.String(), secret) {
			t.Fatalf("%q is shown", secret)
		}
	}
}

func TestAFaultOfOursEndsOneRequestOnly(t *testing.T) {
	te, g, _ := oneGuest(t, say("guest"))
	broken := &Edge{config: te.config, log: te.log, metrics: te.metrics} // no table: it cannot but fail
	server := httptest.NewServer(broken)
	defer server.Close()
	r, _ := http.NewRequest(http.MethodGet, server.URL+"/?signature=hidden", nil)
	r.Header.Set(headerID, g.id)
	if response, err := h1Transport(t).RoundTrip(r); err == nil {
		t.Fatal(response.Status)
	}
	if logs := te.logs.String(); !strings.Contains(logs, "edge.request.fault") || strings.Contains(logs, "hidden") {
		t.Fatal(logs)
	}
	response, body := te.get(t, "/", g.id, 0)
	expect(t, response, body, 200, "guest")
}

func TestConfig(t *testing.T) {
	file := filepath.Join(t.TempDir(), "edge.json")
	load := func(text string) (Config, error) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return LoadConfig(file)
	}
	good := `{"listen":"127.0.0.1:3000","admin":"127.0.0.1:3002","control":"http://127.0.0.1:3001/","token_file":"t","domain":"localhost:3000","edge_id":"edge-local","later":1}`
	config, err := load(good)
	if err != nil || config.Control != "http://127.0.0.1:3001" || config.EdgeID != "edge-local" || hostName(config.Domain) != "localhost" {
		t.Fatalf("%+v %v", config, err)
	}
	for _, bad := range []string{
		``, `{}`, strings.Replace(good, "http://", "ftp://", 1), strings.Replace(good, "127.0.0.1:3002", "0.0.0.0:3002", 1),
		strings.Replace(good, `"127.0.0.1:3000"`, `"nowhere"`, 1),
	} {
		if _, err := load(bad); err == nil {
			t.Errorf("%s was taken", bad)
		}
	}
	var limits Limits
	limits.fill()
	if limits.Connections < 64 || limits.PerSandbox != 1024 || limits.HeaderBytes != 64<<10 || limits.DrainS != 5 {
		t.Fatalf("%+v", limits)
	}
}

func TestRates(t *testing.T) {
	r := newRates(1, 3)
	taken := 0
	for range 10 {
		if r.take("a") {
			taken++
		}
	}
	if taken != 3 || !r.take("b") {
		t.Fatalf("%d taken", taken)
	}
	for n := range 10000 {
		r.take(fmt.Sprint(n))
	}
	if len(r.buckets) > 4096 {
		t.Fatalf("%d buckets", len(r.buckets))
	}
}

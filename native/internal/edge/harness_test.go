package edge

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const edgeToken = "edge-secret-token"

// fakeControl speaks control's side of the edge's protocol, and an API behind it. It can go away and come back.
type fakeControl struct {
	t       *testing.T
	address string

	mu          sync.Mutex
	incarnation string
	cursor      int64
	routes      map[string]*Route
	streams     map[chan any]struct{}
	silent      bool // changes are recorded but not streamed
	server      *http.Server
	api         http.Handler
	answerDelay time.Duration

	lookups, locates, streamOpens atomic.Int64
	wakes                         atomic.Int64
	wake                          func(id string) *Route
	located                       map[string]string // signature -> sandbox
}

func newFakeControl(t *testing.T) *fakeControl {
	c := &fakeControl{
		t: t, incarnation: "inc-1", routes: map[string]*Route{}, streams: map[chan any]struct{}{}, located: map[string]string{},
		api: http.NotFoundHandler(),
	}
	c.start()
	t.Cleanup(c.stop)
	return c
}

func (c *fakeControl) start() {
	address := c.address
	if address == "" {
		address = "127.0.0.1:0"
	}
	var listener net.Listener
	var err error
	for range 100 {
		if listener, err = net.Listen("tcp", address); err == nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	c.address = listener.Addr().String()
	c.server = &http.Server{Handler: c}
	go func(server *http.Server) { _ = server.Serve(listener) }(c.server)
}

// stop is a kill: connections break.
func (c *fakeControl) stop() { _ = c.server.Close() }

func (c *fakeControl) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	rest, internal := strings.CutPrefix(r.URL.Path, "/internal/edge/v1/")
	if !internal {
		c.mu.Lock()
		api := c.api
		c.mu.Unlock()
		api.ServeHTTP(w, r)
		return
	}
	if r.Header.Get("Authorization") != "Bearer "+edgeToken {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	switch {
	case rest == "routes/stream":
		c.serveStream(w, r)
	case strings.HasSuffix(rest, "/wake") && r.Method == http.MethodPost:
		c.wakes.Add(1)
		id := strings.TrimSuffix(strings.TrimPrefix(rest, "routes/"), "/wake")
		route := c.wake(id)
		if route == nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		_ = json.NewEncoder(w).Encode(route)
	case strings.HasPrefix(rest, "routes/"):
		c.lookups.Add(1)
		c.mu.Lock()
		delay := c.answerDelay
		route := c.routes[strings.TrimPrefix(rest, "routes/")]
		c.mu.Unlock()
		time.Sleep(delay)
		if route == nil {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		_ = json.NewEncoder(w).Encode(route)
	case rest == "locate" && r.Method == http.MethodPost:
		c.locates.Add(1)
		var signed signedPath
		_ = json.NewDecoder(r.Body).Decode(&signed)
		c.mu.Lock()
		id := c.located[signed.Operation+" "+signed.Path+" "+signed.Signature]
		c.mu.Unlock()
		if id == "" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]string{"sandbox_id": id})
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

func (c *fakeControl) serveStream(w http.ResponseWriter, r *http.Request) {
	c.streamOpens.Add(1)
	lines := make(chan any, 1000)
	c.mu.Lock()
	all := make([]*Route, 0, len(c.routes))
	for _, route := range c.routes {
		all = append(all, route)
	}
	lines <- map[string]any{"type": "snapshot", "incarnation": c.incarnation, "cursor": c.cursor, "routes": all}
	c.streams[lines] = struct{}{}
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.streams, lines)
		c.mu.Unlock()
	}()
	for {
		select {
		case line := <-lines:
			_ = json.NewEncoder(w).Encode(line)
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

func (c *fakeControl) sayLocked(line map[string]any) {
	c.cursor++
	line["cursor"] = c.cursor
	if c.silent {
		return
	}
	for stream := range c.streams {
		stream <- line
	}
}

// put sets a route and streams it.
func (c *fakeControl) put(route Route) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.routes[route.SandboxID] = &route
	c.sayLocked(map[string]any{"type": "route", "route": &route})
}

// end removes a route and streams that.
func (c *fakeControl) end(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	revision := int64(1)
	if route := c.routes[id]; route != nil {
		revision = route.Revision + 1
	}
	delete(c.routes, id)
	c.sayLocked(map[string]any{"type": "gone", "sandbox_id": id, "revision": revision, "reason": "released"})
}

func (c *fakeControl) setSilent(silent bool) {
	c.mu.Lock()
	c.silent = silent
	c.mu.Unlock()
}

func (c *fakeControl) setAPI(handler http.HandlerFunc) {
	c.mu.Lock()
	c.api = handler
	c.mu.Unlock()
}

// testEdge is an edge that serves on loopback.
type testEdge struct {
	*Edge
	url, address string
	logs         *syncBuffer
	stop         func()
	stopped      chan struct{}
}

type syncBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.String()
}

func startEdge(t *testing.T, control *fakeControl, change ...func(*Config)) *testEdge {
	t.Helper()
	tokenFile := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(tokenFile, []byte(edgeToken+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	config := Config{
		Listen: "127.0.0.1:0", Control: "http://" + control.address, TokenFile: tokenFile, Domain: "sandboxes.test:3000", EdgeID: "edge-test",
	}
	for _, apply := range change {
		apply(&config)
	}
	logs := new(syncBuffer)
	e, err := New(config, slog.New(slog.NewJSONHandler(logs, &slog.HandlerOptions{Level: slog.LevelDebug})))
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		_ = e.serve(ctx, listener)
	}()
	te := &testEdge{
		Edge: e, address: listener.Addr().String(), url: "http://" + listener.Addr().String(), logs: logs, stop: cancel, stopped: stopped,
	}
	t.Cleanup(func() {
		cancel()
		select {
		case <-stopped:
		case <-time.After(15 * time.Second):
			t.Error("the edge did not stop")
		}
	})
	eventually(t, "the edge follows the stream", e.table.isSynced)
	return te
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !is() {
		if time.Now().After(deadline) {
			t.Fatalf("never came: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// guest is a sandbox's machine: a loopback address of its own, on which tests listen.
type guest struct {
	t         *testing.T
	ip        string
	id        string
	guestPort int
	connect   http.HandlerFunc // the guest's tunnel; absent unless set
	tunnels   atomic.Int64
}

var guestCount atomic.Uint32

func newGuest(t *testing.T) *guest {
	t.Helper()
	n := guestCount.Add(1)
	return &guest{t: t, ip: fmt.Sprintf("127.%d.%d.%d", 64+rand.IntN(100), n>>8&0xff, 2+n&0xff%250), id: randomID()}
}

func randomID() string {
	const letters = "abcdefghijklmnopqrstuvwxyz0123456789"
	id := []byte("i")
	for range 20 {
		id = append(id, letters[rand.IntN(len(letters))])
	}
	return string(id)
}

// serve runs an HTTP/1.1 server (and h2c, if wanted) on a port of the guest; port 0 takes a free one.
func (g *guest) serve(port int, handler http.Handler, protocols ...*http.Protocols) int {
	g.t.Helper()
	return serveOn(g.t, g.ip, port, handler, protocols...)
}

func serveOn(t *testing.T, ip string, port int, handler http.Handler, protocols ...*http.Protocols) int {
	t.Helper()
	listener, err := net.Listen("tcp", net.JoinHostPort(ip, fmt.Sprint(port)))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: handler}
	if len(protocols) > 0 {
		server.Protocols = protocols[0]
	}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	return listener.Addr().(*net.TCPAddr).Port
}

// serveGuest runs the guest's own server and returns the route to it.
func (g *guest) serveGuest(handler http.Handler) Route {
	g.guestPort = g.serve(0, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !strings.HasPrefix(r.URL.Path, "/atoll/connect/"):
			handler.ServeHTTP(w, r)
		case g.connect == nil:
			w.WriteHeader(http.StatusNotFound)
		default:
			g.tunnels.Add(1)
			g.connect(w, r)
		}
	}))
	return g.route()
}

func (g *guest) route() Route {
	return Route{
		SandboxID: g.id, Revision: 3, Generation: 1, PlacementID: "plc_" + g.id, HostID: "hst_1", State: stateReady,
		Reach: Reach{Kind: reachDirect, IP: g.ip}, GuestPort: g.guestPort, PublicTraffic: true, ConnectToken: "tok-" + g.id,
	}
}

// request makes a request to a sandbox's port, addressed by headers.
func (te *testEdge) request(t *testing.T, method, path, id string, port int, body io.Reader) *http.Request {
	t.Helper()
	r, err := http.NewRequest(method, te.url+path, body)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set(headerID, id)
	if port != 0 {
		r.Header.Set(headerPort, fmt.Sprint(port))
	}
	return r
}

func do(t *testing.T, r *http.Request) (*http.Response, string) {
	t.Helper()
	transport := &http.Transport{DisableCompression: true}
	defer transport.CloseIdleConnections()
	response, err := transport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response, string(text)
}

func (te *testEdge) get(t *testing.T, path, id string, port int) (*http.Response, string) {
	t.Helper()
	return do(t, te.request(t, http.MethodGet, path, id, port, nil))
}

func expect(t *testing.T, response *http.Response, body string, status int, text string) {
	t.Helper()
	if response.StatusCode != status || body != text {
		t.Fatalf("got %d %q, want %d %q", response.StatusCode, body, status, text)
	}
}

func say(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) }
}

func containsAll(text string, parts ...string) bool {
	for _, part := range parts {
		if !strings.Contains(text, part) {
			return false
		}
	}
	return true
}

// newReader hides the length of a text, so that it is sent in chunks.
func newReader(text string) io.Reader { return io.MultiReader(strings.NewReader(text)) }

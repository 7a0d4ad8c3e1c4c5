package edge

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

func golden(t testing.TB, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "src", "atoll", "wire", "golden", "edge", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestGoldenMessages(t *testing.T) {
	snapshot, err := parseChange(golden(t, "snapshot"))
	if err != nil || snapshot.Type != changeSnapshot || snapshot.Cursor != 41 || snapshot.Incarnation != "inc_1" || len(snapshot.Routes) != 2 {
		t.Fatalf("%+v %v", snapshot, err)
	}
	first, err := parseRoute(snapshot.Routes[0])
	if err != nil {
		t.Fatal(err)
	}
	if first.SandboxID != "i0123456789abcdefghij" || first.Revision != 12 || first.Generation != 1 || first.State != stateReady ||
		first.Reach.IP != "10.64.0.6" || first.GuestPort != 49983 || !first.PublicTraffic || first.tokenDigest != nil ||
		first.ConnectToken != "header.claims.signature" || first.AutoResume || first.MaskRequestHost != nil ||
		first.PlacementID != "plc_00000000000000000001" || first.HostID != "hst_00000000000000000001" {
		t.Fatalf("%+v", first)
	}
	second, err := parseRoute(snapshot.Routes[1])
	if err != nil || second.State != "paused" || !second.AutoResume || second.PublicTraffic || !tokenMatches(second.tokenDigest, "foo") {
		t.Fatalf("%+v %v", second, err)
	}
	line, err := parseChange(golden(t, "route"))
	if err != nil || line.Type != changeRoute || line.Cursor != 42 {
		t.Fatalf("%+v %v", line, err)
	}
	if route, err := parseRoute(line.Route); err != nil || route.Generation != 2 || *route.MaskRequestHost != "app.example:${PORT}" {
		t.Fatalf("%+v %v", route, err)
	}
	line, err = parseChange(golden(t, "gone"))
	if err != nil || line.Type != changeGone || line.SandboxID != "i0123456789abcdefghij" || line.Revision != 14 || line.Reason != "released" {
		t.Fatalf("%+v %v", line, err)
	}
	if line, err = parseChange(golden(t, "ping")); err != nil || line.Type != changePing || line.Cursor != 43 {
		t.Fatalf("%+v %v", line, err)
	}
}

func TestLocateIsAskedAsTheGoldenMessageSays(t *testing.T) {
	r, _ := http.NewRequest(http.MethodGet, "/files?path=/home/user/report.txt&username=user&signature_expiration=1893456000"+
		"&signature=v1_Lw1dVbVwZoGrMTGsxcPrIU0Qm3/7SL1pPZ2Hn9nuhN8", nil)
	key, ok := signedKey(r)
	if !ok {
		t.Fatal("not understood")
	}
	sent, _ := json.Marshal(signedPath{
		Path: key.path, Operation: key.operation, Username: key.username, Signature: key.signature, Expiration: &key.expiration,
	})
	var ours, want map[string]any
	_ = json.Unmarshal(sent, &ours)
	_ = json.Unmarshal(golden(t, "locate"), &want)
	if len(ours) != len(want) {
		t.Fatalf("%v, want %v", ours, want)
	}
	for name := range want {
		if ours[name] != want[name] {
			t.Errorf("%s: %v, want %v", name, ours[name], want[name])
		}
	}
}

func TestBadRoutesAreRefused(t *testing.T) {
	good := string(golden(t, "route"))
	var line struct{ Route map[string]any }
	_ = json.Unmarshal([]byte(good), &line)
	for name, value := range map[string]any{
		"sandbox_id": "../etc", "guest_port": 70000, "traffic_token_sha256": "abc", "reach": map[string]any{"kind": "link"}, "revision": "x",
	} {
		changed := map[string]any{}
		for key, old := range line.Route {
			changed[key] = old
		}
		changed[name] = value
		text, _ := json.Marshal(changed)
		if _, err := parseRoute(text); err == nil {
			t.Errorf("%s = %v was taken", name, value)
		}
	}
}

func TestReadLine(t *testing.T) {
	long := strings.Repeat("x", 100_000)
	reader := bufio.NewReaderSize(strings.NewReader("short\n\n"+long+"\nlast"), 16)
	for _, want := range []string{"short", "", long} {
		if line, err := readLine(reader, 200_000); err != nil || string(line) != want {
			t.Fatalf("%d bytes, %v", len(line), err)
		}
	}
	if _, err := readLine(reader, 100); err != io.ErrUnexpectedEOF {
		t.Fatal(err)
	}
	if _, err := readLine(bufio.NewReaderSize(strings.NewReader(long+"\n"), 16), 1000); err != errLineTooLong {
		t.Fatal(err)
	}
}

func FuzzParseChange(f *testing.F) {
	for _, name := range []string{"snapshot", "route", "gone", "ping"} {
		f.Add(golden(f, name))
	}
	f.Add([]byte(`{"type":"route","route":null}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := parseChange(text)
		if err != nil {
			return
		}
		routes := c.Routes
		if c.Type == changeRoute {
			routes = append(routes, c.Route)
		}
		for _, raw := range routes {
			route, err := parseRoute(raw)
			if err == nil && (!validID(route.SandboxID) || route.State == stateReady && (route.GuestPort < 1 || route.GuestPort > 65535)) {
				t.Fatalf("%+v", route)
			}
		}
	})
}

func FuzzReadLine(f *testing.F) {
	f.Add([]byte("a\nbb\n"), 10)
	f.Fuzz(func(t *testing.T, text []byte, limit int) {
		reader := bufio.NewReaderSize(strings.NewReader(string(text)), 16)
		limit = limit & 0xffff
		for {
			line, err := readLine(reader, limit)
			if err != nil {
				return
			}
			if len(line) > limit || strings.ContainsRune(string(line), '\n') {
				t.Fatalf("%q", line)
			}
		}
	})
}

func TestAMissAsksControlOnce(t *testing.T) {
	control := newFakeControl(t)
	control.answerDelay = 200 * time.Millisecond
	te := startEdge(t, control)
	control.setSilent(true)
	g := newGuest(t)
	control.put(g.serveGuest(say("found")))
	transport := h1Transport(t)
	var wait sync.WaitGroup
	for range 1000 {
		wait.Go(func() {
			response, err := transport.RoundTrip(te.request(t, http.MethodGet, "/", g.id, 0, nil))
			if err != nil {
				t.Error(err)
				return
			}
			text, _ := io.ReadAll(response.Body)
			_ = response.Body.Close()
			if response.StatusCode != 200 || string(text) != "found" {
				t.Errorf("%d %s", response.StatusCode, text)
			}
		})
	}
	wait.Wait()
	if asked := control.lookups.Load(); asked != 1 {
		t.Fatalf("control was asked %d times", asked)
	}
}

func TestNotFoundIsRememberedBriefly(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	id := randomID()
	for range 20 {
		response, _ := te.get(t, "/", id, 0)
		if response.StatusCode != 502 {
			t.Fatal(response.Status)
		}
	}
	if asked := control.lookups.Load(); asked > 3 {
		t.Fatalf("control was asked %d times", asked)
	}
	time.Sleep(negativeTTL + 50*time.Millisecond)
	before := control.lookups.Load()
	_, _ = te.get(t, "/", id, 0)
	if control.lookups.Load() != before+1 {
		t.Fatal("not found is remembered for too long")
	}
	// And a word of the stream ends it at once.
	g := newGuest(t)
	g.id = id
	control.put(g.serveGuest(say("here")))
	te.waitFor(t, id)
	response, body := te.get(t, "/", id, 0)
	expect(t, response, body, 200, "here")
}

func TestWhatNobodyKnowsIsNotDenied(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	control.stop()
	id := randomID()
	response, body := te.get(t, "/health", id, 0)
	if response.StatusCode != 503 || response.Header.Get("Should-Retry") != "true" || response.Header.Get("Retry-After") == "" ||
		!strings.Contains(body, id) || strings.Contains(body, "was not found") {
		t.Fatalf("%d %v %s", response.StatusCode, response.Header, body)
	}
}

func TestTrafficGoesOnWhileControlIsAway(t *testing.T) {
	next := make(chan struct{})
	te, g, control := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/stream" {
			_, _ = io.WriteString(w, "ok")
			return
		}
		for range 3 {
			_, _ = io.WriteString(w, "tick\n")
			w.(http.Flusher).Flush()
			<-next
		}
	})
	ended := newGuest(t)
	control.put(ended.serveGuest(say("x")))
	te.waitFor(t, ended.id)
	control.end(ended.id)
	eventually(t, "the end is known", func() bool { _, v := te.table.find(ended.id); return v == gone })
	response, err := h1Transport(t).RoundTrip(te.request(t, http.MethodGet, "/stream", g.id, 0, nil))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	reader := bufio.NewReader(response.Body)
	tick := func() {
		t.Helper()
		if line, err := reader.ReadString('\n'); err != nil || line != "tick\n" {
			t.Fatalf("%q %v", line, err)
		}
	}
	tick()
	control.stop()
	eventually(t, "the loss is seen", func() bool { return !te.table.isSynced() })
	next <- struct{}{}
	tick()
	answer, body := te.get(t, "/", g.id, 0)
	expect(t, answer, body, 200, "ok")
	answer, _ = te.get(t, "/", ended.id, 0)
	if answer.StatusCode != 502 {
		t.Fatalf("what was released is released: %s", answer.Status)
	}
	// A route ends while nobody streams: the next snapshot tells.
	late := newGuest(t)
	control.mu.Lock()
	route := late.serveGuest(say("late"))
	control.routes[late.id] = &route
	control.mu.Unlock()
	control.start()
	eventually(t, "the stream is followed again", te.table.isSynced)
	next <- struct{}{}
	tick()
	answer, body = te.get(t, "/", late.id, 0)
	expect(t, answer, body, 200, "late")
	if asked := control.lookups.Load(); asked != 0 {
		t.Fatalf("control was asked %d times", asked)
	}
	if breaks := strings.Count(te.logs.String(), "edge.routes.lost"); breaks != 1 {
		t.Fatalf("the loss was logged %d times", breaks)
	}
}

func TestASnapshotCutsWhatItNoLongerHas(t *testing.T) {
	te, g, control := oneGuest(t, streaming)
	response, err := h1Transport(t).RoundTrip(te.request(t, http.MethodGet, "/", g.id, 0, nil))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	reader := bufio.NewReader(response.Body)
	_, _ = reader.ReadString('\n')
	control.stop()
	eventually(t, "the loss is seen", func() bool { return !te.table.isSynced() })
	control.mu.Lock()
	delete(control.routes, g.id)
	control.mu.Unlock()
	control.start()
	if _, err := reader.ReadString('\n'); err == nil || err == io.EOF {
		t.Fatal(err)
	}
	answer, body := te.get(t, "/", g.id, 0)
	expect(t, answer, body, 502, `{"sandboxId":"`+g.id+`","message":"The sandbox was not found","code":502}`)
}

func TestASilentStreamIsGivenUp(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	f := &follower{
		table: newTable(te.table.options), control: te.control, asker: te.asker, metrics: te.metrics, log: te.log, silence: 100 * time.Millisecond,
	}
	began := time.Now()
	synced, err := f.once(t.Context())
	if !synced || err == nil || !strings.Contains(err.Error(), "silent") || time.Since(began) > 5*time.Second {
		t.Fatalf("%v %v after %v", synced, err, time.Since(began))
	}
}

func TestTheTokenIsReadAgain(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	te.control.mu.Lock()
	te.control.token = "an old one"
	te.control.mu.Unlock()
	if _, err := te.control.route(t.Context(), randomID()); err != errNotFound {
		t.Fatal(err)
	}
}

func TestAnUnreachableGuestIsAskedAboutOnce(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	gone, moved, dead := newGuest(t), newGuest(t), newGuest(t)
	for _, g := range []*guest{gone, moved, dead} {
		g.guestPort = 9 // nothing listens
		control.put(g.route())
		te.waitFor(t, g.id)
	}
	control.setSilent(true)
	control.end(gone.id)
	there := newGuest(t)
	there.id = moved.id
	route := there.serveGuest(say("moved here"))
	route.Revision, route.Generation, route.PlacementID = 10, 2, "plc_new"
	control.put(route)

	response, body := te.get(t, "/", gone.id, 0)
	expect(t, response, body, 502, `{"sandboxId":"`+gone.id+`","message":"The sandbox was not found","code":502}`)
	response, body = do(t, te.request(t, http.MethodPost, "/", moved.id, 0, strings.NewReader("body")))
	expect(t, response, body, 200, "moved here")
	response, body = te.get(t, "/", dead.id, 0)
	expect(t, response, body, 502, `{"sandboxId":"`+dead.id+`","message":"The sandbox is running but port is not open","port":49983,"code":502}`)
	if asked := control.lookups.Load(); asked != 3 {
		t.Fatalf("%d questions for three sandboxes", asked)
	}
}

func TestLookupsAreLimitedPerClient(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control, func(c *Config) { c.Limits.AsksPerSecond = 5 })
	limited := 0
	for range 40 {
		response, _ := te.get(t, "/", randomID(), 0)
		if response.StatusCode == http.StatusTooManyRequests {
			limited++
		}
	}
	if asked := control.lookups.Load(); limited == 0 || asked > 30 || asked < 10 {
		t.Fatalf("%d refused, %d asked", limited, asked)
	}
}

func TestSignedURLsFindTheirSandbox(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	g := newGuest(t)
	control.put(g.serveGuest(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Method+" "+r.URL.Query().Get("path"))
	})))
	te.waitFor(t, g.id)
	control.located["read /a b v1_good"] = g.id
	control.located["write /a b v1_good"] = g.id
	ask := func(method, query string) (*http.Response, string) {
		r, _ := http.NewRequest(method, te.url+"/files?"+query, nil)
		return do(t, r)
	}
	for range 5 {
		response, body := ask(http.MethodGet, "path=/a+b&signature=v1_good&username=")
		expect(t, response, body, 200, "GET /a b")
	}
	if control.locates.Load() != 1 {
		t.Fatalf("located %d times", control.locates.Load())
	}
	response, body := ask(http.MethodPost, "path=/a+b&signature=v1_good")
	expect(t, response, body, 200, "POST /a b")
	r, _ := http.NewRequest(http.MethodOptions, te.url+"/files?path=/a+b&signature=v1_good", nil)
	r.Header.Set("Access-Control-Request-Method", "POST")
	response, body = do(t, r)
	expect(t, response, body, 200, "OPTIONS /a b")
	response, body = ask(http.MethodGet, "path=/a&signature=v1_bad")
	expect(t, response, body, 401, `{"code":401,"message":"invalid signature"}`)
	response, body = ask(http.MethodGet, "path=/a&signature=v1_bad&signature_expiration=1000")
	expect(t, response, body, 401, `{"code":401,"message":"signature is already expired"}`)
	response, _ = ask(http.MethodDelete, "path=/a&signature=v1_bad")
	if response.StatusCode != 400 {
		t.Fatal(response.Status)
	}
	limited := 0
	for n := range 60 {
		if response, _ := ask(http.MethodGet, "path=/a&signature=v1_guess"+string(rune('a'+n%26))+string(rune('a'+n/26))); response.StatusCode == 429 {
			limited++
		}
	}
	if limited == 0 {
		t.Fatal("signatures can be guessed without limit")
	}
	if strings.Contains(te.logs.String(), "v1_") {
		t.Fatal("a signature is in the log")
	}
}

package edge

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestTheAPIStreamsBothWays(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	control.setAPI(func(w http.ResponseWriter, r *http.Request) {
		controller := http.NewResponseController(w)
		_ = controller.EnableFullDuplex()
		lines := bufio.NewScanner(r.Body)
		for lines.Scan() {
			fmt.Fprintf(w, "%s!\n", lines.Text())
			_ = controller.Flush()
		}
	})
	read, write := io.Pipe()
	r, _ := http.NewRequest(http.MethodPost, te.url+"/v1/logs", read)
	go func() { fmt.Fprintln(write, "a") }()
	response, err := h1Transport(t).RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	reader := bufio.NewReader(response.Body)
	for _, word := range []string{"a", "b", "c"} {
		if word != "a" {
			fmt.Fprintln(write, word)
		}
		if line, err := reader.ReadString('\n'); err != nil || line != word+"!\n" {
			t.Fatalf("%q %v", line, err)
		}
	}
	_ = write.Close()
	if _, err := reader.ReadString('\n'); err != io.EOF {
		t.Fatal(err)
	}
}

func TestControlHangs(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control, func(c *Config) { c.Limits.ControlAnswerS = 1 })
	over := make(chan struct{})
	defer close(over)
	control.setAPI(func(http.ResponseWriter, *http.Request) { <-over })
	for method, want := range map[string]string{http.MethodGet: "CONTROL_UNAVAILABLE", http.MethodPost: "CONTROL_OUTCOME_UNKNOWN"} {
		r, _ := http.NewRequest(method, te.url+"/sandboxes", strings.NewReader("{}"))
		began := time.Now()
		response, body := do(t, r)
		if response.StatusCode < 500 || !strings.Contains(body, want) || time.Since(began) > 10*time.Second {
			t.Fatalf("%s: %d %s after %v", method, response.StatusCode, body, time.Since(began))
		}
	}
}

func TestControlAway(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control, func(c *Config) { c.Limits.ControlPatienceMS = -1 })
	control.setAPI(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	// It took the request and died: who knows what it did.
	r, _ := http.NewRequest(http.MethodPost, te.url+"/sandboxes", strings.NewReader("{}"))
	response, body := do(t, r)
	if response.StatusCode != 502 || !strings.Contains(body, `"code":"CONTROL_OUTCOME_UNKNOWN"`) || response.Header.Get("Should-Retry") != "false" {
		t.Fatalf("%d %v %s", response.StatusCode, response.Header, body)
	}
	control.stop()
	for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodDelete} {
		r, _ := http.NewRequest(method, te.url+"/sandboxes", strings.NewReader("{}"))
		response, body := do(t, r)
		if response.StatusCode != 503 || response.Header.Get("Retry-After") != "1" || response.Header.Get("Should-Retry") != "true" ||
			!strings.Contains(body, `"code":"CONTROL_UNAVAILABLE"`) || response.Header.Get("Content-Type") != "application/json; charset=utf-8" {
			t.Fatalf("%d %v %s", response.StatusCode, response.Header, body)
		}
	}
	control.start()
	control.setAPI(say("back"))
	r, _ = http.NewRequest(http.MethodGet, te.url+"/", nil)
	response, body = do(t, r)
	expect(t, response, body, 200, "back")
}

func TestARestartOfControlIsWaitedFor(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control, func(c *Config) { c.Limits.ControlPatienceMS = 5000 })
	control.setAPI(func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) })
	post := func() (*http.Response, string) {
		r, _ := http.NewRequest(http.MethodPost, te.url+"/sandboxes", newReader("once"))
		return do(t, r)
	}
	response, body := post()
	expect(t, response, body, 200, "once")
	stop := func() {
		control.stop()
		// A request on a connection that is not yet known to have ended would be one whose outcome nobody knows.
		te.api.transport.CloseIdleConnections()
	}
	stop()
	go func() {
		time.Sleep(300 * time.Millisecond)
		control.start()
	}()
	response, body = post()
	expect(t, response, body, 200, "once")
	// An outage is no restart: it is told at once.
	stop()
	te.api.lastHeard.Store(time.Now().Add(-restartWindow).UnixNano())
	began := time.Now()
	response, _ = post()
	if response.StatusCode != 503 || time.Since(began) > 2*time.Second {
		t.Fatalf("%s after %v", response.Status, time.Since(began))
	}
}

func TestAnswersWaitForTheTable(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	g := newGuest(t)
	route := g.serveGuest(say("hello"))
	control.setAPI(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(headerChanged, fmt.Sprintf("%s:%s", g.id, r.URL.Query().Get("revision")))
		w.WriteHeader(201)
		_, _ = io.WriteString(w, "done")
	})
	change := func(revision int64) (*http.Response, string) {
		r, _ := http.NewRequest(http.MethodPost, fmt.Sprintf("%s/sandboxes?revision=%d", te.url, revision), nil)
		return do(t, r)
	}
	// The route comes a little later than the answer.
	go func() {
		time.Sleep(15 * time.Millisecond)
		control.put(route)
	}()
	began := time.Now()
	response, body := change(route.Revision)
	expect(t, response, body, 201, "done")
	if _, leaked := response.Header[headerChanged]; leaked {
		t.Fatal("the header went on to the client")
	}
	if e, verdict := te.table.find(g.id); verdict != known || e.route.Revision != route.Revision {
		t.Fatalf("let go after %v without the route", time.Since(began))
	}
	// A kill: the end comes a little later than the answer.
	go func() {
		time.Sleep(15 * time.Millisecond)
		control.end(g.id)
	}()
	_, _ = change(route.Revision + 1)
	response, _ = te.get(t, "/health", g.id, 0)
	if response.StatusCode != 502 || control.lookups.Load() != 0 {
		t.Fatalf("%s, asked %d times", response.Status, control.lookups.Load())
	}
}

func TestAnAnswerIsNotHeldForLong(t *testing.T) {
	te, g, control := oneGuest(t, say("stale"))
	control.setSilent(true)
	control.setAPI(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set(headerChanged, g.id+":50, bad, also:bad, "+randomID()+":7")
		_, _ = io.WriteString(w, "done")
	})
	control.end(g.id) // nobody streams it
	r, _ := http.NewRequest(http.MethodDelete, te.url+"/sandboxes/x", nil)
	began := time.Now()
	response, body := do(t, r)
	expect(t, response, body, 200, "done")
	if took := time.Since(began); took < holdMax || took > holdMax+2*time.Second {
		t.Fatalf("held for %v", took)
	}
	// What the table missed is asked for, so that even now no stale word is believed.
	response, _ = te.get(t, "/", g.id, 0)
	if response.StatusCode != 502 || control.lookups.Load() != 1 {
		t.Fatalf("%s, asked %d times", response.Status, control.lookups.Load())
	}
}

func TestAnswersAreTrueWithoutTheStream(t *testing.T) {
	te, g, control := oneGuest(t, say("first"))
	te.table.lost()
	control.setSilent(true)
	successor := newGuest(t)
	successor.id = g.id
	route := successor.serveGuest(say("second"))
	route.Revision, route.PlacementID = 20, "plc_second"
	control.put(route)
	control.setAPI(func(w http.ResponseWriter, _ *http.Request) { w.Header().Set(headerChanged, g.id+":20") })
	r, _ := http.NewRequest(http.MethodPost, te.url+"/sandboxes/x/connect", nil)
	_, _ = do(t, r)
	response, body := te.get(t, "/", g.id, 0)
	expect(t, response, body, 200, "second")
}

func TestBrokenAPIAnswersStayBroken(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	control.setAPI(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "half")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	r, _ := http.NewRequest(http.MethodGet, te.url+"/v1/events", nil)
	response, err := h1Transport(t).RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	if _, err := io.ReadAll(response.Body); err == nil {
		t.Fatal("it looks whole")
	}
}

func TestChanges(t *testing.T) {
	got := changes([]string{"ia:5, ia:3,ib:2", "ic:x", "BAD:1", "", ":", "id:-1"})
	if len(got) != 2 || got["ia"] != 5 || got["ib"] != 2 {
		t.Fatal(got)
	}
}

func FuzzChanges(f *testing.F) {
	f.Add("ia:5, ib:6")
	f.Fuzz(func(t *testing.T, text string) {
		for id := range changes([]string{text}) {
			if !validID(id) {
				t.Fatal(id)
			}
		}
	})
}

func TestForwardedHeaders(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	var seen atomic.Pointer[http.Header]
	control.setAPI(func(_ http.ResponseWriter, r *http.Request) { h := r.Header.Clone(); seen.Store(&h) })
	r, _ := http.NewRequest(http.MethodGet, te.url+"/v1/me", nil)
	r.Header.Set("X-Forwarded-For", "192.0.2.1")
	r.Header.Set("Connection", "X-Hop")
	r.Header.Set("X-Hop", "1")
	r.Header.Set("Proxy-Authorization", "secret")
	_, _ = do(t, r)
	h := *seen.Load()
	if h.Get("X-Forwarded-For") != "192.0.2.1, 127.0.0.1" || h.Get("X-Forwarded-Host") != te.address ||
		h.Get("X-Hop") != "" || h.Get("Proxy-Authorization") != "" {
		t.Fatal(h)
	}
}

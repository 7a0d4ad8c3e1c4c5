package edge

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A loaded machine may be slow; what is promised is in the middle of this.
const cutLimit = 2 * time.Second

// streaming says one line and then nothing until it is cut.
func streaming(w http.ResponseWriter, r *http.Request) {
	_ = http.NewResponseController(w).EnableFullDuplex()
	_, _ = io.WriteString(w, "line\n")
	_ = http.NewResponseController(w).Flush()
	<-r.Context().Done()
}

func TestAHundredStreamsAreCutWhenTheSandboxEnds(t *testing.T) {
	te, g, control := oneGuest(t, streaming)
	bothWires(t, func(t *testing.T, transport *http.Transport) {
		route := g.route()
		route.SandboxID = randomID()
		control.put(route)
		te.waitFor(t, route.SandboxID)
		var open, ended sync.WaitGroup
		last := make(chan time.Time, 100)
		for range 100 {
			open.Add(1)
			ended.Go(func() {
				response, err := transport.RoundTrip(te.request(t, http.MethodGet, "/", route.SandboxID, 0, nil))
				if err != nil {
					open.Done()
					t.Error(err)
					return
				}
				defer func() { _ = response.Body.Close() }()
				reader := bufio.NewReader(response.Body)
				_, err = reader.ReadString('\n')
				open.Done()
				if err != nil {
					t.Error(err)
				}
				if _, err = reader.ReadString('\n'); err == nil || err == io.EOF {
					t.Errorf("the stream ended as if it were whole: %v", err)
				}
				last <- time.Now()
			})
		}
		open.Wait()
		began := time.Now()
		control.end(route.SandboxID)
		ended.Wait()
		close(last)
		var slowest time.Duration
		for at := range last {
			slowest = max(slowest, at.Sub(began))
		}
		t.Logf("100 streams cut within %v", slowest)
		if slowest > cutLimit {
			t.Errorf("the last of 100 streams was cut after %v", slowest)
		}
		response, body := te.get(t, "/health", route.SandboxID, 0)
		expect(t, response, body, 502, `{"sandboxId":"`+route.SandboxID+`","message":"The sandbox was not found","code":502}`)
	})
	if control.lookups.Load() != 0 {
		t.Errorf("control was asked %d times about what it had said", control.lookups.Load())
	}
}

func TestUpgradedConnectionsAreCut(t *testing.T) {
	te, g, control := oneGuest(t, say("guest"))
	serverEnd := make(chan error, 1)
	port := g.serve(0, upgrading(func(conn net.Conn, early *bufio.Reader) {
		_, _ = io.WriteString(conn, "hello\n")
		_, err := io.ReadAll(early)
		serverEnd <- err
	}))
	_, reader, _ := te.upgraded(t, "/", g.id, port, "websocket")
	_, _ = reader.ReadString('\n')
	control.end(g.id)
	began := time.Now()
	if _, err := reader.ReadByte(); err == nil || time.Since(began) > cutLimit {
		t.Fatalf("%v after %v", err, time.Since(began))
	}
	select {
	case <-serverEnd:
	case <-time.After(cutLimit):
		t.Fatal("the guest's side is still open")
	}
}

// Clients that don't read, and clients that don't finish sending, hold a handler in a write or a read.
func TestStuckClientsAreCut(t *testing.T) {
	te, g, control := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		if r.URL.Path == "/flood" {
			_, _ = io.Copy(w, &endless{left: 1 << 40})
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
	})
	for _, head := range []string{
		"GET /flood HTTP/1.1\r\n", "POST /sink HTTP/1.1\r\nTransfer-Encoding: chunked\r\n", "POST /sink HTTP/1.1\r\nContent-Length: 1000\r\n",
	} {
		conn, err := net.Dial("tcp", te.address)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		fmt.Fprintf(conn, "%sHost: x\r\n%s: %s\r\n\r\n", head, headerID, g.id)
	}
	eventually(t, "all three are on their way", func() bool { return te.metrics.open.Load() == 3 })
	time.Sleep(100 * time.Millisecond) // until the flood has filled every buffer
	began := time.Now()
	control.end(g.id)
	eventually(t, "all are counted out", func() bool { return te.metrics.open.Load() == 0 })
	if took := time.Since(began); took > cutLimit {
		t.Fatalf("it took %v", took)
	}
}

func TestRequestsBeforeTheirAnswerLearnThatTheSandboxIsGone(t *testing.T) {
	te, g, control := oneGuest(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	done := make(chan struct{})
	go func() {
		defer close(done)
		request := te.request(t, http.MethodPost, "/process.Process/List", g.id, 0, strings.NewReader("{}"))
		response, body := do(t, request)
		if response.StatusCode != 502 || !strings.Contains(body, "The sandbox was not found") {
			t.Errorf("%d %s", response.StatusCode, body)
		}
	}()
	eventually(t, "the request is on its way", func() bool { return te.metrics.open.Load() == 1 })
	time.Sleep(20 * time.Millisecond)
	control.end(g.id)
	<-done
}

func TestANewGenerationTakesOver(t *testing.T) {
	te, g, control := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/stream" {
			streaming(w, r)
			return
		}
		_, _ = io.WriteString(w, "first")
	})
	successor := newGuest(t)
	successor.id = g.id
	route := successor.serveGuest(say("second"))
	response, err := h1Transport(t).RoundTrip(te.request(t, http.MethodGet, "/stream", g.id, 0, nil))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	reader := bufio.NewReader(response.Body)
	_, _ = reader.ReadString('\n')
	route.Revision, route.Generation, route.PlacementID = 9, 2, "plc_second"
	control.put(route)
	began := time.Now()
	if _, err := reader.ReadString('\n'); err == nil || err == io.EOF || time.Since(began) > cutLimit {
		t.Fatalf("the old generation's stream: %v after %v", err, time.Since(began))
	}
	answer, body := te.get(t, "/", g.id, 0)
	expect(t, answer, body, 200, "second")
}

func TestAPausedSandboxIsNotFoundUntilItIsBack(t *testing.T) {
	te, g, control := oneGuest(t, streaming)
	open := func() *bufio.Reader {
		response, err := h1Transport(t).RoundTrip(te.request(t, http.MethodGet, "/", g.id, 0, nil))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = response.Body.Close() })
		reader := bufio.NewReader(response.Body)
		if line, err := reader.ReadString('\n'); err != nil || line != "line\n" {
			t.Fatalf("%q %v", line, err)
		}
		return reader
	}
	reader := open()
	route := g.route()
	route.Revision, route.State = 5, "paused"
	control.put(route)
	if _, err := reader.ReadString('\n'); err == nil || err == io.EOF {
		t.Fatal(err)
	}
	response, body := te.get(t, "/health", g.id, 0)
	expect(t, response, body, 502, `{"sandboxId":"`+g.id+`","message":"The sandbox was not found","code":502}`)
	route.Revision, route.State = 6, stateReady
	control.put(route)
	eventually(t, "it is back", func() bool { e, _ := te.table.find(g.id); return e != nil && e.ready() })
	open()
}

// What changes nothing about the place must not disturb it.
func TestAnUpdateOfTheSamePlacementDisturbsNothing(t *testing.T) {
	next := make(chan struct{})
	te, g, control := oneGuest(t, func(w http.ResponseWriter, _ *http.Request) {
		for n := range 2 {
			fmt.Fprintf(w, "%d\n", n)
			w.(http.Flusher).Flush()
			<-next
		}
	})
	response, err := h1Transport(t).RoundTrip(te.request(t, http.MethodGet, "/", g.id, 0, nil))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	reader := bufio.NewReader(response.Body)
	_, _ = reader.ReadString('\n')
	route := g.route()
	route.Revision, route.ConnectToken, route.PublicTraffic = 8, "another", false
	control.put(route)
	eventually(t, "the update is there", func() bool { e, _ := te.table.find(g.id); return e.route.Revision == 8 })
	next <- struct{}{}
	if line, err := reader.ReadString('\n'); err != nil || line != "1\n" {
		t.Fatalf("%q %v", line, err)
	}
	next <- struct{}{}
	if _, err := reader.ReadString('\n'); err != io.EOF {
		t.Fatal(err)
	}
}

// An answer of which nothing has gone out can still be an error, and one that is whole can still go out.
func TestNoAnswerIsCutBeforeItHasBegun(t *testing.T) {
	te, g, control := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "5")
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		response, body := te.get(t, "/", g.id, 0)
		expect(t, response, body, 502, `{"sandboxId":"`+g.id+`","message":"The sandbox was not found","code":502}`)
	}()
	eventually(t, "the request is on its way", func() bool { return te.metrics.open.Load() == 1 })
	time.Sleep(50 * time.Millisecond)
	control.end(g.id)
	<-done
}

// Whoever asks while a sandbox ends has its answer or the news of the end, over a connection that goes on.
func TestACrowdAtTheEndOfASandboxIsAnswered(t *testing.T) {
	te, g, control := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/text" {
			_, _ = io.WriteString(w, "text")
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	bothWires(t, func(t *testing.T, transport *http.Transport) {
		for round := range 25 {
			route := g.route()
			route.SandboxID = randomID()
			control.put(route)
			te.waitFor(t, route.SandboxID)
			var crowd sync.WaitGroup
			var over atomic.Bool
			for number := range 16 {
				crowd.Go(func() {
					for !over.Load() {
						method, path := http.MethodGet, "/health"
						var body io.Reader
						if number%2 == 0 {
							method, path, body = http.MethodPost, "/text", strings.NewReader("{}")
						}
						response, err := transport.RoundTrip(te.request(t, method, path, route.SandboxID, 0, body))
						if err != nil {
							t.Errorf("round %d, %s: %v", round, path, err)
							return
						}
						text, err := io.ReadAll(response.Body)
						_ = response.Body.Close()
						if err != nil || (response.StatusCode != 200 && response.StatusCode != 204 && response.StatusCode != 502) {
							t.Errorf("round %d, %s: %s %q %v", round, path, response.Status, text, err)
						}
						if response.StatusCode == http.StatusBadGateway {
							return
						}
					}
				})
			}
			time.Sleep(time.Duration(round) * 400 * time.Microsecond)
			control.end(route.SandboxID)
			crowd.Wait()
			over.Store(true)
		}
	})
}

package edge

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// oneGuest is an edge with one sandbox whose guest answers with the handler.
func oneGuest(t *testing.T, handler http.HandlerFunc, change ...func(*Config)) (*testEdge, *guest, *fakeControl) {
	t.Helper()
	control := newFakeControl(t)
	te := startEdge(t, control, change...)
	g := newGuest(t)
	control.put(g.serveGuest(handler))
	te.waitFor(t, g.id)
	return te, g, control
}

func (te *testEdge) waitFor(t *testing.T, id string) {
	t.Helper()
	eventually(t, "the route is known", func() bool { _, v := te.table.find(id); return v == known })
}

func h2c() *http.Protocols {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	return protocols
}

func h2cTransport(t *testing.T) *http.Transport {
	transport := &http.Transport{Protocols: h2c(), DisableCompression: true}
	t.Cleanup(transport.CloseIdleConnections)
	return transport
}

func h1Transport(t *testing.T) *http.Transport {
	transport := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 200}
	t.Cleanup(transport.CloseIdleConnections)
	return transport
}

func bothWires(t *testing.T, test func(t *testing.T, transport *http.Transport)) {
	t.Run("HTTP1", func(t *testing.T) { test(t, h1Transport(t)) })
	t.Run("h2c", func(t *testing.T) { test(t, h2cTransport(t)) })
}

func TestAnswersAreNotHeldBack(t *testing.T) {
	next := make(chan struct{})
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		if r.URL.Path == "/sized" {
			w.Header().Set("Content-Length", "12")
		}
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		for n := range 4 {
			<-next
			fmt.Fprintf(w, "e%d\n", n)
			w.(http.Flusher).Flush()
		}
	})
	bothWires(t, func(t *testing.T, transport *http.Transport) {
		for _, path := range []string{"/chunked", "/sized"} {
			request := te.request(t, http.MethodGet, path, g.id, 0, nil)
			if path == "/sized" {
				go func() { next <- struct{}{} }()
			}
			response, err := transport.RoundTrip(request)
			if err != nil {
				t.Fatal(err)
			}
			reader := bufio.NewReader(response.Body)
			for n := range 4 {
				if path != "/sized" || n > 0 {
					next <- struct{}{}
				}
				if line, err := reader.ReadString('\n'); err != nil || line != fmt.Sprintf("e%d\n", n) {
					t.Fatalf("%q %v", line, err)
				}
			}
			if rest, err := io.ReadAll(reader); err != nil || len(rest) != 0 {
				t.Fatalf("%q %v", rest, err)
			}
		}
	})
}

func TestFullDuplex(t *testing.T) {
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		controller := http.NewResponseController(w)
		_ = controller.EnableFullDuplex()
		w.WriteHeader(200)
		_ = controller.Flush()
		lines := bufio.NewScanner(r.Body)
		for lines.Scan() {
			fmt.Fprintf(w, "echo %s\n", lines.Text())
			_ = controller.Flush()
		}
		fmt.Fprintf(w, "end %v\n", lines.Err())
	})
	bothWires(t, func(t *testing.T, transport *http.Transport) {
		read, write := io.Pipe()
		response, err := transport.RoundTrip(te.request(t, http.MethodPost, "/process.Process/StreamInput", g.id, 0, read))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = response.Body.Close() }()
		reader := bufio.NewReader(response.Body)
		for n := range 50 {
			fmt.Fprintf(write, "line %d\n", n)
			if line, err := reader.ReadString('\n'); err != nil || line != fmt.Sprintf("echo line %d\n", n) {
				t.Fatalf("%q %v", line, err)
			}
		}
		_ = write.Close()
		if line, err := reader.ReadString('\n'); err != nil || line != "end <nil>\n" {
			t.Fatalf("%q %v", line, err)
		}
	})
}

func TestAnswerBeforeTheRequestHasEnded(t *testing.T) {
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, _ *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		w.WriteHeader(413)
		_, _ = io.WriteString(w, "too large")
	})
	bothWires(t, func(t *testing.T, transport *http.Transport) {
		read, write := io.Pipe()
		defer func() { _ = write.Close() }()
		go func() { _, _ = write.Write([]byte("first")) }()
		response, err := transport.RoundTrip(te.request(t, http.MethodPost, "/files", g.id, 0, read))
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(response.Body)
		expect(t, response, string(text), 413, "too large")
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
	})
	eventually(t, "the request is counted out", func() bool { return te.metrics.open.Load() == 0 })
}

func TestAnswersKeepTheirForm(t *testing.T) {
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/none":
			w.WriteHeader(204)
		case "/same":
			w.Header().Set("ETag", `"x"`)
			w.WriteHeader(304)
		case "/range":
			http.ServeContent(w, r, "f.txt", time.Time{}, strings.NewReader("0123456789"))
		case "/gzip":
			w.Header().Set("Content-Encoding", "gzip")
			_, _ = w.Write([]byte("not really gzip"))
		case "/cookies":
			w.Header().Add("Set-Cookie", "a=1")
			w.Header().Add("Set-Cookie", "b=2")
			w.Header().Set("Connection", "X-Private")
			w.Header().Set("X-Private", "hop")
			w.Header().Set("Keep-Alive", "timeout=5")
		}
	})
	response, body := te.get(t, "/none", g.id, 0)
	expect(t, response, body, 204, "")
	response, body = te.get(t, "/same", g.id, 0)
	expect(t, response, body, 304, "")
	if response.Header.Get("ETag") != `"x"` {
		t.Fatal(response.Header)
	}
	request := te.request(t, http.MethodGet, "/range", g.id, 0, nil)
	request.Header.Set("Range", "bytes=2-4")
	response, body = do(t, request)
	expect(t, response, body, 206, "234")
	response, body = do(t, te.request(t, http.MethodHead, "/range", g.id, 0, nil))
	expect(t, response, body, 200, "")
	if response.ContentLength != 10 {
		t.Fatalf("HEAD says %d bytes", response.ContentLength)
	}
	response, body = te.get(t, "/gzip", g.id, 0)
	if expect(t, response, body, 200, "not really gzip"); response.Header.Get("Content-Encoding") != "gzip" {
		t.Fatal(response.Header)
	}
	response, _ = te.get(t, "/cookies", g.id, 0)
	if len(response.Header["Set-Cookie"]) != 2 || response.Header.Get("X-Private") != "" || response.Header.Get("Keep-Alive") != "" {
		t.Fatal(response.Header)
	}
}

func TestBrokenAnswersStayBroken(t *testing.T) {
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/sized" {
			w.Header().Set("Content-Length", "1000")
		}
		_, _ = io.WriteString(w, "half")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	bothWires(t, func(t *testing.T, transport *http.Transport) {
		for _, path := range []string{"/chunked", "/sized"} {
			response, err := transport.RoundTrip(te.request(t, http.MethodGet, path, g.id, 0, nil))
			if err != nil {
				t.Fatal(err)
			}
			if text, err := io.ReadAll(response.Body); err == nil {
				t.Errorf("%s ended as if it were whole: %q", path, text)
			}
			_ = response.Body.Close()
		}
	})
	// A server that breaks off before it says anything.
	silent, err := net.Listen("tcp", g.ip+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	go func() {
		for {
			conn, err := silent.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(make([]byte, 1000))
			_ = conn.Close()
		}
	}()
	port := silent.Addr().(*net.TCPAddr).Port
	response, body := te.get(t, "/", g.id, port)
	if response.StatusCode != 502 || !strings.Contains(body, "without an answer") {
		t.Fatalf("%d %s", response.StatusCode, body)
	}
}

func TestClientsDepartureReachesTheGuest(t *testing.T) {
	began, left := make(chan struct{}), make(chan error, 1)
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		if r.URL.Path != "/before-answer" {
			w.(http.Flusher).Flush()
		}
		began <- struct{}{}
		if r.URL.Path == "/upload" {
			_, err := io.Copy(io.Discard, r.Body)
			left <- err
			return
		}
		<-r.Context().Done()
		left <- r.Context().Err()
	})
	bothWires(t, func(t *testing.T, transport *http.Transport) {
		for _, path := range []string{"/before-answer", "/stream", "/upload"} {
			ctx, cancel := context.WithCancel(t.Context())
			var body io.Reader
			leave := cancel
			if path == "/upload" {
				read, write := io.Pipe()
				go func() { _, _ = write.Write([]byte("part")) }()
				body = read
				// Go's own HTTP/2 client sees the context's end only when its read of the body returns.
				leave = func() { cancel(); _ = write.CloseWithError(context.Canceled) }
			}
			request := te.request(t, http.MethodPost, path, g.id, 0, body).WithContext(ctx)
			go func() {
				if response, err := transport.RoundTrip(request); err == nil {
					_, _ = io.ReadAll(response.Body)
					_ = response.Body.Close()
				}
			}()
			<-began
			leave()
			select {
			case err := <-left:
				if err == nil {
					t.Errorf("%s ended well", path)
				}
			case <-time.After(5 * time.Second):
				t.Fatalf("%s: the guest does not know", path)
			}
		}
	})
}

// endless gives n bytes without holding any.
type endless struct{ left int64 }

func (e *endless) Read(p []byte) (int, error) {
	if e.left == 0 {
		return 0, io.EOF
	}
	n := int(min(int64(len(p)), e.left))
	e.left -= int64(n)
	return n, nil
}

func TestAGigabyteNeedsLittleMemory(t *testing.T) {
	const size = 1 << 30
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, r.Body, make([]byte, 256<<10))
			fmt.Fprintf(w, "%d %v", n, err)
			return
		}
		buffer := make([]byte, 256<<10)
		for sent := 0; sent < size; sent += len(buffer) {
			if _, err := w.Write(buffer); err != nil {
				return
			}
		}
	})
	runtime.GC()
	var peak atomic.Uint64
	done := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		var stats runtime.MemStats
		for {
			runtime.ReadMemStats(&stats)
			peak.Store(max(peak.Load(), stats.HeapInuse))
			select {
			case <-done:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	transport := h1Transport(t)
	response, err := transport.RoundTrip(te.request(t, http.MethodGet, "/", g.id, 0, nil))
	if err != nil {
		t.Fatal(err)
	}
	n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, response.Body, make([]byte, 256<<10))
	if err != nil || n != size {
		t.Fatalf("%d %v", n, err)
	}
	_ = response.Body.Close()
	request := te.request(t, http.MethodPost, "/", g.id, 0, &endless{left: size})
	if response, err = transport.RoundTrip(request); err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(response.Body)
	_ = response.Body.Close()
	close(done)
	watching.Wait()
	expect(t, response, string(text), 200, fmt.Sprintf("%d <nil>", size))
	if peak.Load() > 64<<20 {
		t.Fatalf("%d MiB of heap", peak.Load()>>20)
	}
}

func TestConnectionsToTheGuestAreReused(t *testing.T) {
	te, g, _ := oneGuest(t, say("ok"))
	var addresses sync.Map
	port := g.serve(0, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { addresses.Store(r.RemoteAddr, true) }))
	for range 20 {
		response, body := te.get(t, "/", g.id, port)
		expect(t, response, body, 200, "")
	}
	count := 0
	addresses.Range(func(any, any) bool { count++; return true })
	if count != 1 {
		t.Fatalf("%d connections for 20 requests", count)
	}
}

// A server that closes after each answer must not cost the client its own connection.
func TestTheClientsConnectionOutlivesTheServers(t *testing.T) {
	te, g, _ := oneGuest(t, say("guest"))
	port := g.serve(0, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Connection", "close")
		_, _ = io.Copy(w, r.Body)
	}))
	transport := h1Transport(t)
	fresh := 0
	trace := &httptrace.ClientTrace{GotConn: func(got httptrace.GotConnInfo) {
		if !got.Reused {
			fresh++
		}
	}}
	for n := range 50 {
		text := strings.Repeat("x", n*1000)
		request := te.request(t, http.MethodPost, "/", g.id, port, strings.NewReader(text))
		if n%2 == 0 {
			request = te.request(t, http.MethodPost, "/", g.id, port, newReader(text))
		}
		response, err := transport.RoundTrip(request.WithContext(httptrace.WithClientTrace(t.Context(), trace)))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(response.Body)
		_ = response.Body.Close()
		if err != nil || string(got) != text {
			t.Fatalf("request %d: %d bytes, %v", n, len(got), err)
		}
	}
	if fresh != 1 {
		t.Fatalf("%d connections for 50 requests", fresh)
	}
}

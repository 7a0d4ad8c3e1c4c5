package edge

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
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

func TestTrailers(t *testing.T) {
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "X-Announced")
		_, _ = io.Copy(w, r.Body)
		w.Header().Set("X-Announced", "a-"+r.Trailer.Get("X-Sum"))
		if r.URL.Path == "/more" {
			w.Header().Set(http.TrailerPrefix+"X-Surprise", "s")
		}
	})
	bothWires(t, func(t *testing.T, transport *http.Transport) {
		for _, path := range []string{"/", "/more"} {
			request := te.request(t, http.MethodPost, path, g.id, 0, newReader("body"))
			request.Trailer = http.Header{"X-Sum": {"42"}}
			request.Header.Set("TE", "trailers")
			response, err := transport.RoundTrip(request)
			if err != nil {
				t.Fatal(err)
			}
			text, _ := io.ReadAll(response.Body)
			_ = response.Body.Close()
			expect(t, response, string(text), 200, "body")
			if got := response.Trailer.Get("X-Announced"); got != "a-42" {
				t.Errorf("announced trailer %q of %v", got, response.Trailer)
			}
			if got := response.Trailer.Get("X-Surprise"); got != "s" && path == "/more" {
				t.Errorf("unannounced trailer %q of %v", got, response.Trailer)
			}
		}
	})
}

func TestGRPCSpeaksH2CWithTheServer(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	g := newGuest(t)
	control.put(g.serveGuest(say("guest")))
	te.waitFor(t, g.id)
	port := g.serve(0, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("X-Proto", r.Proto+" te="+r.Header.Get("TE"))
		w.WriteHeader(200)
		controller := http.NewResponseController(w)
		_ = controller.Flush()
		buffer := make([]byte, 100)
		for {
			n, err := r.Body.Read(buffer)
			_, _ = w.Write(bytes.ToUpper(buffer[:n]))
			_ = controller.Flush()
			if err != nil {
				break
			}
		}
		w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
	}), h2c())
	read, write := io.Pipe()
	request := te.request(t, http.MethodPost, "/pkg.Service/Bidi", g.id, port, read)
	request.Header.Set("Content-Type", "application/grpc+proto")
	request.Header.Set("TE", "trailers")
	response, err := h2cTransport(t).RoundTrip(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	if got := response.Header.Get("X-Proto"); got != "HTTP/2.0 te=trailers" {
		t.Fatal(got)
	}
	buffer := make([]byte, 100)
	for _, word := range []string{"one", "two"} {
		_, _ = io.WriteString(write, word)
		if n, err := response.Body.Read(buffer); err != nil || string(buffer[:n]) != strings.ToUpper(word) {
			t.Fatalf("%q %v", buffer[:n], err)
		}
	}
	_ = write.Close()
	if _, err := io.ReadAll(response.Body); err != nil {
		t.Fatal(err)
	}
	if response.Trailer.Get("Grpc-Status") != "0" {
		t.Fatalf("%v", response.Trailer)
	}
}

func TestManyStreamsOverOneH2CConnection(t *testing.T) {
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		_, _ = io.Copy(w, r.Body)
	})
	transport := h2cTransport(t)
	var wait sync.WaitGroup
	for n := range 100 {
		wait.Go(func() {
			text := strings.Repeat(fmt.Sprint(n), 10000)
			request := te.request(t, http.MethodPost, "/", g.id, 0, newReader(text))
			response, err := transport.RoundTrip(request)
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = response.Body.Close() }()
			if got, err := io.ReadAll(response.Body); err != nil || string(got) != text {
				t.Errorf("stream %d: %d bytes, %v", n, len(got), err)
			}
		})
	}
	wait.Wait()
}

func TestExpectContinue(t *testing.T) {
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/refuse" {
			w.WriteHeader(401)
			return
		}
		text, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "took %s", text)
	})
	start := func(path string) (net.Conn, *bufio.Reader) {
		conn, err := net.Dial("tcp", te.address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
		fmt.Fprintf(conn, "PUT %s HTTP/1.1\r\nHost: x\r\n%s: %s\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n", path, headerID, g.id)
		return conn, bufio.NewReader(conn)
	}
	conn, reader := start("/take")
	if line, err := reader.ReadString('\n'); err != nil || !strings.HasPrefix(line, "HTTP/1.1 100 ") {
		t.Fatalf("%q %v", line, err)
	}
	_, _ = reader.ReadString('\n')
	_, _ = io.WriteString(conn, "body")
	response, err := http.ReadResponse(reader, nil)
	if err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(response.Body)
	expect(t, response, string(text), 200, "took body")

	_, reader = start("/refuse")
	if line, err := reader.ReadString('\n'); err != nil || !strings.HasPrefix(line, "HTTP/1.1 401 ") {
		t.Fatalf("a body was asked for that nobody wants: %q %v", line, err)
	}
}

func TestEarlyHints(t *testing.T) {
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Link", "</style.css>")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Link")
		w.Header().Set("X-Final", "yes")
		_, _ = io.WriteString(w, "done")
	})
	var hints atomic.Int64
	trace := &httptrace.ClientTrace{Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
		if code == 103 && header.Get("Link") == "</style.css>" {
			hints.Add(1)
		}
		return nil
	}}
	request := te.request(t, http.MethodGet, "/", g.id, 0, nil)
	response, body := do(t, request.WithContext(httptrace.WithClientTrace(t.Context(), trace)))
	expect(t, response, body, 200, "done")
	if hints.Load() != 1 || response.Header.Get("X-Final") != "yes" || response.Header.Get("Link") != "" {
		t.Fatalf("%d hints, %v", hints.Load(), response.Header)
	}
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
			if path == "/upload" {
				read, write := io.Pipe()
				go func() { _, _ = write.Write([]byte("part")) }()
				body = read
			}
			request := te.request(t, http.MethodPost, path, g.id, 0, body).WithContext(ctx)
			go func() {
				if response, err := transport.RoundTrip(request); err == nil {
					_, _ = io.ReadAll(response.Body)
					_ = response.Body.Close()
				}
			}()
			<-began
			cancel()
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

func TestPump(t *testing.T) {
	for _, size := range []int{0, 1, smallBuffer, smallBuffer + 1, largeBuffer * 3} {
		total, pieces := 0, 0
		err := pump(&endless{left: int64(size)}, func(piece []byte) error { total += len(piece); pieces++; return nil })
		if err != nil || total != size || size == largeBuffer*3 && pieces > 6 {
			t.Errorf("%d bytes: %d in %d pieces, %v", size, total, pieces, err)
		}
	}
	broken := errors.New("broken")
	fine := func([]byte) error { return nil }
	if err := pump(io.MultiReader(strings.NewReader("x"), failing{broken}), fine); !errors.Is(err, broken) {
		t.Fatal(err)
	}
	if err := pump(strings.NewReader("x"), func([]byte) error { return broken }); !errors.Is(err, broken) {
		t.Fatal(err)
	}
}

// Pieces of every size, so that all ways through the server's buffer and ours are taken.
func TestChunkedAnswersArriveAsTheyWere(t *testing.T) {
	var pieces [][]byte
	for _, base := range []int{1, 2000, 2048, 4090, 4096, 8192, 30000, 65536, 70000} {
		for _, size := range []int{base, base + 1, base + 7} {
			pieces = append(pieces, bytes.Repeat([]byte{byte(len(pieces))}, size))
		}
	}
	whole := bytes.Join(pieces, nil)
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, _ *http.Request) {
		for _, piece := range pieces {
			_, _ = w.Write(piece)
			w.(http.Flusher).Flush()
		}
		_, _ = w.Write(whole)
	})
	bothWires(t, func(t *testing.T, transport *http.Transport) {
		for range 5 {
			response, err := transport.RoundTrip(te.request(t, http.MethodGet, "/", g.id, 0, nil))
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(response.Body)
			_ = response.Body.Close()
			if err != nil || !bytes.Equal(got, append(append([]byte(nil), whole...), whole...)) {
				t.Fatalf("%d bytes, not %d, %v", len(got), 2*len(whole), err)
			}
		}
	})
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

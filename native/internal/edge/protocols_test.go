package edge

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

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

// The server ends the call, or dies, while the client has more to say.
func TestGRPCServersHaveTheLastWord(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	g := newGuest(t)
	control.put(g.serveGuest(say("guest")))
	te.waitFor(t, g.id)
	port := g.serve(0, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = r.Body.Read(make([]byte, 5))
		switch r.URL.Path {
		case "/end":
			w.Header().Set("Content-Type", "application/grpc")
			w.WriteHeader(200)
			w.Header().Set(http.TrailerPrefix+"Grpc-Status", "7")
		case "/die":
			panic(http.ErrAbortHandler)
		case "/stay":
			w.WriteHeader(200)
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}
	}), h2c())
	transport := h2cTransport(t)
	call := func(path string) (*http.Response, error) {
		request := te.request(t, http.MethodPost, path, g.id, port, stillSending(t))
		request.Header.Set("Content-Type", "application/grpc")
		return transport.RoundTrip(request)
	}
	began := time.Now()
	response, err := call("/end")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(response.Body); err != nil || response.Trailer.Get("Grpc-Status") != "7" {
		t.Fatalf("%v %v", response.Trailer, err)
	}
	if response, err = call("/die"); err != nil || response.StatusCode != 502 {
		t.Fatalf("%v %v", response, err)
	}
	if response, err = call("/stay"); err != nil {
		t.Fatal(err)
	}
	control.end(g.id)
	if _, err := io.ReadAll(response.Body); err == nil {
		t.Fatal("a cut call looks whole")
	}
	if took := time.Since(began); took > 3*cutLimit {
		t.Fatalf("it took %v", took)
	}
	eventually(t, "all are counted out", func() bool { return te.metrics.open.Load() == 0 })
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

package edge

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"
)

// rawServer gives each connection to a function; what it does about HTTP is its own affair.
func (g *guest) rawServer(serve func(conn net.Conn)) int {
	g.t.Helper()
	listener, err := net.Listen("tcp", g.ip+":0")
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = conn.Close() }()
				serve(conn)
			}()
		}
	}()
	return listener.Addr().(*net.TCPAddr).Port
}

// stillSending is a body that has begun and doesn't end before the test.
func stillSending(t *testing.T) io.Reader {
	read, write := io.Pipe()
	go func() { _, _ = write.Write([]byte("first")) }()
	t.Cleanup(func() { _ = write.Close() })
	return read
}

// A server that dies while a client is still sending: the client learns it at once, not when it sends more.
func TestADeadServerIsToldToAClientThatStillSends(t *testing.T) {
	te, g, _ := oneGuest(t, say("guest"))
	silent := g.rawServer(func(conn net.Conn) { _, _ = conn.Read(make([]byte, 1000)) })
	halfway := g.rawServer(func(conn net.Conn) {
		_, _ = conn.Read(make([]byte, 1000))
		_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhalf\n\r\n")
		time.Sleep(50 * time.Millisecond)
	})
	bothWires(t, func(t *testing.T, transport *http.Transport) {
		began := time.Now()
		response, err := transport.RoundTrip(te.request(t, http.MethodPost, "/", g.id, silent, stillSending(t)))
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
		if response.StatusCode != 502 || time.Since(began) > cutLimit {
			t.Fatalf("%s after %v", response.Status, time.Since(began))
		}

		response, err = transport.RoundTrip(te.request(t, http.MethodPost, "/", g.id, halfway, stillSending(t)))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = response.Body.Close() }()
		reader := bufio.NewReader(response.Body)
		if line, err := reader.ReadString('\n'); err != nil || line != "half\n" {
			t.Fatalf("%q %v", line, err)
		}
		began = time.Now()
		if _, err := reader.ReadString('\n'); err == nil || err == io.EOF || time.Since(began) > cutLimit {
			t.Fatalf("%v after %v", err, time.Since(began))
		}
	})
}

func TestNonsenseFromAServer(t *testing.T) {
	te, g, _ := oneGuest(t, say("guest"))
	for _, answer := range []string{
		"", "nonsense\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
		"HTTP/1.1 abc\r\n\r\n", "SSH-2.0-OpenSSH_9.2\r\n", "HTTP/1.1 200 OK\r\nX: " + fmt.Sprintf("%0300000d", 0) + "\r\n\r\n",
	} {
		port := g.rawServer(func(conn net.Conn) {
			_, _ = conn.Read(make([]byte, 1000))
			_, _ = io.WriteString(conn, answer)
		})
		response, _ := te.get(t, "/", g.id, port)
		if response.StatusCode != 502 {
			t.Errorf("%.40q: %s", answer, response.Status)
		}
	}
	if te.metrics.panics.Load() != 0 {
		t.Error(te.logs.String())
	}
}

// An answer without a length ends with its connection.
func TestAnAnswerThatEndsWithItsConnection(t *testing.T) {
	te, g, _ := oneGuest(t, say("guest"))
	port := g.rawServer(func(conn net.Conn) {
		_, _ = conn.Read(make([]byte, 1000))
		_, _ = io.WriteString(conn, "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nold style")
	})
	response, body := te.get(t, "/", g.id, port)
	expect(t, response, body, 200, "old style")
}

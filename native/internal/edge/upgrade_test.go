package edge

import (
	"bufio"
	"crypto/sha1"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// upgraded opens an upgraded connection through the edge.
func (te *testEdge) upgraded(t *testing.T, path, id string, port int, protocol string, more ...string) (net.Conn, *bufio.Reader, *http.Response) {
	t.Helper()
	conn, err := net.Dial("tcp", te.address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(15 * time.Second))
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n%s: %s\r\n%s: %d\r\nConnection: keep-alive, Upgrade\r\nUpgrade: %s\r\n%s\r\n",
		path, headerID, id, headerPort, port, protocol, strings.Join(more, ""))
	reader := bufio.NewReader(conn)
	response, err := http.ReadResponse(reader, nil)
	if err != nil {
		t.Fatal(err)
	}
	return conn, reader, response
}

// upgrading is a server that agrees to any upgrade and hands the connection over.
func upgrading(use func(conn net.Conn, early *bufio.Reader)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		conn, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer func() { _ = conn.Close() }()
		accept := ""
		if key := r.Header.Get("Sec-WebSocket-Key"); key != "" {
			sum := sha1.Sum([]byte(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
			accept = "Sec-WebSocket-Accept: " + base64.StdEncoding.EncodeToString(sum[:]) + "\r\n"
		}
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+r.Header.Get("Upgrade")+"\r\n"+accept+"\r\n")
		use(conn, buffered.Reader)
	}
}

func TestWebSocket(t *testing.T) {
	te, g, _ := oneGuest(t, say("guest"))
	port := g.serve(0, upgrading(func(conn net.Conn, early *bufio.Reader) {
		for {
			payload, err := readFrame(early)
			if err != nil {
				return
			}
			_, _ = conn.Write(append([]byte{0x81, byte(len(payload))}, payload...))
		}
	}))
	conn, reader, response := te.upgraded(t, "/ws", g.id, port, "websocket",
		"Sec-WebSocket-Version: 13\r\n", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n")
	if response.StatusCode != 101 || response.Header.Get("Sec-WebSocket-Accept") != "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" ||
		!strings.EqualFold(response.Header.Get("Upgrade"), "websocket") {
		t.Fatalf("%d %v", response.StatusCode, response.Header)
	}
	for n := range 20 {
		text := fmt.Sprintf("message %d", n)
		frame := []byte{0x81, 0x80 | byte(len(text)), 1, 2, 3, 4}
		for i := range text {
			frame = append(frame, text[i]^[]byte{1, 2, 3, 4}[i%4])
		}
		if _, err := conn.Write(frame); err != nil {
			t.Fatal(err)
		}
		if payload, err := readFrame(reader); err != nil || string(payload) != text {
			t.Fatalf("%q %v", payload, err)
		}
	}
	_ = conn.Close()
	eventually(t, "the stream is counted out", func() bool { return te.metrics.open.Load() == 0 && te.metrics.connections.Load() == 0 })
}

// readFrame reads one short WebSocket frame.
func readFrame(reader *bufio.Reader) ([]byte, error) {
	var head [2]byte
	if _, err := io.ReadFull(reader, head[:]); err != nil {
		return nil, err
	}
	var mask [4]byte
	if head[1]&0x80 != 0 {
		if _, err := io.ReadFull(reader, mask[:]); err != nil {
			return nil, err
		}
	}
	payload := make([]byte, head[1]&0x7f)
	_, err := io.ReadFull(reader, payload)
	for i := range payload {
		payload[i] ^= mask[i%4]
	}
	return payload, err
}

func TestUpgradeKeepsHalfCloses(t *testing.T) {
	te, g, _ := oneGuest(t, say("guest"))
	port := g.serve(0, upgrading(func(conn net.Conn, early *bufio.Reader) {
		_, _ = io.WriteString(conn, "hello\n")
		text, _ := io.ReadAll(early) // to the client's end of speech
		_, _ = fmt.Fprintf(conn, "had %d bytes\n", len(text))
	}))
	conn, reader, response := te.upgraded(t, "/raw", g.id, port, "tcp")
	if response.StatusCode != 101 {
		t.Fatal(response.Status)
	}
	if line, err := reader.ReadString('\n'); err != nil || line != "hello\n" {
		t.Fatalf("%q %v", line, err)
	}
	_, _ = io.Copy(conn, &endless{left: 3 << 20})
	_ = conn.(*net.TCPConn).CloseWrite()
	if line, err := reader.ReadString('\n'); err != nil || line != "had 3145728 bytes\n" {
		t.Fatalf("%q %v", line, err)
	}
	if _, err := reader.ReadByte(); err != io.EOF {
		t.Fatal(err)
	}
}

func TestRefusedUpgradeIsAnOrdinaryAnswer(t *testing.T) {
	te, g, _ := oneGuest(t, say("guest"))
	port := g.serve(0, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, "no "+r.Header.Get("Upgrade"), http.StatusUpgradeRequired)
	}))
	_, _, response := te.upgraded(t, "/", g.id, port, "websocket")
	text, _ := io.ReadAll(response.Body)
	expect(t, response, string(text), 426, "no websocket\n")
}

func TestUnaskedUpgradeIsCutOff(t *testing.T) {
	te, g, _ := oneGuest(t, say("guest"))
	port := g.serve(0, upgrading(func(conn net.Conn, _ *bufio.Reader) { _, _ = io.WriteString(conn, "smuggled") }))
	response, err := h1Transport(t).RoundTrip(te.request(t, http.MethodGet, "/", g.id, port, nil))
	if err == nil {
		t.Fatalf("%v", response.Status)
	}
}

func TestServerThatListensOnLoopbackOnly(t *testing.T) {
	inner := serveOn(t, "127.0.0.1", 0, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "inner %s %s", r.URL.Path, r.Header.Get("Authorization"))
	}))
	control := newFakeControl(t)
	te := startEdge(t, control)
	g := newGuest(t)
	const port = 7 // nothing listens there on the sandbox's address
	g.connect = func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/atoll/connect/7" || r.Header.Get("Authorization") != "Bearer tok-"+g.id {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		upgrading(func(conn net.Conn, early *bufio.Reader) {
			server, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", inner))
			if err != nil {
				return
			}
			defer func() { _ = server.Close() }()
			go func() { _, _ = io.Copy(server, early); _ = server.(*net.TCPConn).CloseWrite() }()
			_, _ = io.Copy(conn, server)
		})(w, r)
	}
	control.put(g.serveGuest(say("guest")))
	te.waitFor(t, g.id)
	for range 5 {
		request := te.request(t, http.MethodGet, "/app", g.id, port, nil)
		request.Header.Set("Authorization", "Bearer users-own")
		response, body := do(t, request)
		expect(t, response, body, 200, "inner /app Bearer users-own")
	}
	if g.tunnels.Load() != 1 {
		t.Fatalf("%d tunnels for 5 requests", g.tunnels.Load())
	}
	response, body := te.get(t, "/", g.id, 11)
	expect(t, response, body, 502, `{"sandboxId":"`+g.id+`","message":"The sandbox is running but port is not open","port":11,"code":502}`)
}

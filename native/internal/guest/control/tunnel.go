package control

import (
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"time"

	"atoll.local/native/internal/guest/answer"
)

const (
	tunnelsMax  = 1024
	dialTimeout = 5 * time.Second
)

// connect joins the request's connection with a server that may listen on loopback only.
func (c *Control) connect(w http.ResponseWriter, r *http.Request, portText string) {
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil || port == 0 {
		answer.Error(w, http.StatusBadRequest, "invalid port '%s'", portText)
		return
	}
	if !strings.EqualFold(r.Header.Get("Upgrade"), "tcp") {
		answer.Error(w, http.StatusUpgradeRequired, "Upgrade: tcp is required")
		return
	}
	select {
	case c.tunnels <- struct{}{}:
		defer func() { <-c.tunnels }()
	default:
		answer.Error(w, http.StatusTooManyRequests, "too many connections")
		return
	}
	server, err := dialLoopback(uint16(port))
	if err != nil {
		answer.Error(w, http.StatusBadGateway, "port %d is not open: %v", port, err)
		return
	}
	defer server.Close()
	client, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		answer.Error(w, http.StatusInternalServerError, "connection cannot be upgraded: %v", err)
		return
	}
	defer client.Close()
	_ = client.SetDeadline(time.Time{})
	if _, err := io.WriteString(client, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"); err != nil {
		return
	}
	// What the client sent right behind its request was read into the server's buffer.
	if n := buffered.Reader.Buffered(); n > 0 {
		early, _ := buffered.Reader.Peek(n)
		if _, err := server.Write(early); err != nil {
			return
		}
	}
	splice(client, server)
}

// dialLoopback tries 127.0.0.1, then ::1.
func dialLoopback(port uint16) (net.Conn, error) {
	dialer := net.Dialer{Timeout: dialTimeout}
	text := strconv.Itoa(int(port))
	conn, err := dialer.Dial("tcp4", net.JoinHostPort("127.0.0.1", text))
	if err == nil || !errors.Is(err, syscall.ECONNREFUSED) {
		return conn, err
	}
	if conn6, err6 := dialer.Dial("tcp6", net.JoinHostPort("::1", text)); err6 == nil {
		return conn6, nil
	}
	return nil, err
}

// splice copies both ways until both sides have ended; a half-closed side stays half-closed.
func splice(a, b net.Conn) {
	done := make(chan struct{})
	go func() {
		copyHalf(b, a)
		close(done)
	}()
	copyHalf(a, b)
	<-done
}

func copyHalf(to, from net.Conn) {
	_, err := io.Copy(to, from)
	if half, ok := to.(interface{ CloseWrite() error }); ok && err == nil {
		_ = half.CloseWrite()
		return
	}
	// Broken, not ended: nothing more can be said in either direction.
	_ = to.Close()
	_ = from.Close()
}

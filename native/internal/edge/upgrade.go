package edge

import (
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"
)

// After one side of an upgraded connection has said its last word, the other may go on as long as it says something
// this often. A client that vanished for good would otherwise be kept for ever.
const halfOpenSilence = 60 * time.Second

// switchProtocols joins the two connections after a 101.
func (x *exchange) switchProtocols(response *http.Response) {
	inner, ok := response.Body.(io.ReadWriteCloser)
	if !ok || x.upgrade == "" || !strings.EqualFold(x.upgrade, response.Header.Get("Upgrade")) {
		_ = response.Body.Close()
		x.abort() // an upgrade that nobody asked for
	}
	defer func() { _ = inner.Close() }()
	outer, buffered, err := http.NewResponseController(x.writer).Hijack()
	if err != nil {
		x.abort() // HTTP/2 has no upgrade; the transport would not have sent one
	}
	defer func() { _ = outer.Close() }()
	// The server left the deadlines of the request's head on it.
	_ = outer.SetDeadline(time.Time{})
	// Not the request's context: the server ends that one as soon as the client has said its last word.
	if x.ending != nil {
		x.ending(func() {
			_ = outer.Close()
			_ = inner.Close()
		})
	}
	if err := writeSwitch(buffered, response); err != nil {
		return
	}
	join(outer, buffered, inner, x.moved)
}

func writeSwitch(to interface {
	io.Writer
	Flush() error
}, response *http.Response,
) error {
	upgrade := response.Header.Get("Upgrade")
	dropHopByHop(response.Header)
	response.Header.Set("Connection", "Upgrade")
	response.Header.Set("Upgrade", upgrade)
	head := &http.Response{StatusCode: response.StatusCode, ProtoMajor: 1, ProtoMinor: 1, Header: response.Header}
	if err := head.Write(to); err != nil {
		return err
	}
	return to.Flush()
}

// join copies both ways until both are done.
func join(outer net.Conn, early io.Reader, inner io.ReadWriteCloser, moved *atomic.Int64) {
	var half atomic.Pointer[time.Timer]
	closeBoth := func() {
		_ = outer.Close()
		_ = inner.Close()
	}
	extend := func() {
		if timer := half.Load(); timer != nil {
			timer.Reset(halfOpenSilence)
		}
	}
	done := make(chan error, 2)
	// `early` is the server's reader: it gives what it has read ahead, then the connection itself.
	go func() { done <- oneWay(inner, early, func(int) { extend() }) }()
	go func() { done <- oneWay(outer, inner, func(n int) { moved.Add(int64(n)); extend() }) }()
	if err := <-done; err != nil {
		closeBoth() // one direction is broken: the other has nobody to speak to
	}
	timer := time.AfterFunc(halfOpenSilence, closeBoth)
	defer timer.Stop()
	half.Store(timer)
	<-done
}

func oneWay(to io.Writer, from io.Reader, wrote func(n int)) error {
	err := pump(from, func(piece []byte) error {
		_, err := to.Write(piece)
		wrote(len(piece))
		return err
	})
	if err != nil {
		return err
	}
	if closer, ok := to.(interface{ CloseWrite() error }); ok {
		return closer.CloseWrite()
	}
	return nil
}

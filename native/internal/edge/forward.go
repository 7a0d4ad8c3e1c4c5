package edge

import (
	"context"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"atoll.local/native/internal/node"
)

// trip sends a request on its way; it is http.RoundTripper's method.
type trip func(*http.Request) (*http.Response, error)

// exchange is one request on its way through the edge and its answer on the way back. Neither body is ever held: what
// one side sends is at the other as soon as it has been read.
type exchange struct {
	writer  http.ResponseWriter
	in      *http.Request
	out     *http.Request
	upgrade string
	moved   *atomic.Int64 // bytes of answers

	// before, if set, sees the answer before its head goes out, and may change it or take its time.
	before func(*http.Response)

	// ending, if set, is told what to call when the placement ends while the answer is delivered.
	ending func(abort func())

	// The connection is watched while it may break under a request whose body is still to come.
	conn   atomic.Pointer[node.Conn]
	broken func()

	over atomic.Pointer[node.Conn] // the connection that the request went over last

	delivered bool // the answer came from behind the edge, and is the client's

	last    bool        // the answer says that it is the client's connection's last
	hurried atomic.Bool // what is left of the answer has little time

	mu       sync.Mutex
	answered bool // the final head is being written: no more 1xx
}

func newExchange(ctx context.Context, w http.ResponseWriter, r *http.Request, to *url.URL, moved *atomic.Int64) *exchange {
	x := &exchange{writer: w, in: r, moved: moved}
	header, upgrade := onward(r.Header)
	x.upgrade = upgrade
	x.broken = x.interrupt
	location := *to
	x.out = (&http.Request{
		Method:        r.Method,
		URL:           &location,
		Proto:         "HTTP/1.1",
		ProtoMajor:    1,
		ProtoMinor:    1,
		Header:        header,
		Host:          r.Host,
		ContentLength: r.ContentLength,
	}).WithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		Got1xxResponse: x.interim, GotConn: x.watch,
	}))
	if r.ContentLength != 0 && r.Body != nil && r.Body != http.NoBody {
		x.out.Body = &oneBody{ReadCloser: r.Body, controller: http.NewResponseController(w), end: make(chan struct{})}
		// The map is shared on purpose: the server fills in the values when the body has ended, the transport reads
		// them then.
		x.out.Trailer = r.Trailer
	}
	return x
}

// interim passes 1xx answers on. 100 is not: the server sends it when the transport starts to read the body.
func (x *exchange) interim(code int, header textproto.MIMEHeader) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.answered || code == http.StatusContinue {
		return nil
	}
	own := x.writer.Header()
	saved := own.Clone()
	copyHeader(own, http.Header(header))
	x.writer.WriteHeader(code)
	clear(own)
	copyHeader(own, saved)
	return nil
}

// send returns the answer's head, or an error after which the caller may still answer for itself.
func (x *exchange) send(through trip) (*http.Response, error) {
	if x.in.ProtoMajor == 1 && x.out.Body != nil {
		// Else the server would swallow the rest of the request's body before the first byte of the answer.
		_ = http.NewResponseController(x.writer).EnableFullDuplex()
	}
	response, err := through(x.out)
	x.mu.Lock()
	x.answered = true
	x.mu.Unlock()
	if err == nil {
		x.settle()
	}
	return response, err
}

// again makes the exchange ready for another send.
func (x *exchange) again() {
	x.mu.Lock()
	x.answered = false
	x.mu.Unlock()
}

// deliver passes the answer to the client; it aborts when the answer breaks off. It returns an error when it broke off before anything of
// it was the client's: the caller may still answer for itself.
func (x *exchange) deliver(response *http.Response) error {
	if response.StatusCode == http.StatusSwitchingProtocols {
		x.switchProtocols(response)
		return nil
	}
	defer func() { _ = response.Body.Close() }()
	if x.ending != nil {
		// A client that doesn't read, or doesn't finish its request, would else be stuck with us.
		x.ending(x.hurry)
	}
	small := smallBuffers.Get().(*[smallBuffer]byte)
	defer smallBuffers.Put(small)
	first, err := x.begin(response, small[:])
	if err != nil {
		return err
	}
	dropHopByHop(response.Header)
	if x.before != nil {
		x.before(response)
	}
	header := x.writer.Header()
	copyHeader(header, response.Header)
	announced := len(response.Trailer)
	for name := range response.Trailer {
		header.Add("Trailer", name)
	}
	if x.last = !x.fit(response); x.last {
		header.Set("Connection", "close")
	}
	x.writer.WriteHeader(response.StatusCode)
	if err := x.pour(response, first); err != nil {
		x.abort()
	}
	x.delivered = true
	_ = response.Body.Close() // fills in the trailers
	if len(response.Trailer) == 0 {
		return nil
	}
	// The flush makes the answer chunked even when its body was short, as trailers need it.
	_ = http.NewResponseController(x.writer).Flush()
	for name, values := range response.Trailer {
		if len(response.Trailer) != announced {
			name = http.TrailerPrefix + name
		}
		for _, value := range values {
			header.Add(name, value)
		}
	}
	return nil
}

// begin waits for the first piece of an answer whose head leaves together with it: until that has come, an answer that breaks off can be
// told from one that never was.
func (x *exchange) begin(response *http.Response, into []byte) ([]byte, error) {
	if response.ContentLength <= 0 || response.ContentLength >= divertFrom || response.Body == http.NoBody {
		return nil, nil
	}
	for {
		n, err := response.Body.Read(into)
		if n > 0 {
			return into[:n], nil
		}
		if err == io.EOF {
			return nil, io.ErrUnexpectedEOF
		}
		if err != nil {
			return nil, err
		}
	}
}

// pour copies the answer's body, each piece flushed as it comes. An answer of known length that came whole needs no
// flush: it leaves with its head, in one packet, when the handler returns.
func (x *exchange) pour(response *http.Response, first []byte) error {
	controller := http.NewResponseController(x.writer)
	left := response.ContentLength
	if left < 0 && response.Body != http.NoBody {
		if err := controller.Flush(); err != nil {
			return err
		}
	}
	send := func(piece []byte) error {
		if _, err := x.writer.Write(piece); err != nil {
			return err
		}
		x.moved.Add(int64(len(piece)))
		if left -= int64(len(piece)); left == 0 {
			return nil
		}
		return controller.Flush()
	}
	if len(first) > 0 {
		if err := send(first); err != nil {
			return err
		}
	}
	conn := connOf(x.in.Context())
	if left >= divertFrom && conn != nil && x.in.ProtoMajor == 1 && response.ProtoMajor == 1 {
		if to, ok := x.writer.(io.ReaderFrom); ok && x.over.Load() != nil {
			return x.divert(to, response.Body, x.over.Load())
		}
	}
	if conn == nil || x.in.ProtoMajor != 1 || left >= 0 {
		return pump(response.Body, send)
	}
	return pump(response.Body, func(piece []byte) error {
		if len(piece) <= serverBuffer {
			return send(piece)
		}
		return conn.gather(func() error { return send(piece) })
	})
}

var longAgo = time.Unix(1, 0)

// An answer that is all there when its placement ends has so long to be taken; one that isn't breaks off by itself.
const takingMax = 100 * time.Millisecond

// hurry frees whoever is stuck in a read or a write of the client's side, soon: an answer that is whole still goes out.
func (x *exchange) hurry() {
	x.hurried.Store(true)
	_ = http.NewResponseController(x.writer).SetWriteDeadline(time.Now().Add(takingMax))
	x.interrupt()
}

// unhurried takes back a hurry that came when all was done, for the connection's next request. It is called when nobody can hurry any more.
func (x *exchange) unhurried() {
	if x.hurried.Load() {
		_ = http.NewResponseController(x.writer).SetWriteDeadline(time.Time{})
	}
}

// cut makes every read and write of the client's side fail now. It must not be called after the handler has returned.
func cut(w http.ResponseWriter) {
	controller := http.NewResponseController(w)
	_ = controller.SetWriteDeadline(longAgo)
	_ = controller.SetReadDeadline(longAgo)
}

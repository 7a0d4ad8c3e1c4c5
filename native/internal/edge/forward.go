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
	shared bool // other requests use the connection at the same time; the transport then watches it itself

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
		x.out.Body = &oneBody{ReadCloser: r.Body, controller: http.NewResponseController(w)}
		// The map is shared on purpose: the server fills in the values when the body has ended, the transport reads
		// them then.
		x.out.Trailer = r.Trailer
	}
	return x
}

// oneBody is the client's body, which the transport may close but which belongs to the server. A read of it can be
// interrupted: while the transport waits for more of it, it tells nobody that its connection has broken.
type oneBody struct {
	io.ReadCloser
	controller *http.ResponseController
	touched    atomic.Bool

	mu          sync.Mutex
	interrupted bool
	over        bool
}

func (b *oneBody) Read(p []byte) (int, error) {
	b.touched.Store(true)
	return b.ReadCloser.Read(p)
}

func (b *oneBody) Close() error { return nil }

func (b *oneBody) interrupt() {
	b.mu.Lock()
	defer b.mu.Unlock()
	// Under the lock: a response writer must not be touched once its handler has returned.
	if !b.over && !b.interrupted {
		b.interrupted = true
		_ = b.controller.SetReadDeadline(longAgo)
	}
}

// body returns the request's body, or nil when it has none.
func (x *exchange) body() *oneBody {
	body, _ := x.out.Body.(*oneBody)
	return body
}

// untouched is true when nothing of the request's body has been read, so that it can be sent elsewhere.
func (x *exchange) untouched() bool {
	body := x.body()
	return body == nil || !body.touched.Load()
}

// interrupt makes the transport stop waiting for the request's body. The answer can still be written.
func (x *exchange) interrupt() {
	if body := x.body(); body != nil {
		body.interrupt()
	}
}

// departed is true when the client has gone. Its context alone does not say: an interrupted read ends that, too.
func (x *exchange) departed() bool {
	if x.in.Context().Err() == nil {
		return false
	}
	body := x.body()
	if body == nil {
		return true
	}
	body.mu.Lock()
	defer body.mu.Unlock()
	return !body.interrupted
}

// finish must be called before the handler returns.
func (x *exchange) finish() {
	body := x.body()
	if body == nil {
		return
	}
	body.mu.Lock()
	body.over = true
	body.mu.Unlock()
	if conn := x.conn.Swap(nil); conn != nil {
		conn.Unwatch(&x.broken)
	}
}

// watch is told which connection the request goes over.
func (x *exchange) watch(got httptrace.GotConnInfo) {
	if conn, ok := got.Conn.(*node.Conn); ok && x.body() != nil && !x.shared {
		if old := x.conn.Swap(conn); old != nil {
			old.Unwatch(&x.broken)
		}
		conn.Watch(&x.broken)
	}
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
	return response, err
}

// again makes the exchange ready for another send.
func (x *exchange) again() {
	x.mu.Lock()
	x.answered = false
	x.mu.Unlock()
}

// deliver passes the answer to the client. It panics with http.ErrAbortHandler when the answer breaks off, so that the
// client sees a broken answer rather than a short one.
func (x *exchange) deliver(response *http.Response) {
	if response.StatusCode == http.StatusSwitchingProtocols {
		x.switchProtocols(response)
		return
	}
	defer func() { _ = response.Body.Close() }()
	if x.ending != nil {
		// A client that doesn't read, or doesn't finish its request, would else be stuck with us.
		x.ending(func() { cut(x.writer) })
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
	x.writer.WriteHeader(response.StatusCode)
	if err := x.pour(response); err != nil {
		panic(http.ErrAbortHandler)
	}
	_ = response.Body.Close() // fills in the trailers
	if len(response.Trailer) == 0 {
		return
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
}

// pour copies the answer's body, each piece flushed as it comes. An answer of known length that came whole needs no
// flush: it leaves with its head, in one packet, when the handler returns.
func (x *exchange) pour(response *http.Response) error {
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
	conn := connOf(x.in.Context())
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

// Small buffers serve streams that say little now and then; the first full read fetches a large one.
const (
	smallBuffer = 4 << 10
	largeBuffer = 64 << 10
	smallRuns   = 16
)

var (
	smallBuffers = sync.Pool{New: func() any { return new([smallBuffer]byte) }}
	largeBuffers = sync.Pool{New: func() any { return new([largeBuffer]byte) }}
)

// pump sends what it reads, piece by piece, until from ends.
func pump(from io.Reader, send func(piece []byte) error) error {
	small := smallBuffers.Get().(*[smallBuffer]byte)
	defer smallBuffers.Put(small)
	var large *[largeBuffer]byte
	release := func() {
		if large != nil {
			largeBuffers.Put(large)
			large = nil
		}
	}
	defer release()
	buffer, quiet := small[:], 0
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			if err := send(buffer[:n]); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		switch {
		case n == len(buffer) && large == nil:
			large = largeBuffers.Get().(*[largeBuffer]byte)
			buffer, quiet = large[:], 0
		case n > smallBuffer:
			quiet = 0
		case large != nil:
			if quiet++; quiet > smallRuns {
				release()
				buffer = small[:]
			}
		}
	}
}

var longAgo = time.Unix(1, 0)

// cut makes every read and write of the client's side fail now. It must not be called after the handler has returned.
func cut(w http.ResponseWriter) {
	controller := http.NewResponseController(w)
	_ = controller.SetWriteDeadline(longAgo)
	_ = controller.SetReadDeadline(longAgo)
}

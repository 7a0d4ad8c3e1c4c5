package edge

import (
	"io"
	"net/http"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"time"

	"atoll.local/native/internal/node"
)

// oneBody is the client's body, which the transport may close but which belongs to the server. A read of it can be
// interrupted: while the transport waits for more of it, it tells nobody that its connection has broken.
type oneBody struct {
	io.ReadCloser
	controller *http.ResponseController
	shared     bool // other requests use the connection at the same time
	touched    atomic.Bool
	ended      atomic.Bool // nothing more is to come, so nobody waits for it
	end        chan struct{}
	once       sync.Once

	mu          sync.Mutex
	interrupted bool
	over        bool
}

func (b *oneBody) Read(p []byte) (int, error) {
	b.touched.Store(true)
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		b.ended.Store(true)
		b.once.Do(func() { close(b.end) })
	}
	return n, err
}

// Close is the transport's word that it wants no more. Over HTTP/2 it says so before it waits for a read to return; over
// HTTP/1.1 it says so when it waits for none, and the server may still want the rest.
func (b *oneBody) Close() error {
	if b.shared {
		b.interrupt()
	}
	return nil
}

func (b *oneBody) interrupt() {
	b.mu.Lock()
	defer b.mu.Unlock()
	// Under the lock: a response writer must not be touched once its handler has returned.
	// A body that has ended must be left alone: the next request comes over the same connection.
	if !b.over && !b.interrupted && !b.ended.Load() {
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

// settle says that the answer's head has come, after which a broken connection breaks the answer: nobody has to be told, and the client's
// own connection is left to be used again.
func (x *exchange) settle() {
	if conn := x.conn.Swap(nil); conn != nil {
		conn.Unwatch(&x.broken)
	}
}

// fit says whether the client's connection will be of use for a next request, as far as that is known before its answer goes out: the request
// has come to its end, or will have by the end of its answer.
func (x *exchange) fit(response *http.Response) bool {
	body := x.body()
	if body == nil || x.in.ProtoMajor != 1 || body.ended.Load() {
		return true
	}
	body.mu.Lock()
	defer body.mu.Unlock()
	// What echoes its request as it comes has no known length, and the request has mostly ended by the end of the answer.
	return !body.interrupted && (response.ContentLength < 0 || x.small())
}

// small says whether what is left of the request is on its way already.
func (x *exchange) small() bool {
	return 0 <= x.in.ContentLength && x.in.ContentLength <= remainderMax
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

// abort breaks the answer off, so that the client sees a broken one rather than a short one. Without the cut the server
// would first wait for the rest of the request.
func (x *exchange) abort() {
	x.finish()
	cut(x.writer)
	panic(http.ErrAbortHandler)
}

// giveUpAlone aborts where the client has gone: nobody is there to be told.
func (x *exchange) giveUpAlone() {
	if x.departed() {
		x.abort()
	}
}

// A client whose request is not wanted to its end has so long to notice, before its connection is closed.
const lingering = 5 * time.Second

// An answer can be over before the transport has read that the request is.
const lastWords = 20 * time.Millisecond

// finish must be called before the handler returns.
func (x *exchange) finish() {
	body := x.body()
	if body == nil {
		return
	}
	if x.delivered && x.in.ProtoMajor == 1 && !body.ended.Load() && !x.drain(body) {
		// What is still to come of this request must not be taken for the next.
		if conn := connOf(x.in.Context()); conn != nil {
			conn.leave()
		}
	}
	body.mu.Lock()
	if !body.over && !body.interrupted && !body.ended.Load() && x.in.ProtoMajor == 1 {
		_ = body.controller.SetReadDeadline(time.Now().Add(lingering))
	}
	body.over = true
	body.mu.Unlock()
	if conn := x.conn.Swap(nil); conn != nil {
		conn.Unwatch(&x.broken)
	}
}

// drain has what is left of a small request read, after its answer, and says whether it has ended: by the transport, or where that has lost
// its interest, here. The server would close the connection without a word (see part).
func (x *exchange) drain(body *oneBody) bool {
	// Else the client would not have its answer before this.
	if !x.last && http.NewResponseController(x.writer).Flush() != nil {
		return false
	}
	select {
	case <-body.end:
		return true
	case <-time.After(lastWords):
	}
	body.mu.Lock()
	hopeless := body.interrupted || x.last || !x.small()
	if !hopeless {
		_ = body.controller.SetReadDeadline(time.Now().Add(remainderTime))
	}
	body.mu.Unlock()
	if hopeless {
		return false
	}
	_, err := io.Copy(io.Discard, body)
	return err == nil
}

// What is left of a request to which the edge itself answers is read, when it is small and so on its way already.
const (
	remainderMax  = 64 << 10
	remainderTime = time.Second
)

// part makes the client's connection fit for its next request, or says that it is not. It must be called before the edge
// answers for itself to a request that was sent on its way: in full duplex the server does not read the rest of a request
// before it answers, and when it reads it afterwards it meets its own background read and closes the connection without
// a word, under the client's next request. Source: net/http of Go 1.26, finishRequest and connReader.
func part(w http.ResponseWriter, r *http.Request) {
	if r.ProtoMajor != 1 || r.Body == nil || r.Body == http.NoBody {
		return
	}
	controller := http.NewResponseController(w)
	if 0 <= r.ContentLength && r.ContentLength <= remainderMax {
		_ = controller.SetReadDeadline(time.Now().Add(remainderTime))
		if _, err := io.Copy(io.Discard, r.Body); err == nil {
			return
		}
	}
	w.Header().Set("Connection", "close")
}

// share says that the request goes over a connection that carries others: the transport then watches it itself.
func (x *exchange) share() {
	if body := x.body(); body != nil {
		body.shared = true
	}
}

// watch is told which connection the request goes over.
func (x *exchange) watch(got httptrace.GotConnInfo) {
	conn, ok := got.Conn.(*node.Conn)
	x.over.Store(conn)
	if ok && x.body() != nil && !x.body().shared {
		if old := x.conn.Swap(conn); old != nil {
			old.Unwatch(&x.broken)
		}
		conn.Watch(&x.broken)
	}
}

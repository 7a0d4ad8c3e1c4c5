package process

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// The hub carries one process's output to its subscribers.
//
// Rules: without a subscriber output is dropped and the process never waits. With one, output is lossless: a slow
// subscriber slows the process down through its bounded queue. A subscriber that takes nothing at all for stallTicks
// is cut off, so it can hold up the process and the other subscribers once, and only that long.

// queueBytesMax is one subscriber's queue: a dozen chunks, enough to keep the connection busy.
const queueBytesMax = 512 << 10

// A stall is counted in ticks, not by the clock: after a restore from a checkpoint the monotonic clock has jumped and
// all timers fire at once, which is then one tick and not the end of every subscriber.
const (
	stallTick  = time.Second
	stallTicks = 20
)

var errSlow = errors.New("subscriber does not take the output")

// frame is one finished envelope, shared by all subscribers and recycled when the last has written it.
type frame struct {
	bytes []byte
	users atomic.Int32
}

var frames = sync.Pool{New: func() any { return new(frame) }}

func (f *frame) release() {
	if f.users.Add(-1) == 0 {
		frames.Put(f)
	}
}

// dataFrame makes the envelope of one chunk: {"event":{"data":{"stdout":"..."}}}, encoded once for everybody.
func dataFrame(kind string, chunk []byte) *frame {
	f := frames.Get().(*frame)
	const opening, middle, closing = `{"event":{"data":{"`, `":"`, `"}}}`
	size := len(opening) + len(kind) + len(middle) + base64.StdEncoding.EncodedLen(len(chunk)) + len(closing)
	b := append(f.bytes[:0], 0)
	b = binary.BigEndian.AppendUint32(b, uint32(size))
	b = append(b, opening...)
	b = append(b, kind...)
	b = append(b, middle...)
	b = base64.StdEncoding.AppendEncode(b, chunk)
	f.bytes = append(b, closing...)
	return f
}

type hub struct {
	mu          sync.Mutex
	subscribers []*subscriber
	finished    bool
	ended       chan struct{} // closed when no more output comes
	keeps       bool
	last        []byte // the end of what was written, of a process whose last words are kept
	tick        time.Duration
}

func newHub() *hub { return &hub{tick: stallTick, ended: make(chan struct{})} }

// lastBytes of a command's output say why it ended.
const lastBytes = 600

// lastWords is the end of the output as text, once no more of it comes or patience has run out.
func (h *hub) lastWords(patience time.Duration) string {
	select {
	case <-h.ended:
	case <-time.After(patience):
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return strings.TrimSpace(strings.ToValidUTF8(string(h.last), "�"))
}

// keep notes the end of the output. The caller holds the lock.
func (h *hub) keep(chunk []byte) {
	h.last = append(h.last, chunk[max(0, len(chunk)-lastBytes):]...)
	if over := len(h.last) - lastBytes; over > 0 {
		h.last = append(h.last[:0], h.last[over:]...)
	}
}

// subscribe registers a new subscriber; it gets all output from now on, or only the end when that came already.
func (h *hub) subscribe() *subscriber {
	s := &subscriber{
		wake: make(chan struct{}, 1),
		room: make(chan struct{}, 1),
		gone: make(chan struct{}),
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.finished {
		s.finished = true
		return s
	}
	h.subscribers = append(h.subscribers, s)
	return s
}

func (h *hub) unsubscribe(s *subscriber) {
	h.mu.Lock()
	for i, other := range h.subscribers {
		if other == s {
			h.subscribers = append(h.subscribers[:i:i], h.subscribers[i+1:]...)
			break
		}
	}
	h.mu.Unlock()
	s.leave(nil)
}

// publish hands one chunk to every subscriber, waiting for room where there is none.
func (h *hub) publish(kind string, chunk []byte) {
	h.mu.Lock()
	subscribers := h.subscribers
	if h.keeps {
		h.keep(chunk)
	}
	h.mu.Unlock()
	if len(subscribers) == 0 {
		return
	}
	f := dataFrame(kind, chunk)
	f.users.Store(int32(len(subscribers)))
	for _, s := range subscribers {
		if !s.push(f, h.tick) {
			f.release()
		}
	}
}

// finish tells every subscriber that no more output comes.
func (h *hub) finish() {
	h.mu.Lock()
	if !h.finished {
		close(h.ended)
	}
	h.finished = true
	subscribers := h.subscribers
	h.subscribers = nil
	h.mu.Unlock()
	for _, s := range subscribers {
		s.mu.Lock()
		s.finished = true
		s.mu.Unlock()
		notify(s.wake)
	}
}

type subscriber struct {
	mu       sync.Mutex
	queue    []*frame
	bytes    int
	finished bool
	left     bool
	err      error

	wake chan struct{} // there is something to take
	room chan struct{} // something was taken
	gone chan struct{} // closed when the subscriber left or was cut off
}

// push queues f and reports true, or false when the subscriber is gone.
func (s *subscriber) push(f *frame, tick time.Duration) bool {
	var timer *time.Timer
	for idle := 0; ; {
		s.mu.Lock()
		if s.left {
			s.mu.Unlock()
			return false
		}
		if s.bytes == 0 || s.bytes+len(f.bytes) <= queueBytesMax {
			s.queue = append(s.queue, f)
			s.bytes += len(f.bytes)
			s.mu.Unlock()
			notify(s.wake)
			return true
		}
		s.mu.Unlock()
		if timer == nil {
			timer = time.NewTimer(tick)
			defer timer.Stop()
		} else {
			timer.Reset(tick)
		}
		select {
		case <-s.room:
			idle = 0
		case <-s.gone:
			return false
		case <-timer.C:
			if idle++; idle >= stallTicks {
				s.leave(errSlow)
				return false
			}
		}
	}
}

// take returns what is queued, and whether that was the last.
func (s *subscriber) take() (batch []*frame, last bool) {
	s.mu.Lock()
	batch, last = s.queue, s.finished
	s.queue, s.bytes = nil, 0
	s.mu.Unlock()
	if len(batch) > 0 {
		notify(s.room)
	}
	return batch, last
}

// leave makes the subscriber take part no longer; err, when not nil, is why it was cut off.
func (s *subscriber) leave(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left {
		return
	}
	s.left = true
	s.err = err
	for _, f := range s.queue {
		f.release()
	}
	s.queue, s.bytes = nil, 0
	close(s.gone)
}

func (s *subscriber) reason() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

package edge

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
)

// waker has control resume sandboxes that are at rest and may be woken by traffic: one wish per sandbox at a time, however
// many requests wait for it, and no more of them than may.
type waker struct {
	table   *table
	control *controlClient
	metrics *metrics
	max     int64
	held    atomic.Int64

	mu    sync.Mutex
	calls map[string]*call
}

func newWaker(t *table, control *controlClient, m *metrics, limits Limits) *waker {
	return &waker{table: t, control: control, metrics: m, max: int64(limits.WakesHeld), calls: make(map[string]*call)}
}

// wake returns when the sandbox is awake, or will not be. Errors: errNotFound, errAway, errBusy, ctx's.
func (w *waker) wake(ctx context.Context, id string) error {
	defer w.held.Add(-1)
	if w.held.Add(1) > w.max {
		return errBusy
	}
	w.mu.Lock()
	c, asked := w.calls[id]
	if !asked {
		c = &call{done: make(chan struct{})}
		w.calls[id] = c
		// Its own goroutine: the first client may leave, the others still want it awake.
		go w.carryOut(id, c)
	}
	w.mu.Unlock()
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w *waker) carryOut(id string, c *call) {
	w.metrics.wakes.Add(1)
	snapshots := w.table.snapshotCount()
	route, err := w.control.wake(context.Background(), id)
	if err == nil {
		// Where a snapshot came meanwhile, it is newer, and the stream says the rest.
		w.table.putAnswer(route, snapshots)
	} else {
		w.metrics.wakesFailed.Add(1)
	}
	w.mu.Lock()
	delete(w.calls, id)
	w.mu.Unlock()
	c.err = err
	close(c.done)
}

// rouse wakes a sandbox that `refusal` speaks of, where it is at rest and this request may wake it.
func (e *Edge) rouse(r *http.Request, t target, refusal *sandboxError) (*entry, *sandboxError) {
	found, _ := e.table.lastKnown(t.sandboxID)
	if found != nil && found.ready() {
		return found, nil // it has come back since it was looked for
	}
	if found == nil || !found.route.AutoResume {
		return nil, refusal
	}
	if denied := admit(found.route, r, t); denied != nil {
		return nil, denied
	}
	err := e.waker.wake(r.Context(), t.sandboxID)
	var answer sandboxError
	switch {
	case err == nil:
		found, _ = e.table.lastKnown(t.sandboxID)
		return settled(t.sandboxID, found)
	case errors.Is(err, errNotFound):
		answer = notFound(t.sandboxID)
	default:
		answer = notAwake(t.sandboxID)
	}
	return nil, &answer
}

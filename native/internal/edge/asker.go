package edge

import (
	"context"
	"errors"
	"sync"
	"time"
)

const negativeTTL = 250 * time.Millisecond

// errBusy says that more look-ups wait for control than may.
var errBusy = errors.New("too many look-ups wait for control")

// errRate says that one client caused more look-ups than it may.
var errRate = errors.New("too many look-ups for this client")

// asker asks control about sandboxes that the table doesn't know: one question per sandbox at a time, few at once.
type asker struct {
	table   *table
	control *controlClient
	metrics *metrics
	slots   chan struct{}
	rates   *rates
	waiting int

	mu       sync.Mutex
	calls    map[string]*call
	negative map[string]time.Time
	queued   int
}

type call struct {
	done chan struct{}
	err  error
}

func newAsker(t *table, control *controlClient, m *metrics, limits Limits) *asker {
	return &asker{
		table:    t,
		control:  control,
		metrics:  m,
		slots:    make(chan struct{}, limits.AsksInFlight),
		rates:    newRates(float64(limits.AsksPerSecond), 2*float64(limits.AsksPerSecond)),
		waiting:  limits.AsksWaiting,
		calls:    make(map[string]*call),
		negative: make(map[string]time.Time),
	}
}

// ask brings the table up to date about a sandbox; the caller looks again. `client` pays for a new question only.
//
// Errors: errNotFound, errAway, errBusy, errRate, ctx's.
func (a *asker) ask(ctx context.Context, id, client string) error {
	a.mu.Lock()
	if until, ok := a.negative[id]; ok {
		if time.Now().Before(until) {
			a.mu.Unlock()
			return errNotFound
		}
		delete(a.negative, id)
	}
	if _, asked := a.calls[id]; !asked && !a.rates.take(client) {
		a.mu.Unlock()
		a.metrics.asksRefused.Add(1)
		return errRate
	}
	return a.joinLocked(ctx, id)
}

// refresh asks in the edge's own name, and does not trust a recent "not found".
func (a *asker) refresh(ctx context.Context, id string) error {
	a.mu.Lock()
	return a.joinLocked(ctx, id)
}

func (a *asker) joinLocked(ctx context.Context, id string) error {
	c, asked := a.calls[id]
	if !asked {
		if a.queued >= a.waiting+cap(a.slots) {
			a.mu.Unlock()
			a.metrics.asksRefused.Add(1)
			return errBusy
		}
		a.queued++
		c = &call{done: make(chan struct{})}
		a.calls[id] = c
		// Its own goroutine: the first client may leave, the others still want to know.
		go a.carryOut(id, c)
	}
	a.mu.Unlock()
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (a *asker) carryOut(id string, c *call) {
	a.slots <- struct{}{}
	err := a.question(id)
	<-a.slots
	a.mu.Lock()
	a.queued--
	delete(a.calls, id)
	if errors.Is(err, errNotFound) {
		a.rememberLocked(id)
	}
	a.mu.Unlock()
	c.err = err
	close(c.done)
}

// question asks control and tells the table. A snapshot that comes meanwhile makes the answer worthless, once.
func (a *asker) question(id string) error {
	for range 2 {
		snapshots := a.table.snapshotCount()
		seen, _ := a.table.lastKnown(id)
		wanted := a.table.wantedRevision(id)
		route, err := a.control.route(context.Background(), id)
		switch {
		case err == nil:
			if !a.table.putAnswer(route, snapshots) {
				continue
			}
			a.metrics.asksFound.Add(1)
			a.table.satisfied(id, wanted)
		case errors.Is(err, errNotFound):
			a.metrics.asksNotFound.Add(1)
			a.table.absent(id, seen)
		default:
			a.metrics.asksFailed.Add(1)
		}
		return err
	}
	a.metrics.asksFailed.Add(1)
	return errAway
}

func (a *asker) rememberLocked(id string) {
	// Ids are what clients say: the map is emptied rather than let grow.
	if len(a.negative) >= 4096 {
		clear(a.negative)
	}
	a.negative[id] = time.Now().Add(negativeTTL)
}

// forget drops a remembered "not found": control has spoken of the sandbox since.
func (a *asker) forget(id string) {
	a.mu.Lock()
	delete(a.negative, id)
	a.mu.Unlock()
}

// rates is a token bucket per client address.
type rates struct {
	perSecond, burst float64

	mu      sync.Mutex
	buckets map[string]*bucket
}

type bucket struct {
	tokens float64
	at     time.Time
}

func newRates(perSecond, burst float64) *rates {
	return &rates{perSecond: perSecond, burst: burst, buckets: make(map[string]*bucket)}
}

func (r *rates) take(client string) bool {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	b, ok := r.buckets[client]
	if !ok {
		if len(r.buckets) >= 4096 {
			r.dropFullLocked(now)
		}
		b = &bucket{tokens: r.burst, at: now}
		r.buckets[client] = b
	}
	b.tokens = min(r.burst, b.tokens+now.Sub(b.at).Seconds()*r.perSecond)
	b.at = now
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}

// dropFullLocked forgets clients that have been quiet long enough to have a full bucket again; all, if none has.
func (r *rates) dropFullLocked(now time.Time) {
	for client, b := range r.buckets {
		if b.tokens+now.Sub(b.at).Seconds()*r.perSecond >= r.burst {
			delete(r.buckets, client)
		}
	}
	if len(r.buckets) >= 4096 {
		clear(r.buckets)
	}
}

package edge

import "context"

type waiter struct {
	revision int64
	reached  chan struct{}
}

// await returns when the table has the sandbox at the revision or later, or gone; or, with false, when ctx is done.
func (t *table) await(ctx context.Context, id string, revision int64) bool {
	t.mu.Lock()
	if t.reachedLocked(id, revision) {
		t.mu.Unlock()
		return true
	}
	w := &waiter{revision: revision, reached: make(chan struct{})}
	if t.waiters[id] == nil {
		t.waiters[id] = make(map[*waiter]struct{})
	}
	t.waiters[id][w] = struct{}{}
	t.mu.Unlock()
	select {
	case <-w.reached:
		return true
	case <-ctx.Done():
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if set := t.waiters[id]; set != nil {
		delete(set, w)
		if len(set) == 0 {
			delete(t.waiters, id)
		}
	}
	return t.reachedLocked(id, revision)
}

// want remembers that something newer exists, so that the next look-up asks.
func (t *table) want(id string, revision int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.reachedLocked(id, revision) && len(t.wanted) < tombstonesMax {
		t.wanted[id] = max(t.wanted[id], revision)
	}
}

// wantedRevision is what want has set, or 0.
func (t *table) wantedRevision(id string) int64 {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.wanted[id]
}

// satisfied says that control was asked after want(id, revision), and what it said is the newest there is.
func (t *table) satisfied(id string, revision int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.wanted[id] == revision {
		delete(t.wanted, id)
	}
}

func (t *table) reachedLocked(id string, revision int64) bool {
	if e, ok := t.entries[id]; ok {
		return e.route.Revision >= revision
	}
	grave, ok := t.tombstones[id]
	return ok && (grave.final || grave.revision >= revision)
}

func (t *table) wakeLocked(id string) []*waiter {
	set := t.waiters[id]
	var woken []*waiter
	for w := range set {
		if t.reachedLocked(id, w.revision) {
			delete(set, w)
			woken = append(woken, w)
		}
	}
	if set != nil && len(set) == 0 {
		delete(t.waiters, id)
	}
	return woken
}

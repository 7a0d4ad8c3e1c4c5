package edge

import (
	"sync"
	"time"

	"atoll.local/native/internal/node"
)

// Theory of operation. The table holds what control has said about sandboxes, newest word by revision. Three sources
// write it: the stream (snapshot, then changes), single look-ups, and nothing else. Only the table makes and ends
// placements: a route that leaves `ready`, moves to another placement or is gone ends its placement before anybody can
// see the new state. What is gone leaves a tombstone, so that a look-up answered before the end cannot bring it back and
// so that the end of a kill needs no question. Tombstones are bounded in number and time; losing one costs a question.

const (
	tombstoneTTL  = 10 * time.Minute
	tombstonesMax = 20000
)

// entry is one sandbox as the table knows it. Immutable.
type entry struct {
	route     *Route
	placement *node.Placement // nil unless the route is ready
	learnedAt time.Time
}

func (e *entry) ready() bool { return e.placement != nil }

type tombstone struct {
	revision int64
	final    bool // the sandbox is released or failed: its id never comes back
	at       time.Time
}

// verdict is the table's answer.
type verdict int

const (
	unknown verdict = iota // ask control
	known                  // the entry says it all
	gone                   // control said that it is gone, and has said nothing since
)

type table struct {
	options node.Options
	now     func() time.Time

	mu          sync.RWMutex
	entries     map[string]*entry
	tombstones  map[string]tombstone
	graves      []string         // ids of tombstones, oldest first
	wanted      map[string]int64 // a revision that an API answer spoke of and the table has not got in time
	waiters     map[string]map[*waiter]struct{}
	incarnation string
	synced      bool
	snapshots   int64 // how many have come
}

func newTable(options node.Options) *table {
	t := &table{
		now:        time.Now,
		entries:    make(map[string]*entry),
		tombstones: make(map[string]tombstone),
		wanted:     make(map[string]int64),
		waiters:    make(map[string]map[*waiter]struct{}),
	}
	options.Doubt = t.doubt
	t.options = options
	return t
}

// doubt is true while the table may be behind: a host may end a sandbox by itself and its address may be another's.
func (t *table) doubt() bool { return !t.isSynced() }

// find answers for a sandbox from memory.
func (t *table) find(id string) (*entry, verdict) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if e, ok := t.entries[id]; ok {
		if t.wanted[id] > e.route.Revision {
			return e, unknown
		}
		return e, known
	}
	if grave, ok := t.tombstones[id]; ok && (grave.final || t.synced && t.wanted[id] <= grave.revision) {
		return nil, gone
	}
	return nil, unknown
}

// lastKnown is what is left to go by when control cannot be asked.
func (t *table) lastKnown(id string) (*entry, verdict) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if e, ok := t.entries[id]; ok {
		return e, known
	}
	if _, ok := t.tombstones[id]; ok {
		return nil, gone
	}
	return nil, unknown
}

// put takes a route of the stream unless something newer is known.
func (t *table) put(route *Route) { t.putIf(route, func() bool { return true }) }

// putAnswer takes a route that was asked for when so many snapshots had come. One that is older than the newest snapshot
// might bring back what that one has ended: it is not taken, and false says to ask again.
func (t *table) putAnswer(route *Route, snapshots int64) bool {
	return t.putIf(route, func() bool { return t.snapshots == snapshots })
}

func (t *table) snapshotCount() int64 {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.snapshots
}

func (t *table) putIf(route *Route, holds func() bool) bool {
	t.mu.Lock()
	if !holds() {
		t.mu.Unlock()
		return false
	}
	ended := t.putLocked(route)
	woken := t.wakeLocked(route.SandboxID)
	t.mu.Unlock()
	finish(ended, woken)
	return true
}

func (t *table) putLocked(route *Route) []*node.Placement {
	id := route.SandboxID
	if old, ok := t.entries[id]; ok && route.Revision < old.route.Revision {
		return nil
	}
	if grave, ok := t.tombstones[id]; ok {
		if grave.final || route.Revision <= grave.revision {
			return nil
		}
		delete(t.tombstones, id)
	}
	return t.replaceLocked(route)
}

// replaceLocked sets a sandbox's entry; it returns the placement that this ends, if any.
func (t *table) replaceLocked(route *Route) []*node.Placement {
	old := t.entries[route.SandboxID]
	fresh := &entry{route: route, learnedAt: t.now()}
	var ended []*node.Placement
	if route.State == stateReady {
		if old != nil && old.ready() && old.placement.Address().SamePlace(route.address()) {
			old.placement.SetToken(route.ConnectToken)
			fresh.placement = old.placement
		} else {
			fresh.placement = node.NewPlacement(route.address(), t.options)
		}
	}
	if old != nil && old.ready() && old.placement != fresh.placement {
		ended = append(ended, old.placement)
	}
	t.entries[route.SandboxID] = fresh
	if t.wanted[route.SandboxID] <= route.Revision {
		delete(t.wanted, route.SandboxID)
	}
	return ended
}

// remove takes control's word that a sandbox is gone as of a revision.
func (t *table) remove(id string, revision int64, reason string) {
	t.mu.Lock()
	var ended []*node.Placement
	if old, ok := t.entries[id]; !ok || old.route.Revision <= revision {
		ended = t.dropLocked(id)
		t.buryLocked(id, tombstone{revision: revision, final: reason == "released" || reason == "failed", at: t.now()})
	}
	woken := t.wakeLocked(id)
	t.mu.Unlock()
	finish(ended, woken)
}

// absent takes the answer to a question that was asked when `seen` was the sandbox's entry: control doesn't know it.
// A route that arrived since the question is newer than the answer and stays.
func (t *table) absent(id string, seen *entry) {
	t.mu.Lock()
	var ended []*node.Placement
	if current := t.entries[id]; current != nil && current == seen {
		ended = t.dropLocked(id)
		t.buryLocked(id, absence(seen, t.now()))
	}
	if t.entries[id] == nil {
		delete(t.wanted, id)
	}
	woken := t.wakeLocked(id)
	t.mu.Unlock()
	finish(ended, woken)
}

// absence is the tombstone of a sandbox that control did not call gone, but doesn't know. It may come back as it was:
// unlike an end, an absence has no revision of its own.
func absence(last *entry, now time.Time) tombstone {
	return tombstone{revision: last.route.Revision - 1, at: now}
}

func (t *table) dropLocked(id string) []*node.Placement {
	old, ok := t.entries[id]
	if !ok {
		return nil
	}
	delete(t.entries, id)
	if !old.ready() {
		return nil
	}
	return []*node.Placement{old.placement}
}

func (t *table) buryLocked(id string, grave tombstone) {
	if old, ok := t.tombstones[id]; ok {
		grave.revision = max(grave.revision, old.revision)
		grave.final = grave.final || old.final
	} else {
		t.graves = append(t.graves, id)
	}
	t.tombstones[id] = grave
	for len(t.graves) > 0 {
		oldest, ok := t.tombstones[t.graves[0]]
		if ok && len(t.graves) <= tombstonesMax && t.now().Sub(oldest.at) < tombstoneTTL {
			break
		}
		delete(t.tombstones, t.graves[0])
		t.graves = t.graves[1:]
	}
}

// snapshot replaces everything; placements of routes that say the same go on. What was learned after `since`, when the
// stream was asked for, may be newer than the snapshot: it stays, and its ids are returned to be asked about.
func (t *table) snapshot(incarnation string, routes []*Route, since time.Time) (doubtful []string) {
	t.mu.Lock()
	var ended []*node.Placement
	if incarnation != t.incarnation {
		// Another life of the store: revisions of the old one mean nothing in it.
		t.tombstones, t.graves, t.wanted = make(map[string]tombstone), nil, make(map[string]int64)
	}
	said := make(map[string]struct{}, len(routes))
	sameLife := incarnation == t.incarnation
	for _, route := range routes {
		said[route.SandboxID] = struct{}{}
		if !sameLife {
			ended = append(ended, t.replaceLocked(route)...)
		} else {
			ended = append(ended, t.putLocked(route)...)
		}
	}
	for id, e := range t.entries {
		if _, ok := said[id]; ok {
			continue
		}
		if e.learnedAt.After(since) {
			doubtful = append(doubtful, id)
			continue
		}
		ended = append(ended, t.dropLocked(id)...)
		if sameLife {
			t.buryLocked(id, absence(e, t.now()))
		}
	}
	t.incarnation, t.synced = incarnation, true
	t.snapshots++
	var woken []*waiter
	for id := range t.waiters {
		woken = append(woken, t.wakeLocked(id)...)
	}
	t.mu.Unlock()
	finish(ended, woken)
	return doubtful
}

// lost says that the stream has broken. Routes stay: what is known goes on working.
func (t *table) lost() {
	t.mu.Lock()
	t.synced = false
	t.mu.Unlock()
}

func (t *table) isSynced() bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.synced
}

func (t *table) size() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return len(t.entries)
}

// finish cuts before it wakes: whoever waited for a kill may rely on the cut.
func finish(ended []*node.Placement, woken []*waiter) {
	for _, placement := range ended {
		placement.End()
	}
	for _, w := range woken {
		close(w.reached)
	}
}

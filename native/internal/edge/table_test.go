package edge

import (
	"context"
	"testing"
	"time"

	"atoll.local/native/internal/node"
)

func routeAt(id string, revision int64, state string) *Route {
	return &Route{
		SandboxID: id, Revision: revision, Generation: 1, PlacementID: "plc_1", State: state,
		Reach: Reach{Kind: reachDirect, IP: "127.0.0.1"}, GuestPort: 1,
	}
}

func newTestTable() *table { return newTable(node.DefaultOptions()) }

func TestOlderWordsChangeNothing(t *testing.T) {
	table := newTestTable()
	table.put(routeAt("i1", 5, stateReady))
	first, _ := table.find("i1")
	table.put(routeAt("i1", 4, "paused"))
	if now, _ := table.find("i1"); now != first {
		t.Fatal("an older route was taken")
	}
	table.remove("i1", 4, "released")
	if _, verdict := table.find("i1"); verdict != known {
		t.Fatal("an older end was taken")
	}
	table.remove("i1", 6, "suspended")
	table.put(routeAt("i1", 6, stateReady)) // a look-up that was answered before the end
	if _, verdict := table.lastKnown("i1"); verdict != gone {
		t.Fatal("an end was undone by what came before it")
	}
	table.put(routeAt("i1", 7, stateReady))
	if e, verdict := table.find("i1"); verdict != known || !e.ready() {
		t.Fatal("a resumed sandbox is not found")
	}
	table.remove("i1", 8, "released")
	table.put(routeAt("i1", 99, stateReady))
	if _, verdict := table.find("i1"); verdict != gone {
		t.Fatal("what is released came back")
	}
}

func TestUnlessSyncedOnlyAReleaseIsFinal(t *testing.T) {
	table := newTestTable()
	table.put(routeAt("i1", 1, stateReady))
	table.remove("i1", 2, "suspended")
	if _, verdict := table.find("i1"); verdict != unknown {
		t.Fatal("without the stream, control must be asked whether it is back")
	}
	table.snapshot("inc", nil, time.Now())
	table.remove("i1", 3, "suspended")
	if _, verdict := table.find("i1"); verdict != gone {
		t.Fatal("with the stream, what it said last holds")
	}
}

func TestSnapshots(t *testing.T) {
	table := newTestTable()
	long := time.Now()
	table.put(routeAt("istays", 5, stateReady))
	table.put(routeAt("ileaves", 5, stateReady))
	table.put(routeAt("inewer", 9, stateReady))
	stays, _ := table.find("istays")
	leaves, _ := table.find("ileaves")
	since := time.Now()
	time.Sleep(time.Millisecond)
	table.put(routeAt("ifresh", 1, stateReady)) // learned from a look-up while the stream was being opened
	_ = long
	table.snapshot("", []*Route{routeAt("istays", 5, stateReady), routeAt("inewer", 8, "paused")}, since)
	if e, _ := table.find("istays"); e.placement != stays.placement || e.placement.Ended() {
		t.Fatal("an unchanged route was disturbed")
	}
	if _, verdict := table.find("ileaves"); verdict != gone || !leaves.placement.Ended() {
		t.Fatal("a route that is not in the snapshot stays")
	}
	if e, _ := table.find("inewer"); !e.ready() {
		t.Fatal("an older route in the snapshot won")
	}
	if e, verdict := table.find("ifresh"); verdict != known || !e.ready() {
		t.Fatal("a look-up newer than the snapshot was lost")
	}
	doubtful := table.snapshot("", []*Route{routeAt("istays", 5, stateReady)}, since.Add(-time.Hour))
	if len(doubtful) == 0 {
		t.Fatal("nothing is in doubt")
	}
	// Another incarnation starts over: its lower revisions and resurrected ids are true.
	table.remove("istays", 6, "released")
	table.snapshot("restored", []*Route{routeAt("istays", 2, stateReady), routeAt("inewer", 3, stateReady)}, time.Now())
	if e, verdict := table.find("istays"); verdict != known || e.route.Revision != 2 {
		t.Fatal("the restored store's word was not taken")
	}
	if e, _ := table.find("inewer"); e.route.Revision != 3 {
		t.Fatal("a revision of the former store outlived it")
	}
	// What the new life's snapshot lacks may come a moment later, from its host, with a lower revision.
	table.put(routeAt("ilate", 7, stateReady))
	late, _ := table.find("ilate")
	table.snapshot("restored again", nil, time.Now())
	if e, _ := table.find("ilate"); e != nil || !late.placement.Ended() {
		t.Fatal("a route of the former life stays")
	}
	table.put(routeAt("ilate", 1, stateReady))
	if e, verdict := table.find("ilate"); verdict != known || e.route.Revision != 1 {
		t.Fatal("a revision of the former life kept a sandbox of the new one away")
	}
}

func TestAwait(t *testing.T) {
	table := newTestTable()
	short := func() context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		t.Cleanup(cancel)
		return ctx
	}
	if table.await(short(), "i1", 1) {
		t.Fatal("it knows nothing yet")
	}
	if len(table.waiters) != 0 {
		t.Fatal("a waiter is left behind")
	}
	long, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	reached := make(chan bool, 2)
	go func() { reached <- table.await(long, "i1", 5) }()
	go func() { reached <- table.await(long, "i1", 6) }()
	eventually(t, "both wait", func() bool { table.mu.Lock(); defer table.mu.Unlock(); return len(table.waiters["i1"]) == 2 })
	table.put(routeAt("i1", 4, stateReady))
	table.put(routeAt("i1", 5, stateReady))
	if !<-reached {
		t.Fatal("5 was not reached")
	}
	table.remove("i1", 6, "released")
	if !<-reached || !table.await(short(), "i1", 100) {
		t.Fatal("gone is as good as any revision")
	}
}

func TestWantedRevisionsAreAskedFor(t *testing.T) {
	table := newTestTable()
	table.put(routeAt("i1", 5, stateReady))
	table.want("i1", 5)
	if _, verdict := table.find("i1"); verdict != known {
		t.Fatal("it has that one")
	}
	table.want("i1", 7)
	if e, verdict := table.find("i1"); verdict != unknown || e == nil {
		t.Fatal("a stale entry answers")
	}
	table.put(routeAt("i1", 7, stateReady))
	if _, verdict := table.find("i1"); verdict != known || len(table.wanted) != 0 {
		t.Fatal("the wanted one is here")
	}
	table.want("i1", 9)
	table.satisfied("i1", 8)
	if _, verdict := table.find("i1"); verdict != unknown {
		t.Fatal("satisfied by an older question")
	}
	table.satisfied("i1", 9)
	if _, verdict := table.find("i1"); verdict != known {
		t.Fatal("asked for ever")
	}
}

func TestAbsentHoldsForWhatWasAskedAboutOnly(t *testing.T) {
	table := newTestTable()
	table.put(routeAt("i1", 5, stateReady))
	seen, _ := table.find("i1")
	table.put(routeAt("i1", 6, stateReady))
	table.absent("i1", seen)
	if _, verdict := table.find("i1"); verdict != known {
		t.Fatal("an answer from before the route removed it")
	}
	seen, _ = table.find("i1")
	table.absent("i1", seen)
	if _, verdict := table.lastKnown("i1"); verdict != gone || !seen.placement.Ended() {
		t.Fatal("it is still there")
	}
}

// Control may have lost sight of a sandbox for a moment: it comes back under the revision that it had.
func TestWhatWasAbsentMayComeBackAsItWas(t *testing.T) {
	table := newTestTable()
	table.snapshot("inc", []*Route{routeAt("i1", 5, stateReady), routeAt("i2", 5, stateReady)}, time.Now())
	seen, _ := table.find("i1")
	table.absent("i1", seen)
	table.snapshot("inc", []*Route{}, time.Now())
	for _, id := range []string{"i1", "i2"} {
		if _, verdict := table.find(id); verdict != gone {
			t.Fatalf("%s is still there", id)
		}
		table.put(routeAt(id, 4, stateReady))
		if _, verdict := table.find(id); verdict != gone {
			t.Fatalf("%s came back older than it was", id)
		}
		table.put(routeAt(id, 5, stateReady))
		if e, verdict := table.find(id); verdict != known || !e.ready() {
			t.Fatalf("%s does not come back", id)
		}
	}
}

func TestAnAnswerFromBeforeASnapshotIsNotTaken(t *testing.T) {
	table := newTestTable()
	table.snapshot("inc", nil, time.Now())
	table.put(routeAt("i1", 5, stateReady))
	asked := table.snapshotCount()
	table.snapshot("inc", nil, time.Now())
	if table.putAnswer(routeAt("i1", 5, stateReady), asked) {
		t.Fatal("taken")
	}
	if _, verdict := table.find("i1"); verdict != gone {
		t.Fatal("what the snapshot ended is back")
	}
	if !table.putAnswer(routeAt("i1", 5, stateReady), table.snapshotCount()) {
		t.Fatal("an answer to a later question was refused")
	}
}

func TestTombstonesAreBounded(t *testing.T) {
	table := newTestTable()
	now := time.Now()
	table.now = func() time.Time { return now }
	for range tombstonesMax + 50 {
		table.remove(randomID(), 1, "released")
	}
	if len(table.tombstones) != tombstonesMax || len(table.graves) != tombstonesMax {
		t.Fatalf("%d tombstones, %d graves", len(table.tombstones), len(table.graves))
	}
	now = now.Add(tombstoneTTL)
	table.remove("ilast", 1, "released")
	if len(table.tombstones) != 1 || len(table.graves) != 1 {
		t.Fatalf("%d tombstones, %d graves", len(table.tombstones), len(table.graves))
	}
}

package threads

import (
	"os"
	"sync"
	"sync/atomic"
	"testing"
)

func TestReserveMakesThreads(t *testing.T) {
	Reserve(12)
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	if len(tasks) < 12 {
		t.Fatalf("%d threads", len(tasks))
	}
}

func TestSlotsAreBounded(t *testing.T) {
	slots := NewSlots(3)
	var now, most atomic.Int32
	var wait sync.WaitGroup
	for range 50 {
		wait.Go(func() {
			slots.Do(func() {
				if n := now.Add(1); n > most.Load() {
					most.Store(n)
				}
				now.Add(-1)
			})
		})
	}
	wait.Wait()
	if most.Load() > 3 {
		t.Fatal(most.Load())
	}
	func() {
		defer func() { _ = recover() }()
		slots.Do(func() { panic("x") })
	}()
	if len(slots) != 0 {
		t.Fatal("a panic kept its slot")
	}
}

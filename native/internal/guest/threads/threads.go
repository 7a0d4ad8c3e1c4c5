// Package threads sees to it that the Go runtime never has to ask for a thread when there is none to be had.
//
// Where the sandbox has used up its processes (a fork bomb), clone fails with EAGAIN, and the Go runtime answers that
// with a fatal error: the guest would die, and as PID 1 take the sandbox with it. The runtime never ends a thread that
// it has, so a reserve made at the start is there for good; and what blocks in the kernel takes one of a bounded number
// of slots, so the reserve is enough.
package threads

import (
	"runtime"
	"sync"
)

// Reserve makes the runtime hold at least count threads from now on.
func Reserve(count int) {
	var started, ended sync.WaitGroup
	release := make(chan struct{})
	started.Add(count)
	ended.Add(count)
	for range count {
		go func() {
			defer ended.Done()
			// A locked goroutine has a thread for itself, so count of them at one time are count threads. Unlocked
			// before its end, it leaves the thread to the runtime.
			runtime.LockOSThread()
			started.Done()
			<-release
			runtime.UnlockOSThread()
		}()
	}
	started.Wait()
	close(release)
	ended.Wait()
}

// Slots bounds how many threads wait in the kernel for disks and forks at one time.
type Slots chan struct{}

// NewSlots makes room for count of them.
func NewSlots(count int) Slots { return make(Slots, count) }

// Do runs f in a slot, after waiting for one. f must not wait for the network or for another slot.
func (s Slots) Do(f func()) {
	s <- struct{}{}
	defer func() { <-s }()
	f()
}

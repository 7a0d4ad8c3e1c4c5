package process

import (
	"sync"
	"time"
)

// deadlineStep is how far a deadline is trusted to the clock at one time. After a restore from a checkpoint the
// monotonic clock includes the time in which nothing ran, and every overdue timer fires at once. Counted in steps, a
// restore costs a deadline one step at the most, and a command that was suspended goes on with its remaining time.
const deadlineStep = 5 * time.Second

// deadline calls a function after a time that only counts while the guest runs.
type deadline struct {
	mu      sync.Mutex
	left    time.Duration
	step    time.Duration
	timer   *time.Timer
	stopped bool
}

func newDeadline(after time.Duration, step time.Duration, reached func()) *deadline {
	d := &deadline{left: after, step: step}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.timer = time.AfterFunc(min(d.left, step), func() { d.pass(reached) })
	return d
}

// pass takes one step.
func (d *deadline) pass(reached func()) {
	d.mu.Lock()
	d.left -= min(d.left, d.step)
	over := d.left <= 0 && !d.stopped
	if !over && !d.stopped {
		d.timer.Reset(min(d.left, d.step))
	}
	d.stopped = d.stopped || over
	d.mu.Unlock()
	if over {
		reached()
	}
}

func (d *deadline) stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stopped = true
	d.timer.Stop()
}

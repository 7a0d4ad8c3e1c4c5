// Package reap starts child processes and collects their exit statuses, also as PID 1.
//
// Theory of operation. Exactly one place in the program calls wait4, so nobody can steal anybody's exit status: that is
// why processes are forked with syscall.ForkExec here and never with os/exec. On SIGCHLD one goroutine collects
// without blocking: as PID 1 everything that is dead (wait4(-1): orphans are reaped with the rest), otherwise only the
// children it knows. No thread blocks in wait for a running child, so a hundred idle processes cost no threads, and a
// fork bomb that leaves no thread to be had does not bring the Go runtime down on our account. A lock is held over fork
// and registration: a child that dies at once is still found. A pid is signalled under the same lock, hence never
// after it was reaped and perhaps given to a stranger.
//
// Rejected: a second tiny process as PID 1 that only reaps. It would survive a crash of the server, but costs a second
// start of the Go runtime on the path of each create and more memory in each sandbox.
package reap

import (
	"errors"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// ErrGone says that the process has ended and was reaped.
var ErrGone = errors.New("process already finished")

// Reaper owns the children of this process.
type Reaper struct {
	everything bool
	// group is the control group that children are born into; nil: this process's own.
	group Group

	mu       sync.Mutex
	children map[int]*Child
	signals  chan os.Signal
}

// Child is one started process. It leads its own process group.
type Child struct {
	PID int

	owner  *Reaper
	done   chan struct{}
	reaped bool
	status syscall.WaitStatus
}

// Group is a control group by its descriptor.
type Group interface {
	FD() int
}

// New starts collecting. With everything set, orphans that were handed to this process (PID 1) are reaped too. A group is what
// children are born into; nil: where this process is.
func New(everything bool, group Group) *Reaper {
	r := &Reaper{
		everything: everything,
		group:      group,
		children:   make(map[int]*Child),
		signals:    make(chan os.Signal, 1),
	}
	signal.Notify(r.signals, syscall.SIGCHLD)
	go func() {
		for range r.signals {
			r.collect()
		}
	}()
	return r
}

// Close stops collecting.
func (r *Reaper) Close() {
	signal.Stop(r.signals)
	close(r.signals)
}

// Start forks and executes path, and registers the child before its end can be collected.
func (r *Reaper) Start(path string, argv []string, attr *syscall.ProcAttr) (*Child, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.group != nil {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, r.group.FD()
	}
	pid, err := syscall.ForkExec(path, argv, attr)
	if err != nil {
		return nil, err
	}
	child := &Child{PID: pid, owner: r, done: make(chan struct{})}
	r.children[pid] = child
	return child, nil
}

// Done is closed when the child has ended and was reaped.
func (c *Child) Done() <-chan struct{} { return c.done }

// Status is the child's wait status; it is valid once Done is closed.
func (c *Child) Status() syscall.WaitStatus { return c.status }

// Signal sends sig to the process alone.
//
// Errors: ErrGone once it was reaped.
func (c *Child) Signal(sig syscall.Signal) error {
	c.owner.mu.Lock()
	defer c.owner.mu.Unlock()
	if c.reaped {
		return ErrGone
	}
	return syscall.Kill(c.PID, sig)
}

// SignalGroup sends sig to the process group that the child led, also when the leader itself is gone already.
func (c *Child) SignalGroup(sig syscall.Signal) error {
	c.owner.mu.Lock()
	defer c.owner.mu.Unlock()
	if c.reaped {
		// The number stays taken while a member of the group lives, so it can only be somebody else's when the
		// group is empty; then a younger child of ours may have it.
		if _, reused := c.owner.children[c.PID]; reused {
			return ErrGone
		}
	}
	return syscall.Kill(-c.PID, sig)
}

func (r *Reaper) collect() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.everything {
		for pid := range r.children {
			r.collectOne(pid)
		}
		return
	}
	for r.collectOne(-1) {
	}
}

// collectOne reaps pid (or anything, for -1) when it is dead, and says whether it was.
func (r *Reaper) collectOne(pid int) bool {
	var status syscall.WaitStatus
	for {
		got, err := syscall.Wait4(pid, &status, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || got <= 0 {
			return false
		}
		if child := r.children[got]; child != nil {
			delete(r.children, got)
			child.reaped = true
			child.status = status
			close(child.done)
		}
		return true
	}
}

package reap

import (
	"errors"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"
)

func start(t *testing.T, r *Reaper, script string) *Child {
	t.Helper()
	child, err := r.Start("/bin/sh", []string{"sh", "-c", script}, &syscall.ProcAttr{
		Env: os.Environ(), Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	return child
}

func TestStatusesAreNotMixedUp(t *testing.T) {
	r := New(false, nil)
	defer r.Close()
	var wait sync.WaitGroup
	for i := range 50 {
		wait.Go(func() {
			child := start(t, r, "exit "+string(rune('0'+i%10)))
			<-child.Done()
			if got := child.Status(); !got.Exited() || got.ExitStatus() != i%10 {
				t.Errorf("%d: %v", i, got)
			}
			if err := child.Signal(syscall.SIGKILL); !errors.Is(err, ErrGone) {
				t.Error(err)
			}
		})
	}
	wait.Wait()
}

func TestSignalGroupReachesDescendants(t *testing.T) {
	r := New(false, nil)
	defer r.Close()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	child, err := r.Start("/bin/sh", []string{"sh", "-c", "sleep 1000 & exit 0"}, &syscall.ProcAttr{
		Files: []uintptr{0, write.Fd(), 2}, Sys: &syscall.SysProcAttr{Setsid: true}, Env: os.Environ(),
	})
	if err != nil {
		t.Fatal(err)
	}
	_ = write.Close()
	<-child.Done()
	// The leader is gone; its group is not.
	if err := child.SignalGroup(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = read.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := read.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("the descendant still holds the pipe: %v", err)
	}
}

func TestAFailedStartLeavesNothing(t *testing.T) {
	r := New(false, nil)
	defer r.Close()
	if _, err := r.Start("/no/such/program", []string{"x"}, &syscall.ProcAttr{}); !errors.Is(err, syscall.ENOENT) {
		t.Fatal(err)
	}
	if len(r.children) != 0 {
		t.Fatal(r.children)
	}
}

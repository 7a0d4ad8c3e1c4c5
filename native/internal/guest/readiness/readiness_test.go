package readiness

import (
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// command is a process that has ended already, or that ends when it is killed.
type command struct {
	done    chan struct{}
	failure string
	last    string
}

func ended(failure string) *command {
	c := &command{done: make(chan struct{}), failure: failure}
	close(c.done)
	return c
}

func running() *command { return &command{done: make(chan struct{}), failure: "signal: killed"} }

func (c *command) Done() <-chan struct{} { return c.done }
func (c *command) Failure() string       { return c.failure }
func (c *command) Last() string          { return c.last }
func (c *command) Kill()                 { close(c.done) }

func always(c *command) func() (Process, error) { return func() (Process, error) { return c, nil } }

func begun(t *testing.T, s *Start) *Start {
	t.Helper()
	s.Log = slog.New(slog.DiscardHandler)
	s.Begin()
	return s
}

func until(t *testing.T, s *Start, want string) string {
	t.Helper()
	for range 500 {
		if state, detail := s.State(); state == want {
			return detail
		}
		time.Sleep(10 * time.Millisecond)
	}
	state, detail := s.State()
	t.Fatalf("it is %s (%s), not %s", state, detail, want)
	return ""
}

func TestNothingIsWaitedForWithoutACommand(t *testing.T) {
	if state, _ := begun(t, &Start{}).State(); state != None {
		t.Error(state)
	}
}

func TestACommandAloneIsReadyAtOnce(t *testing.T) {
	if state, _ := begun(t, &Start{Command: always(running())}).State(); state != Ready {
		t.Error(state)
	}
}

func TestTheReadyCommandIsAskedUntilItEndsWell(t *testing.T) {
	var asked atomic.Int64
	s := begun(t, &Start{Command: always(running()), Ready: func() (Process, error) {
		if asked.Add(1) < 4 {
			return ended("exit status 7"), nil
		}
		return ended(""), nil
	}})
	until(t, s, Ready)
	if asked.Load() != 4 {
		t.Errorf("asked %d times", asked.Load())
	}
}

func TestWhatItSaysLastIsTold(t *testing.T) {
	s := begun(t, &Start{Ready: always(ended("exit status 7"))})
	for range 100 {
		if _, detail := s.State(); strings.Contains(detail, "exit status 7") {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error(s.State())
}

func TestACommandThatEndsBadlyIsNotWaitedFor(t *testing.T) {
	s := begun(t, &Start{Command: always(ended("exit status 3")), Ready: always(ended("exit status 1"))})
	if detail := until(t, s, Failed); !strings.Contains(detail, "exit status 3") {
		t.Error(detail)
	}
}

func TestWhatTheCommandWroteLastIsTold(t *testing.T) {
	command := ended("exit status 3")
	command.last = "no such table"
	s := begun(t, &Start{Command: always(command), Ready: always(ended("exit status 1"))})
	if detail := until(t, s, Failed); !strings.HasSuffix(detail, "exit status 3; the start command wrote last: no such table") {
		t.Error(detail)
	}
	waiting := running()
	waiting.last = "migrating"
	s = begun(t, &Start{Command: always(waiting), Ready: always(ended("exit status 1"))})
	for range 100 {
		if _, detail := s.State(); strings.Contains(detail, "wrote last: migrating") {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error(s.State())
}

func TestACommandThatEndedBadlyIsNotReadyWhateverIsSaid(t *testing.T) {
	s := begun(t, &Start{Command: always(ended("exit status 3")), Ready: always(ended(""))})
	if detail := until(t, s, Failed); !strings.Contains(detail, "exit status 3") {
		t.Error(detail)
	}
}

func TestACommandThatLeavesAServerBehindIsWaitedFor(t *testing.T) {
	var asked atomic.Int64
	s := begun(t, &Start{Command: always(ended("")), Ready: func() (Process, error) {
		if asked.Add(1) < 3 {
			return ended("exit status 1"), nil
		}
		return ended(""), nil
	}})
	until(t, s, Ready)
}

func TestACommandThatCannotBeBegunFails(t *testing.T) {
	s := begun(t, &Start{Command: func() (Process, error) { return nil, errors.New("no such user") }})
	if detail := until(t, s, Failed); !strings.Contains(detail, "no such user") {
		t.Error(detail)
	}
}

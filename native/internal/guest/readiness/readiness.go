// Package readiness begins an image's own command and finds out when the sandbox is of use.
//
// Theory of operation. The start command is begun once. Without a ready command that is all. With one, that is run again and
// again until it ends well; should the start command end badly before, waiting is over. How long is waited is the host's
// business: it asks how far this is, and ends the sandbox when it has waited long enough.
package readiness

import (
	"log/slog"
	"sync"
	"time"
)

// The states.
const (
	None     = "none"
	Starting = "starting"
	Ready    = "ready"
	Failed   = "failed"
)

// The pause between two tries doubles from the first to the last; a try that takes longer than patience is ended.
const (
	pauseFirst = 50 * time.Millisecond
	pauseLast  = 2 * time.Second
	patience   = 30 * time.Second
)

// Process is a command that was begun.
type Process interface {
	Done() <-chan struct{}
	// Failure is "" when it ended well.
	Failure() string
	// Last is the end of what it has written so far.
	Last() string
	Kill()
}

// Start is one sandbox's start. Command and Ready begin these commands; nil: there is none.
type Start struct {
	Command, Ready func() (Process, error)
	Log            *slog.Logger

	mu            sync.Mutex
	state, detail string
}

// State says how far it is, and for people, what the last try said.
func (s *Start) State() (state, detail string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == "" {
		return None, ""
	}
	return s.state, s.detail
}

func (s *Start) set(state, detail string) {
	s.mu.Lock()
	s.state, s.detail = state, detail
	s.mu.Unlock()
	if state == Failed {
		s.Log.Warn("guest.start.failed", "error", detail)
	}
}

// Begin starts the command; it does not wait until it is ready.
func (s *Start) Begin() {
	var command Process
	if s.Command != nil {
		begun, err := s.Command()
		if err != nil {
			s.set(Failed, "the start command could not be begun: "+err.Error())
			return
		}
		command = begun
	}
	if s.Ready == nil {
		if command != nil {
			s.set(Ready, "")
		}
		return
	}
	s.set(Starting, "the ready command has not ended yet")
	go s.watch(command)
}

func (s *Start) watch(command Process) {
	var ended <-chan struct{}
	if command != nil {
		ended = command.Done()
	}
	for pause := pauseFirst; ; pause = min(2*pause, pauseLast) {
		said := s.try()
		select {
		case <-ended:
			// Whatever the ready command says; one that ended well may have left a server behind.
			if failure := command.Failure(); failure != "" {
				s.set(Failed, "the start command ended before it was ready: "+failure+lastOf(command))
				return
			}
			ended = nil
		default:
		}
		if said == "" {
			s.set(Ready, "")
			return
		}
		if command != nil {
			said += lastOf(command)
		}
		s.set(Starting, said)
		time.Sleep(pause)
	}
}

// lastOf is what a command wrote last, as the end of a sentence.
func lastOf(command Process) string {
	if last := command.Last(); last != "" {
		return "; the start command wrote last: " + last
	}
	return ""
}

// try runs the ready command; "" when it ended well.
func (s *Start) try() string {
	asked, err := s.Ready()
	if err != nil {
		return "the ready command could not be begun: " + err.Error()
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-asked.Done():
	case <-timer.C:
		asked.Kill()
		<-asked.Done()
		return "the ready command took longer than " + patience.String()
	}
	if failure := asked.Failure(); failure != "" {
		return "the ready command said: " + failure
	}
	return ""
}

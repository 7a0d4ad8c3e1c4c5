package process

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sort"
	"sync"
	"syscall"
	"time"

	"atoll.local/native/internal/guest/identity"
	"atoll.local/native/internal/guest/reap"
	"atoll.local/native/internal/guest/rpc"
	"atoll.local/native/internal/guest/threads"
	"atoll.local/native/internal/guest/users"
)

const (
	// retention is how long a process that has ended still answers Connect with its start and end.
	retention = 30 * time.Second
	// retainedMax bounds the ended processes kept for that; the oldest go first.
	retainedMax = 4096
	// killPatience is how long SIGKILL waits for the end before it answers.
	killPatience = time.Second
	// liveMax bounds the processes started through the API at one time.
	liveMax = 4096
)

// Service holds the processes that were started through the API.
type Service struct {
	identity *identity.Identity
	reaper   *reap.Reaper
	slots    threads.Slots

	mu       sync.Mutex
	started  uint64
	live     map[int]*process
	retained []retained
}

type retained struct {
	process *process
	until   time.Time
}

// NewService starts processes through reaper, as the users that who tells, and forks in slots.
func NewService(who *identity.Identity, reaper *reap.Reaper, slots threads.Slots) *Service {
	return &Service{identity: who, reaper: reaper, slots: slots, live: make(map[int]*process)}
}

// Routes returns the handlers of process.Process by method name.
func (s *Service) Routes() map[string]http.HandlerFunc {
	return map[string]http.HandlerFunc{
		"List":        rpc.Unary(rpc.MessageBytesMax, s.list),
		"Start":       s.start,
		"Connect":     s.connect,
		"Update":      rpc.Unary(rpc.MessageBytesMax, s.update),
		"SendInput":   rpc.Unary(rpc.InputBytesMax, s.sendInput),
		"StreamInput": s.streamInput,
		"SendSignal":  rpc.Unary(rpc.MessageBytesMax, s.sendSignal),
		"CloseStdin":  rpc.Unary(rpc.MessageBytesMax, s.closeStdin),
	}
}

// Launch starts a command that no request asked for, such as an image's entrypoint; its output is there for Connect.
func (s *Service) Launch(command []string, user *users.User, tag, cwd string) (*Launched, error) {
	off := false
	request := &startRequest{
		Process: &processConfig{Cmd: command[0], Args: command[1:], Cwd: &cwd},
		Tag:     &tag,
		Stdin:   &off,
	}
	p, _, err := s.launch(request, user, 0, false)
	if err != nil {
		return nil, err
	}
	return &Launched{p}, nil
}

// Launched is a process of the guest's own: the image's command, or what asks whether that is ready.
type Launched struct{ process *process }

// Done is closed when the process itself has ended, whatever became of its descendants.
func (l *Launched) Done() <-chan struct{} { return l.process.child.Done() }

// Failure words how it ended; "" when it ended well. Done must have been closed.
func (l *Launched) Failure() string {
	if end := endOf(l.process.child.Status()); end.Error != nil {
		return *end.Error
	}
	return ""
}

// Last is the end of what it has written so far; of one that has ended, what comes shortly after its end is waited for.
func (l *Launched) Last() string {
	select {
	case <-l.Done():
		return l.process.hub.lastWords(lastPatience)
	default:
		return l.process.hub.lastWords(0)
	}
}

// lastPatience is how long output is waited for that a process has left in its pipe, or a child of its may still write.
const lastPatience = 200 * time.Millisecond

// Kill ends it with its whole group.
func (l *Launched) Kill() { _ = l.process.child.SignalGroup(syscall.SIGKILL) }

func (s *Service) start(w http.ResponseWriter, r *http.Request) {
	request := new(startRequest)
	stream := rpc.OpenServer(w, r, request)
	if stream == nil {
		return
	}
	user, err := s.identity.Caller(r)
	if err != nil {
		stream.End(err)
		return
	}
	timeout, err := rpc.Timeout(r.Header)
	if err != nil {
		stream.End(err)
		return
	}
	var p *process
	var output *subscriber
	s.slots.Do(func() { p, output, err = s.launch(request, user, timeout, true) })
	if err != nil {
		stream.End(err)
		return
	}
	s.follow(r.Context(), stream, p, output, rpc.Keepalive(r.Header), p.expired)
}

// launch starts the process, already subscribed to when wanted: not a byte of its output is missed.
func (s *Service) launch(request *startRequest, user *users.User, timeout time.Duration, subscribe bool) (*process, *subscriber, error) {
	if request.Process == nil {
		request.Process = &processConfig{}
	}
	plan, err := makePlan(*request.Process, request.Tag, user, s.identity.Settings.Current())
	if err != nil {
		return nil, nil, err
	}
	s.mu.Lock()
	full := len(s.live) >= liveMax
	s.mu.Unlock()
	if full {
		return nil, nil, rpc.Errorf(rpc.ResourceExhausted, "%d processes are running already", liveMax)
	}
	return s.enter(plan, request, timeout, subscribe)
}

func (s *Service) enter(plan *plan, request *startRequest, timeout time.Duration, subscribe bool) (*process, *subscriber, error) {
	hub := newHub()
	hub.keeps = !subscribe
	var output *subscriber
	if subscribe {
		output = hub.subscribe()
	}
	p, err := start(plan, request, hub, s.reaper, timeout)
	if err != nil {
		return nil, nil, err
	}
	s.mu.Lock()
	s.started++
	p.order = s.started
	s.live[p.child.PID] = p
	s.mu.Unlock()
	go p.supervise(s.retire)
	return p, output, nil
}

// retire moves an ended process to those that only Connect still finds.
func (s *Service) retire(p *process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.live[p.child.PID] == p {
		delete(s.live, p.child.PID)
	}
	p.config = processConfig{} // it may be megabytes, and only List shows it
	s.retained = append(s.retained, retained{p, time.Now().Add(retention)})
	if len(s.retained) > retainedMax {
		s.retained = append([]retained(nil), s.retained[len(s.retained)-retainedMax:]...)
	}
	if len(s.retained) == 1 {
		time.AfterFunc(retention, s.forget)
	}
}

// forget drops the retained processes whose time is up and comes again for the next.
func (s *Service) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	kept := 0
	for kept < len(s.retained) && !now.Before(s.retained[kept].until) {
		kept++
	}
	if kept == len(s.retained) {
		s.retained = nil
		return
	}
	s.retained = append([]retained(nil), s.retained[kept:]...)
	time.AfterFunc(max(time.Until(s.retained[0].until), time.Second), s.forget)
}

func (s *Service) connect(w http.ResponseWriter, r *http.Request) {
	request := new(selected)
	stream := rpc.OpenServer(w, r, request)
	if stream == nil {
		return
	}
	ctx, cancel, err := rpc.WithTimeout(r)
	if err != nil {
		stream.End(err)
		return
	}
	defer cancel()
	p, err := s.find(request.Process, true)
	if err != nil {
		stream.End(err)
		return
	}
	s.follow(ctx, stream, p, p.hub.subscribe(), rpc.Keepalive(r.Header), nil)
}

// follow sends start, output, keepalives and end to one subscriber. expired, when given, is the process's deadline,
// which ends the stream with deadline_exceeded.
func (s *Service) follow(ctx context.Context, stream *rpc.Stream, p *process, output *subscriber, keepalive time.Duration, expired <-chan struct{}) {
	defer p.hub.unsubscribe(output)
	// A subscriber that is cut off may be stuck in a write: only the connection's deadline frees it.
	finished := make(chan struct{})
	defer close(finished)
	go func() {
		select {
		case <-output.gone:
			if output.reason() != nil {
				stream.Cut()
			}
		case <-finished:
		}
	}()
	if stream.Send(eventResponse{event{Start: &startEvent{uint32(p.child.PID)}}}) != nil {
		return
	}
	if err := deliver(ctx, stream, output, keepalive, expired); err != nil {
		// After cancellation nobody reads the answer; after any other failure this is the answer.
		if ctx.Err() == nil || errors.Is(ctx.Err(), context.DeadlineExceeded) {
			stream.End(err)
		}
		return
	}
	<-p.over
	select {
	case <-expired:
		stream.End(errDeadline)
		return
	default:
	}
	if stream.Send(eventResponse{event{End: p.end}}) == nil {
		stream.End(nil)
	}
}

var errDeadline = rpc.Errorf(rpc.DeadlineExceeded, "context deadline exceeded")

// deliver sends output until it has ended (nil) or cannot go on.
func deliver(ctx context.Context, stream *rpc.Stream, output *subscriber, keepalive time.Duration, expired <-chan struct{}) error {
	idle := time.NewTimer(keepalive)
	defer idle.Stop()
	var bodies [][]byte
	for {
		batch, last := output.take()
		if len(batch) > 0 {
			bodies = bodies[:0]
			for _, f := range batch {
				bodies = append(bodies, f.bytes)
			}
			err := stream.WriteFrames(bodies...)
			for _, f := range batch {
				f.release()
			}
			if err != nil {
				return err
			}
			idle.Reset(keepalive)
		}
		if last {
			return nil
		}
		select {
		case <-output.wake:
		case <-idle.C:
			if err := stream.Send(eventResponse{event{Keepalive: &empty{}}}); err != nil {
				return err
			}
			idle.Reset(keepalive)
		case <-expired:
			return errDeadline
		case <-output.gone:
			return rpc.Errorf(rpc.Unavailable, "%v", output.reason())
		case <-ctx.Done():
			return errDeadline
		}
	}
}

func (s *Service) list(context.Context, *http.Request, *empty) (*listResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	answer := &listResponse{Processes: make([]processInfo, 0, len(s.live))}
	for pid, p := range s.live {
		answer.Processes = append(answer.Processes, processInfo{Config: p.config, PID: uint32(pid), Tag: p.tag})
	}
	sort.Slice(answer.Processes, func(i, j int) bool { return answer.Processes[i].PID < answer.Processes[j].PID })
	return answer, nil
}

func (s *Service) update(_ context.Context, _ *http.Request, request *updateRequest) (*empty, error) {
	p, err := s.find(request.Process, false)
	if err != nil {
		return nil, err
	}
	if request.Pty != nil {
		if p.terminal == nil {
			return nil, rpc.Errorf(rpc.Internal, "error resizing tty: tty not assigned to process")
		}
		cols, rows := request.Pty.dimensions()
		if err := resize(p.terminal, cols, rows); err != nil {
			return nil, rpc.Errorf(rpc.Internal, "error resizing tty: %v", err)
		}
	}
	return &empty{}, nil
}

func (s *Service) sendInput(ctx context.Context, _ *http.Request, request *inputRequest) (*empty, error) {
	p, err := s.find(request.Process, false)
	if err != nil {
		return nil, err
	}
	return &empty{}, p.write(ctx, request.Input)
}

// streamInput takes a start message and then input in order, and answers once after the last.
func (s *Service) streamInput(w http.ResponseWriter, r *http.Request) {
	reader, stream := rpc.OpenClient(w, r, rpc.InputBytesMax)
	if stream == nil {
		return
	}
	ctx, cancel, err := rpc.WithTimeout(r)
	if err == nil {
		defer cancel()
		// A client that sends nothing more is waited for until the call's own deadline only.
		stop := context.AfterFunc(ctx, stream.Interrupt)
		defer stop()
		err = s.receiveInput(ctx, reader)
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			err = errDeadline
		}
	}
	if err == nil {
		err = stream.Send(empty{})
	}
	stream.End(err)
}

func (s *Service) receiveInput(ctx context.Context, reader *rpc.Reader) error {
	var p *process
	for {
		body, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		message := new(streamInputRequest)
		if err := rpc.Decode(body, message); err != nil {
			return err
		}
		switch {
		case message.Start != nil:
			if p, err = s.find(message.Start.Process, false); err != nil {
				return err
			}
		case message.Data != nil && p == nil:
			return rpc.Errorf(rpc.InvalidArgument, "input came before the start message")
		case message.Data != nil:
			if err := p.write(ctx, message.Data.Input); err != nil {
				return err
			}
		case message.Keepalive != nil:
		default:
			return rpc.Errorf(rpc.Unimplemented, "invalid event type")
		}
	}
}

func (s *Service) sendSignal(_ context.Context, _ *http.Request, request *signalRequest) (*empty, error) {
	p, err := s.find(request.Process, false)
	if err != nil {
		return nil, err
	}
	var sig syscall.Signal
	switch request.Signal {
	case "SIGNAL_SIGKILL", float64(syscall.SIGKILL):
		sig = syscall.SIGKILL
	case "SIGNAL_SIGTERM", float64(syscall.SIGTERM):
		sig = syscall.SIGTERM
	default:
		return nil, rpc.Errorf(rpc.Unimplemented, "invalid signal: %v", request.Signal)
	}
	err = p.signal(sig)
	if errors.Is(err, reap.ErrGone) || errors.Is(err, syscall.ESRCH) {
		return nil, notFound(p.child.PID)
	}
	if err != nil {
		return nil, rpc.Errorf(rpc.Internal, "error sending signal: %v", err)
	}
	if sig == syscall.SIGKILL {
		// Whoever killed it expects it gone: neither listed, nor there for `kill -0` as a zombie.
		select {
		case <-p.over:
		case <-time.After(killPatience):
		}
	}
	return &empty{}, nil
}

func (s *Service) closeStdin(_ context.Context, _ *http.Request, request *selected) (*empty, error) {
	p, err := s.find(request.Process, false)
	if err != nil {
		return nil, err
	}
	return &empty{}, p.closeStdin()
}

// find returns the selected process; of several with one tag the youngest. Ended ones only where wanted.
func (s *Service) find(which *selector, alsoEnded bool) (*process, error) {
	if which == nil || (which.PID == nil && which.Tag == nil) {
		return nil, rpc.Errorf(rpc.InvalidArgument, "no process is selected")
	}
	matches := func(p *process) bool {
		if which.PID != nil {
			return p.child.PID == int(*which.PID)
		}
		return p.tag != nil && *p.tag == *which.Tag
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var found *process
	for _, p := range s.live {
		if matches(p) && (found == nil || p.order > found.order) {
			found = p
		}
	}
	if found == nil && alsoEnded {
		now := time.Now()
		for _, old := range s.retained {
			if matches(old.process) && now.Before(old.until) {
				found = old.process
			}
		}
	}
	if found != nil {
		return found, nil
	}
	if which.PID != nil {
		return nil, notFound(int(*which.PID))
	}
	return nil, rpc.Errorf(rpc.NotFound, "process with tag %s not found", *which.Tag)
}

func notFound(pid int) error {
	return rpc.Errorf(rpc.NotFound, "process with pid %d not found", pid)
}

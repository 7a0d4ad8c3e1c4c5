// Package process runs what users ask for and carries its input and output: the envd service process.Process.
//
// Read process.go (one running process), hub.go (its output), launch.go (how it starts), then service.go (the calls).
package process

import (
	"context"
	"errors"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"atoll.local/native/internal/guest/reap"
	"atoll.local/native/internal/guest/rpc"
)

// systemTag is kept for the platform's own processes.
const systemTag = "_system"

const (
	pipeChunk     = 32 << 10
	terminalChunk = 16 << 10
)

// The end of a process is told when its output has ended. A descendant that outlives it may hold the pipes open for
// ever (`server &`), so the end is also told after this much silence: 2 s, or 0.1 s when the process was killed on
// request. What the descendant writes later is read and dropped, so that it does not die of a broken pipe. Silence is
// counted in ticks because a restore from a checkpoint makes clocks jump.
const (
	silenceTick        = 100 * time.Millisecond
	silenceTicks       = 20
	silenceTicksKilled = 1
)

// process is one started process until its end was told.
type process struct {
	child  *reap.Child
	config processConfig
	tag    *string
	order  uint64

	hub      *hub
	terminal *os.File

	writing chan struct{} // held by the one who writes input
	inputMu sync.Mutex
	stdin   *os.File

	readers   sync.WaitGroup
	activity  atomic.Uint64
	delivered atomic.Int32 // readers that are handing out a chunk right now

	killed   atomic.Bool
	deadline *deadline     // nil without one
	expired  chan struct{} // closed when the deadline killed it

	end  *endEvent     // set before over is closed
	over chan struct{} // closed when the end may be told
}

// start launches the plan with a terminal or with pipes. timeout zero means no deadline.
func start(p *plan, request *startRequest, output *hub, reaper *reap.Reaper, timeout time.Duration) (*process, error) {
	proc := &process{
		config:  p.config,
		tag:     p.tag,
		hub:     output,
		writing: make(chan struct{}, 1),
		expired: make(chan struct{}),
		over:    make(chan struct{}),
	}
	var err error
	if request.Pty != nil {
		err = proc.startOnTerminal(p, request.Pty, reaper)
	} else {
		err = proc.startOnPipes(p, request.Stdin == nil || *request.Stdin, reaper)
	}
	if err != nil {
		return nil, startError(p.config, err)
	}
	if timeout > 0 {
		proc.deadline = newDeadline(timeout, deadlineStep, proc.expire)
	}
	return proc, nil
}

func (p *process) startOnTerminal(plan *plan, size *terminal, reaper *reap.Reaper) error {
	cols, rows := size.dimensions()
	master, slave, err := openTerminal(cols, rows)
	if err != nil {
		return err
	}
	defer slave.Close()
	p.child, err = plan.fork(reaper, slave, slave, slave, true)
	if err != nil {
		_ = master.Close()
		return err
	}
	p.terminal = master
	p.read(master, "pty", terminalChunk, p.child.Done())
	return nil
}

func (p *process) startOnPipes(plan *plan, wantsStdin bool, reaper *reap.Reaper) (err error) {
	var opened []*os.File
	defer func() {
		for _, f := range opened {
			_ = f.Close()
		}
	}()
	pipe := func() (r, w *os.File) {
		if err != nil {
			return nil, nil
		}
		r, w, err = os.Pipe()
		return r, w
	}
	var stdin, input *os.File
	if wantsStdin {
		stdin, input = pipe()
	} else {
		stdin, err = os.OpenFile(os.DevNull, os.O_RDONLY, 0)
	}
	opened = append(opened, stdin)
	output, stdout := pipe()
	opened = append(opened, stdout)
	complaints, stderr := pipe()
	opened = append(opened, stderr)
	if err == nil {
		p.child, err = plan.fork(reaper, stdin, stdout, stderr, false)
	}
	if err != nil {
		opened = append(opened, input, output, complaints)
		return err
	}
	p.stdin = input
	p.read(output, "stdout", pipeChunk, nil)
	p.read(complaints, "stderr", pipeChunk, nil)
	return nil
}

// read carries one output to the hub until it ends, and goes on dropping it when nobody listens. keep: closed when from
// may be. To close a terminal is to hang up on whoever has it, and many close their files a moment before they exit.
func (p *process) read(from *os.File, kind string, chunkBytes int, keep <-chan struct{}) {
	p.readers.Add(1)
	go func() {
		defer p.readers.Done()
		defer from.Close()
		chunk := make([]byte, chunkBytes)
		for {
			n, err := from.Read(chunk)
			if n > 0 {
				p.delivered.Add(1)
				p.activity.Add(1)
				p.hub.publish(kind, chunk[:n])
				p.delivered.Add(-1)
			}
			// A terminal whose last process has gone reads EIO, a pipe EOF: both are the end.
			if err != nil {
				if keep != nil {
					<-keep
				}
				return
			}
		}
	}()
}

// supervise waits for the end of the process and of its output, and tells it. retire is called before anybody hears of
// the end, so that whoever hears of it finds the process listed no more.
func (p *process) supervise(retire func(*process)) {
	drained := make(chan struct{})
	go func() {
		p.readers.Wait()
		close(drained)
	}()
	<-p.child.Done()
	p.awaitOutput(drained)
	p.end = endOf(p.child.Status())
	retire(p)
	p.hub.finish()
	close(p.over)
	if p.deadline != nil {
		p.deadline.stop()
	}
	p.inputMu.Lock()
	if p.stdin != nil {
		_ = p.stdin.Close()
		p.stdin = nil
	}
	p.inputMu.Unlock()
}

func (p *process) awaitOutput(drained <-chan struct{}) {
	ticker := time.NewTicker(silenceTick)
	defer ticker.Stop()
	seen, silent := p.activity.Load(), 0
	for {
		select {
		case <-drained:
			return
		case <-ticker.C:
		}
		now := p.activity.Load()
		if now != seen || p.delivered.Load() > 0 {
			seen, silent = now, 0
			continue
		}
		silent++
		if silent >= silenceTicks || (silent >= silenceTicksKilled && p.killed.Load()) {
			return
		}
	}
}

// expire is the deadline: the whole process group dies, so that no member keeps the output open.
func (p *process) expire() {
	select {
	case <-p.over:
		return
	default:
	}
	p.killed.Store(true)
	close(p.expired)
	_ = p.child.SignalGroup(syscall.SIGKILL)
}

// signal sends sig to the process alone, as envd does.
func (p *process) signal(sig syscall.Signal) error {
	p.killed.Store(true)
	return p.child.Signal(sig)
}

// write gives input to the process. It waits while the process does not read, until ctx ends.
func (p *process) write(ctx context.Context, in *input) error {
	switch {
	case in == nil || (in.Pty == nil && in.Stdin == nil):
		return rpc.Errorf(rpc.Unimplemented, "invalid input type: neither stdin nor pty")
	case in.Pty != nil && p.terminal == nil:
		return rpc.Errorf(rpc.Internal, "error writing to tty: tty not assigned to process — input should be written to the stdin, not the tty")
	case in.Pty != nil:
		if err := p.writeAll(ctx, p.terminal, *in.Pty); err != nil {
			return rpc.Errorf(rpc.Internal, "error writing to tty: %v", err)
		}
		return nil
	case p.terminal != nil:
		return rpc.Errorf(rpc.Internal, "error writing to stdin: tty assigned to process — input should be written to the pty, not the stdin")
	}
	p.inputMu.Lock()
	stdin := p.stdin
	p.inputMu.Unlock()
	if stdin == nil {
		return rpc.Errorf(rpc.Internal, "error writing to stdin: stdin not enabled or closed")
	}
	if err := p.writeAll(ctx, stdin, *in.Stdin); err != nil {
		return rpc.Errorf(rpc.Internal, "error writing to stdin: %v", err)
	}
	return nil
}

// writeAll writes data whole, after those who came before. When ctx ends first, the write is broken off by a deadline
// and the file stays usable.
func (p *process) writeAll(ctx context.Context, to *os.File, data []byte) error {
	select {
	case p.writing <- struct{}{}:
		defer func() { <-p.writing }()
	case <-ctx.Done():
		return ctx.Err()
	}
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = to.SetWriteDeadline(time.Unix(1, 0))
		close(interrupted)
	})
	_, err := to.Write(data)
	if !stop() {
		// The next write must not find the deadline of this one.
		<-interrupted
		_ = to.SetWriteDeadline(time.Time{})
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return ctx.Err()
	}
	return err
}

func (p *process) closeStdin() error {
	if p.terminal != nil {
		return rpc.Errorf(rpc.Unknown, "error closing stdin: cannot close stdin for PTY process — send Ctrl+D (0x04) instead")
	}
	p.inputMu.Lock()
	defer p.inputMu.Unlock()
	if p.stdin == nil {
		return nil
	}
	err := p.stdin.Close()
	p.stdin = nil
	if err != nil {
		return rpc.Errorf(rpc.Unknown, "error closing stdin: %v", err)
	}
	return nil
}

// endOf words a wait status as the contract wants it: "exit status N" or "signal: killed".
func endOf(status syscall.WaitStatus) *endEvent {
	end := &endEvent{ExitCode: -1}
	switch {
	case status.Exited():
		end.ExitCode = int32(status.ExitStatus())
		end.Exited = true
		end.Status = "exit status " + strconv.Itoa(status.ExitStatus())
	case status.Signaled():
		end.Status = "signal: " + status.Signal().String()
		if status.CoreDump() {
			end.Status += " (core dumped)"
		}
	}
	if !status.Exited() || status.ExitStatus() != 0 {
		text := end.Status
		end.Error = &text
	}
	return end
}

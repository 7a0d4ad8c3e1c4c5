// Package hostline is the line to a machine's host: what has to be said while no network may be used, before a save and
// right after a restore.
//
// The host asks by lines of JSON, {"id": n, "do": verb, ...}, and gets {"id": n, "ok": true} or {"id": n, "error": "..."},
// one after the other. An answer that its host was not there to read is skipped by whoever comes next, by the id.
package hostline

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// PortName is the port's, on a virtual machine's serial bus.
const PortName = "atoll.guest"

// lineMax bounds one question: a seed and a time.
const lineMax = 64 << 10

// Machine is what the host may ask for.
type Machine interface {
	// Rest halts the processes of users, and has what they wrote on the disk where that is asked for: a save is about to come.
	Rest(sync bool) error
	// Wake sets what has to be other than it was, and lets the processes of users go on.
	Wake(to Awakening) error
	// End ends the machine; it may not return.
	End() error
}

// Awakening is what a machine finds when it goes on.
type Awakening struct {
	UnixNano int64
	Entropy  []byte
	// Placement says whose guest the machine is now, in JSON; none: whose it was.
	Placement []byte
	// Cut: nobody at the far end of a connection knows of it any more.
	Cut bool
}

// Listener is one way on which a host comes.
type Listener interface {
	// Listen serves one host after the other, for as long as the machine lives.
	Listen(machine Machine) error
}

type question struct {
	ID         int64  `json:"id"`
	Do         string `json:"do"`
	TimeUnixNS string `json:"time_unix_ns"`
	Entropy    string `json:"entropy"`
	Sync       bool   `json:"sync"`
	// Placement is what a container finds in its placement file.
	Placement json.RawMessage `json:"placement"`
	// Cut asks for an end of all connections with others.
	Cut bool `json:"cut"`
}

type reply struct {
	ID    int64  `json:"id"`
	OK    bool   `json:"ok"`
	Error string `json:"error,omitempty"`
}

// Line is the open port.
type Line struct {
	*os.File
	moved chan os.Signal
}

// idleLook is how often a line is looked at that nobody has said anything about: the kernel does say when its host comes.
const idleLook = 5 * time.Second

// Open finds the port below /sys and opens its device; os.ErrNotExist when the machine has none.
func Open(sys, dev string) (*Line, error) {
	names, err := filepath.Glob(filepath.Join(sys, "class/virtio-ports/*/name"))
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err == nil && strings.TrimSpace(string(text)) == PortName {
			return open(filepath.Join(dev, filepath.Base(filepath.Dir(name))))
		}
	}
	return nil, os.ErrNotExist
}

func open(path string) (*Line, error) {
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	line := &Line{File: file, moved: make(chan os.Signal, 1)}
	// Without a host on the other side every read ends at once; the kernel sends a signal when one has come.
	signal.Notify(line.moved, syscall.SIGIO)
	raw, err := file.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) {
			_, _ = unix.FcntlInt(fd, unix.F_SETOWN, os.Getpid())
			if flags, failed := unix.FcntlInt(fd, unix.F_GETFL, 0); failed == nil {
				_, _ = unix.FcntlInt(fd, unix.F_SETFL, flags|unix.O_ASYNC)
			}
		})
	}
	return line, err
}

// Listen serves one host after the other, for as long as the machine lives.
func (l *Line) Listen(machine Machine) error {
	for {
		if err := Serve(l, machine); err != nil {
			return err
		}
		select {
		case <-l.moved:
		case <-time.After(idleLook):
		}
	}
}

// Serve answers until the line ends. A line that cannot be read is answered like any other that is refused.
func Serve(line io.ReadWriter, machine Machine) error {
	scanner := bufio.NewScanner(line)
	scanner.Buffer(make([]byte, 4096), lineMax)
	for scanner.Scan() {
		if len(scanner.Bytes()) == 0 {
			continue
		}
		answer, err := json.Marshal(ask(scanner.Bytes(), machine))
		if err != nil {
			return err
		}
		if _, err := line.Write(append(answer, '\n')); err != nil {
			return err
		}
	}
	return scanner.Err()
}

func ask(text []byte, machine Machine) reply {
	var q question
	if err := json.Unmarshal(text, &q); err != nil {
		return reply{Error: "the question is not valid JSON"}
	}
	if err := carryOut(&q, machine); err != nil {
		return reply{ID: q.ID, Error: err.Error()}
	}
	return reply{ID: q.ID, OK: true}
}

func carryOut(q *question, machine Machine) error {
	switch q.Do {
	case "rest":
		return machine.Rest(q.Sync)
	case "wake":
		entropy, err := base64.StdEncoding.DecodeString(q.Entropy)
		if err != nil {
			return errors.New("entropy must be base64")
		}
		var now int64
		if q.TimeUnixNS != "" {
			if now, err = strconv.ParseInt(q.TimeUnixNS, 10, 64); err != nil {
				return errors.New("time_unix_ns must be an integer in a string")
			}
		}
		return machine.Wake(Awakening{UnixNano: now, Entropy: entropy, Placement: q.Placement, Cut: q.Cut})
	case "end":
		return machine.End()
	default:
		return fmt.Errorf("nobody does %q here", q.Do)
	}
}

// Package group holds a machine's user processes in a control group of their own: bounded, and frozen for the moment of a
// save. The agent itself stays outside of it.
package group

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// freezePatience bounds how long processes may take to come to a halt; one that sleeps in the kernel may never do.
const (
	freezePatience = 2 * time.Second
	freezeLook     = time.Millisecond
)

// Group is a control group of version 2.
type Group struct {
	dir *os.File
}

// Make has a group below root, with at most pidsMax processes and threads in it; 0: as many as the kernel bears.
func Make(root string, pidsMax int) (*Group, error) {
	if err := os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+pids +memory +cpu"), 0); err != nil {
		return nil, err
	}
	path := filepath.Join(root, "users")
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	if pidsMax > 0 {
		if err := os.WriteFile(filepath.Join(path, "pids.max"), []byte(strconv.Itoa(pidsMax)), 0); err != nil {
			return nil, err
		}
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	return &Group{dir}, nil
}

// FD is what a process is born into the group by.
func (g *Group) FD() int { return int(g.dir.Fd()) }

// Signal sends a signal to each process that is in the group now, and says how many there were.
func (g *Group) Signal(number syscall.Signal) int {
	text, err := os.ReadFile(filepath.Join(g.dir.Name(), "cgroup.procs"))
	if err != nil {
		return 0
	}
	count := 0
	for _, word := range strings.Fields(string(text)) {
		if pid, err := strconv.Atoi(word); err == nil && syscall.Kill(pid, number) == nil {
			count++
		}
	}
	return count
}

// Freeze halts all that is in the group, and waits for it.
func (g *Group) Freeze() error { return g.turn("1") }

// Thaw lets it go on. Idempotency: what runs goes on running.
func (g *Group) Thaw() error { return g.turn("0") }

func (g *Group) turn(to string) error {
	if err := os.WriteFile(filepath.Join(g.dir.Name(), "cgroup.freeze"), []byte(to), 0); err != nil {
		return err
	}
	for deadline := time.Now().Add(freezePatience); ; time.Sleep(freezeLook) {
		text, err := os.ReadFile(filepath.Join(g.dir.Name(), "cgroup.events"))
		if err != nil {
			return err
		}
		if strings.Contains(string(text), "frozen "+to) {
			return nil
		}
		if time.Now().After(deadline) {
			return errors.New("the processes of users do not come to a halt")
		}
	}
}

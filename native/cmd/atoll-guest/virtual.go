package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"syscall"
	"time"

	"atoll.local/native/internal/guest/boot"
	"atoll.local/native/internal/guest/connections"
	"atoll.local/native/internal/guest/control"
	"atoll.local/native/internal/guest/group"
	"atoll.local/native/internal/guest/hostline"
)

// endPatience is how long processes have to end by themselves; a host that is less patient ends the machine.
const (
	endPatience = 10 * time.Second
	endLook     = 20 * time.Millisecond
)

// virtual is the virtual machine that this guest is PID 1 of, for its host.
type virtual struct {
	control.OwnMachine
	users *group.Group
	// placementFile is where the guest looks whose it is.
	placementFile string
	log           *slog.Logger
}

// listen answers the host on the machine's lines, whichever it has. A machine without one is served by its network alone.
func listen(users *group.Group, placementFile string, log *slog.Logger) error {
	machine := &virtual{users: users, placementFile: placementFile, log: log}
	lines := []func() (hostline.Listener, error){
		func() (hostline.Listener, error) { return hostline.Open("/sys", "/dev") },
		func() (hostline.Listener, error) { return hostline.OpenVsock() },
	}
	for _, open := range lines {
		line, err := open()
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("the line to the host: %w", err)
		}
		go func() {
			err := line.Listen(machine)
			log.Error("guest.hostline.ended", "error", err)
		}()
	}
	return nil
}

// Rest halts the processes of users; see hostline.Machine.
func (v *virtual) Rest(sync bool) error {
	if err := v.users.Freeze(); err != nil {
		_ = v.users.Thaw()
		return err
	}
	if sync {
		syscall.Sync()
	}
	return nil
}

// Wake sets clock, chance and name before anything of a user's goes on, and ends connections that nobody outside knows any more.
func (v *virtual) Wake(to hostline.Awakening) error {
	if to.UnixNano > 0 {
		if err := v.SetClock(to.UnixNano); err != nil {
			return err
		}
	}
	if len(to.Entropy) > 0 {
		if err := v.AddEntropy(to.Entropy); err != nil {
			return err
		}
	}
	if len(to.Placement) > 0 && v.placementFile != "" {
		if err := os.WriteFile(v.placementFile, to.Placement, 0o600); err != nil {
			return err
		}
	}
	if to.Cut {
		endConnections(connections.Cut, v.log)
	}
	return v.users.Thaw()
}

// endConnections ends those with others, and says so where it cannot: whoever waits on one that is left finds out when it next sends, which
// is no reason to stay at rest.
func endConnections(cut func() (int, error), log *slog.Logger) {
	if count, err := cut(); err != nil {
		log.Warn("guest.connections.left", "ended", count, "error", err)
	}
}

// End asks all processes to end, and ends the machine when they have, or when it has waited long enough. It answers at once.
func (v *virtual) End() error {
	go func() {
		_ = v.users.Thaw()
		v.users.Signal(syscall.SIGTERM)
		for deadline := time.Now().Add(endPatience); v.users.Signal(0) > 0 && time.Now().Before(deadline); {
			time.Sleep(endLook)
		}
		boot.Restart()
	}()
	return nil
}

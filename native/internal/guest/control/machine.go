package control

import (
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Machine is what init may change outside of the guest itself.
type Machine interface {
	SetClock(unixNano int64) error
	AddEntropy(seed []byte) error
	SetHostname(name string) error
}

// OwnMachine is the real one, for a guest that has its machine (or its namespaces) for itself.
type OwnMachine struct{}

// clockTolerance is below what a step would cost: programs dislike steps more than a few milliseconds of error.
const clockTolerance = 20 * time.Millisecond

// SetClock steps the clock when it is off by more than a little. Containers may not and need not; that is no error.
func (OwnMachine) SetClock(unixNano int64) error {
	off := time.Duration(unixNano - time.Now().UnixNano())
	if off.Abs() < clockTolerance {
		return nil
	}
	now := unix.NsecToTimespec(unixNano)
	err := unix.ClockSettime(unix.CLOCK_REALTIME, &now)
	if err == unix.EPERM || err == unix.ENOSYS {
		return nil
	}
	return err
}

// AddEntropy mixes a seed into the kernel's pool.
func (OwnMachine) AddEntropy(seed []byte) error {
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Write(seed)
	return err
}

// SetHostname names the machine, and makes the name resolve: sudo waits for DNS otherwise.
func (OwnMachine) SetHostname(name string) error {
	if err := unix.Sethostname([]byte(name)); err != nil && err != unix.EPERM {
		return err
	}
	return addHost("/etc/hosts", name)
}

// addHost appends name to a hosts file that does not have it.
func addHost(path, name string) error {
	known, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		return err
	}
	for _, word := range strings.Fields(string(known)) {
		if word == name {
			return nil
		}
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	line := fmt.Sprintf("127.0.1.1 %s\n", name)
	if len(known) > 0 && !strings.HasSuffix(string(known), "\n") {
		line = "\n" + line
	}
	_, err = f.WriteString(line)
	return err
}

// NoMachine changes nothing: for a guest that shares its machine with others.
type NoMachine struct{}

// SetClock does nothing.
func (NoMachine) SetClock(int64) error { return nil }

// AddEntropy does nothing.
func (NoMachine) AddEntropy([]byte) error { return nil }

// SetHostname does nothing.
func (NoMachine) SetHostname(string) error { return nil }

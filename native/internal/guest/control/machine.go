package control

import (
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"time"
	"unsafe"

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

// rndAddEntropy and rndReseedCRNG are requests of random(4).
const (
	rndAddEntropy = 0x40085203
	rndReseedCRNG = 0x5207
)

// AddEntropy mixes a seed into the kernel's pool, and has the kernel draw from it at once: what was only written is taken up when
// the kernel reseeds by itself, and until then two machines that were restored from one moment draw the same. Where the kernel is
// not the machine's own, writing is all that it lets one do.
func (OwnMachine) AddEntropy(seed []byte) error {
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	// struct rand_pool_info: bits, bytes, the bytes.
	info := make([]byte, 8, 8+len(seed)+4)
	binary.NativeEndian.PutUint32(info[:4], uint32(len(seed)*8))
	binary.NativeEndian.PutUint32(info[4:8], uint32(len(seed)))
	info = append(info, seed...)
	if len(seed) > 0 && ioctl(f, rndAddEntropy, uintptr(unsafe.Pointer(&info[0]))) == nil && ioctl(f, rndReseedCRNG, 0) == nil {
		return nil
	}
	_, err = f.Write(seed)
	return err
}

func ioctl(f *os.File, request, argument uintptr) error {
	if _, _, number := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, argument); number != 0 {
		return number
	}
	return nil
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

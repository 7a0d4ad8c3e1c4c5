package process

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// openTerminal makes a pseudo-terminal pair. The master stays non-blocking, so that reading it parks a goroutine and
// not a thread; the known pty libraries make it blocking by asking for its descriptor.
func openTerminal(cols, rows uint32) (master, slave *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open", Path: "/dev/ptmx", Err: err}
	}
	master = os.NewFile(uintptr(fd), "/dev/ptmx")
	defer func() {
		if err != nil {
			_ = master.Close()
		}
	}()
	if err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return nil, nil, os.NewSyscallError("unlockpt", err)
	}
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		return nil, nil, os.NewSyscallError("ptsname", err)
	}
	if err = resize(master, cols, rows); err != nil {
		return nil, nil, err
	}
	path := fmt.Sprintf("/dev/pts/%d", number)
	slaveFD, err := unix.Open(path, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return master, os.NewFile(uintptr(slaveFD), path), nil
}

// resize sets the window size; the kernel tells the foreground processes with SIGWINCH.
func resize(master *os.File, cols, rows uint32) error {
	raw, err := master.SyscallConn()
	if err != nil {
		return err
	}
	var sizeErr error
	err = raw.Control(func(fd uintptr) {
		size := unix.Winsize{Col: uint16(min(cols, 1<<16-1)), Row: uint16(min(rows, 1<<16-1))}
		sizeErr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &size)
	})
	if err != nil {
		return err
	}
	return os.NewSyscallError("TIOCSWINSZ", sizeErr)
}

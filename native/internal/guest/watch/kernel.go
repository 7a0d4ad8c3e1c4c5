package watch

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// The descriptor is reached through SyscallConn: Fd() would make it blocking, and each watcher would cost a thread.

func (w *Watcher) addWatch(path string, flags uint32) (int32, error) {
	var watch int
	err := unix.EBADF
	w.control(func(fd int) {
		var addErr error
		watch, addErr = unix.InotifyAddWatch(fd, path, flags)
		err, _ = addErr.(unix.Errno)
	})
	if err != 0 {
		return 0, err
	}
	return int32(watch), nil
}

func (w *Watcher) removeWatch(watch int32) {
	w.control(func(fd int) { _, _ = unix.InotifyRmWatch(fd, uint32(watch)) })
}

// pending is how many bytes the kernel holds ready (TIOCINQ is FIONREAD); where it cannot be asked, as many as one read takes.
func (w *Watcher) pending() int {
	bytes := bufferBytes
	w.control(func(fd int) {
		if n, err := unix.IoctlGetInt(fd, unix.TIOCINQ); err == nil {
			bytes = n
		}
	})
	return bytes
}

func (w *Watcher) control(do func(fd int)) {
	if raw, err := w.file.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { do(int(fd)) })
	}
}

// wait returns when there is something to read.
func (w *Watcher) wait() error {
	raw, err := w.file.SyscallConn()
	if err != nil {
		return err
	}
	// The function is called at once and again whenever the descriptor became readable.
	return raw.Read(func(fd uintptr) bool {
		ready := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(ready, 0)
		return err == nil && n > 0
	})
}

// read returns what is there without waiting; 0 when nothing is.
func (w *Watcher) read(into []byte) (int, error) {
	raw, err := w.file.SyscallConn()
	if err != nil {
		return 0, err
	}
	var n int
	var readErr error
	err = raw.Control(func(fd uintptr) {
		for {
			n, readErr = unix.Read(int(fd), into)
			if !errors.Is(readErr, unix.EINTR) {
				return
			}
		}
	})
	switch {
	case err != nil:
		return 0, err
	case errors.Is(readErr, unix.EAGAIN):
		return 0, nil
	case readErr != nil:
		return 0, os.NewSyscallError("read", readErr)
	}
	return n, nil
}

package images

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// lockFile takes an exclusive lock that ends with this process, whatever ends it. The file is removed by its holder, so
// whoever gets the lock of a removed file begins again.
func lockFile(ctx context.Context, path string) (func(), error) {
	for {
		file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, failure(CodeInternal, err, "a lock cannot be made")
		}
		if err := flock(ctx, file); err != nil {
			file.Close()
			return nil, failure(CodeInternal, err, "a lock cannot be taken")
		}
		if same(file, path) {
			return func() {
				_ = os.Remove(path)
				_ = file.Close()
			}, nil
		}
		file.Close()
	}
}

// flock asks again and again, since a blocked system call would not see the context's end.
func flock(ctx context.Context, file *os.File) error {
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil || !(errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR)) {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func same(file *os.File, path string) bool {
	opened, err := file.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(path)
	return err == nil && os.SameFile(opened, named)
}

package images

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// clone makes a tree that shares its files with another: directories are new, everything else is one more name of the same
// file, or a copy where that cannot be (another file system, too many names). Both trees are only ever read, and layers make
// files anew instead of writing into them, so neither sees what becomes of the other. Nobody writes the source.
type clone struct {
	from, to string
	// copied is where a file with several names was copied to.
	copied map[uint64]string
	// bytes are those of all that were copied.
	bytes int64
}

// cloneTree answers how many bytes had to be copied.
func cloneTree(from, to string) (int64, error) {
	c := &clone{from: from, to: to, copied: make(map[uint64]string)}
	err := c.directory(".")
	return c.bytes, err
}

// directory makes one, with all that is in it; its times come last, since making files in it sets them anew.
func (c *clone) directory(name string) error {
	source, target := filepath.Join(c.from, name), filepath.Join(c.to, name)
	var info unix.Stat_t
	if err := unix.Lstat(source, &info); err != nil {
		return err
	}
	if err := os.Mkdir(target, 0o700); err != nil && !(name == "." && errors.Is(err, os.ErrExist)) {
		return err
	}
	entries, err := os.ReadDir(source)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		below := filepath.Join(name, entry.Name())
		if entry.IsDir() {
			err = c.directory(below)
		} else {
			err = c.name(below)
		}
		if err != nil {
			return err
		}
	}
	return describe(source, target, &info)
}

func (c *clone) name(name string) error {
	source, target := filepath.Join(c.from, name), filepath.Join(c.to, name)
	err := os.Link(source, target)
	if err == nil || !(errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EMLINK) || errors.Is(err, unix.EPERM)) {
		return err
	}
	var info unix.Stat_t
	if err := unix.Lstat(source, &info); err != nil {
		return err
	}
	if first, known := c.copied[info.Ino]; known && os.Link(first, target) == nil {
		return nil
	}
	switch info.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		err = copyFile(source, target)
		c.bytes += info.Size
	case unix.S_IFLNK:
		err = copyLink(source, target)
	case unix.S_IFIFO:
		err = unix.Mkfifo(target, 0o600)
	default:
		return nil // no tree of ours has it
	}
	if err != nil {
		return err
	}
	if info.Nlink > 1 {
		c.copied[info.Ino] = target
	}
	return describe(source, target, &info)
}

func copyLink(source, target string) error {
	leads, err := os.Readlink(source)
	if err != nil {
		return err
	}
	return os.Symlink(leads, target)
}

func copyFile(source, target string) error {
	from, err := os.OpenFile(source, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenFile(target, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from) // by the kernel, where it can
	return errors.Join(err, to.Close())
}

// describe gives a name the owner, mode, attributes and times of another, in this order: a change of owner takes set-user-id away.
func describe(source, target string, info *unix.Stat_t) error {
	if err := unix.Lchown(target, int(info.Uid), int(info.Gid)); err != nil {
		return err
	}
	if info.Mode&unix.S_IFMT != unix.S_IFLNK {
		if err := unix.Chmod(target, info.Mode&0o7777); err != nil {
			return err
		}
		if err := copyAttributes(source, target); err != nil {
			return err
		}
	}
	at := unix.NsecToTimespec(time.Unix(info.Mtim.Unix()).UnixNano())
	return unix.UtimesNanoAt(unix.AT_FDCWD, target, []unix.Timespec{at, at}, unix.AT_SYMLINK_NOFOLLOW)
}

func copyAttributes(source, target string) error {
	names := make([]byte, 64<<10)
	size, err := unix.Llistxattr(source, names)
	if errors.Is(err, unix.ENOTSUP) {
		return nil
	}
	if err != nil {
		return err
	}
	for name := range strings.SplitSeq(string(names[:size]), "\x00") {
		if name == "" {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(source, name, value)
		if err == nil {
			err = unix.Lsetxattr(target, name, value[:n], 0)
		}
		if err != nil && !errors.Is(err, unix.ENOTSUP) && !errors.Is(err, unix.EPERM) {
			return err
		}
	}
	return nil
}

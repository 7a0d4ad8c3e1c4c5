package unpack

import (
	"errors"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

func descriptorPath(file int) string { return "/proc/self/fd/" + strconv.Itoa(file) }

// open finds a directory below the root; links on the way are followed inside the root only.
func (t *Tree) open(name string) (int, error) {
	return t.openAt(t.root, name)
}

func (t *Tree) openAt(directory int, name string) (int, error) {
	if name == "" {
		name = "."
	}
	how := unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	}
	for {
		found, err := unix.Openat2(directory, name, &how)
		// The kernel says so when something was renamed while it looked for `..`.
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		}
		return found, err
	}
}

// makeDirectories opens a directory, and makes what is missing of it. What a layer forgot to list is root's, 0755.
func (t *Tree) makeDirectories(name string) (int, error) {
	found, err := t.open(name)
	if !errors.Is(err, unix.ENOENT) {
		return found, err
	}
	parts := strings.Split(name, "/")
	for i := range parts {
		parent, err := t.open(strings.Join(parts[:i], "/"))
		if err != nil {
			return -1, err
		}
		err = unix.Mkdirat(parent, parts[i], 0o755)
		if err == nil {
			// Whatever the umask: mkdir asks it, chmod does not.
			err = errors.Join(unix.Fchmodat(parent, parts[i], 0o755, 0), t.mark(parent, parts[i]))
		}
		unix.Close(parent)
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return -1, err
		}
	}
	return t.open(name)
}

// remove takes a name and all below it away, except what keeps says; a directory that keeps something stays.
func remove(parent int, name string, keeps func(parent int, name string) bool) error {
	var there unix.Stat_t
	if err := unix.Fstatat(parent, name, &there, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if there.Mode&unix.S_IFMT != unix.S_IFDIR {
		if keeps(parent, name) {
			return nil
		}
		return unix.Unlinkat(parent, name, 0)
	}
	directory, err := unix.Openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	err = empty(directory, keeps)
	unix.Close(directory)
	if err != nil || keeps(parent, name) {
		return err
	}
	err = unix.Unlinkat(parent, name, unix.AT_REMOVEDIR)
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
		return nil // something below is kept
	}
	return err
}

// empty removes a directory's content, except what keeps says.
func empty(directory int, keeps func(parent int, name string) bool) error {
	names, err := list(directory)
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := remove(directory, name, keeps); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return nil
}

// list reads a directory's names through a descriptor of its own.
func list(directory int) ([]string, error) {
	again, err := unix.Openat(directory, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(again), "directory")
	defer file.Close()
	return file.Readdirnames(-1)
}

// Count returns the entries of a tree and the bytes of its files, one with several names once.
func (t *Tree) Count() (entries, size int64, err error) {
	linked := make(map[uint64]struct{})
	var walk func(directory int) error
	walk = func(directory int) error {
		names, err := list(directory)
		if err != nil {
			return err
		}
		for _, name := range names {
			var info unix.Stat_t
			if err := unix.Fstatat(directory, name, &info, unix.AT_SYMLINK_NOFOLLOW); err != nil {
				return err
			}
			entries++
			switch info.Mode & unix.S_IFMT {
			case unix.S_IFREG:
				if _, known := linked[info.Ino]; !known {
					size += info.Size
				}
				if info.Nlink > 1 {
					linked[info.Ino] = struct{}{}
				}
			case unix.S_IFDIR:
				below, err := unix.Openat(directory, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
				if err != nil {
					return err
				}
				err = walk(below)
				unix.Close(below)
				if err != nil {
					return err
				}
			}
		}
		return nil
	}
	return entries, size, walk(t.root)
}

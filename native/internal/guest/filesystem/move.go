package filesystem

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"atoll.local/native/internal/guest/entry"
)

// moveAcross moves between file systems, where rename cannot: /tmp is often one of its own. It copies beside the
// destination, exchanges the copy in and removes the source last, so that no failure loses anything.
func moveAcross(source, destination string) error {
	partial, err := os.MkdirTemp(filepath.Dir(destination), ".atoll-move-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(partial)
	copied := filepath.Join(partial, "content")
	if err := copyTree(source, copied); err != nil {
		return err
	}
	if err := os.Rename(copied, destination); err != nil {
		return err
	}
	return os.RemoveAll(source)
}

// copyTree copies files, directories and symlinks with owner, mode, times and metadata.
func copyTree(source, target string) error {
	type made struct {
		path string
		info fs.FileInfo
	}
	var dirs []made
	err := filepath.WalkDir(source, func(path string, item fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(source, path)
		if err != nil {
			return err
		}
		info, err := item.Info()
		if err != nil {
			return err
		}
		to := filepath.Join(target, relative)
		if info.IsDir() {
			dirs = append(dirs, made{to, info})
			return os.Mkdir(to, 0o700)
		}
		if err := copyOne(path, to, info); err != nil {
			return err
		}
		return dress(path, to, info)
	})
	if err != nil {
		return err
	}
	// Directories last and from the inside: filling one changes its time, and it may be closed to writing.
	for i := len(dirs) - 1; i >= 0; i-- {
		relative, _ := filepath.Rel(target, dirs[i].path)
		if err := dress(filepath.Join(source, relative), dirs[i].path, dirs[i].info); err != nil {
			return err
		}
	}
	return nil
}

func copyOne(from, to string, info fs.FileInfo) error {
	if info.Mode()&fs.ModeSymlink != 0 {
		target, err := os.Readlink(from)
		if err != nil {
			return err
		}
		return os.Symlink(target, to)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return errors.New("unknown file system")
	}
	if !info.Mode().IsRegular() {
		return unix.Mknod(to, st.Mode, int(st.Rdev))
	}
	input, err := os.Open(from)
	if err != nil {
		return err
	}
	defer input.Close()
	output, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(output, input)
	return errors.Join(err, output.Close())
}

// dress gives a copy the looks of its original.
func dress(from, to string, info fs.FileInfo) error {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return errors.New("unknown file system")
	}
	if err := os.Lchown(to, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if info.Mode()&fs.ModeSymlink != 0 {
		return nil
	}
	if metadata := entry.ReadMetadata(from); metadata != nil {
		if err := entry.ReplaceMetadata(to, metadata); err != nil {
			return err
		}
	}
	if err := unix.Chmod(to, st.Mode&0o7777); err != nil {
		return err
	}
	return os.Chtimes(to, time.Time{}, info.ModTime())
}

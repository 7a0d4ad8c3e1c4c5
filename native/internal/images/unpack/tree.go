package unpack

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Tree is a root file system that layers are applied to.
type Tree struct {
	scribe
	root int
	// made is what the layer at hand has made, by directory and name: whiteouts are for what was there before.
	made map[place]struct{}
	// dated directories get their times when the layer is done, since making files in them sets these anew.
	dated map[string]time.Time
}

// scribe writes files and says whose they are. One goroutine uses it at a time.
type scribe struct {
	// owned says whether files can be given to others; it is false for tests without root.
	owned bool
	block []byte
}

func newScribe() scribe { return scribe{owned: os.Geteuid() == 0, block: make([]byte, 128<<10)} }

// filling is what a file holds: read from the layer, or staged under a number.
type filling struct {
	from   io.Reader
	staged *Staged
	number uint64
}

type place struct {
	device, inode uint64
	name          string
}

// OpenTree uses an existing directory as root.
func OpenTree(directory string) (*Tree, error) {
	root, err := unix.Open(directory, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, failed(err, directory)
	}
	return &Tree{root: root, scribe: newScribe(), made: make(map[place]struct{})}, nil
}

// Close lets go of the root.
func (t *Tree) Close() error { return unix.Close(t.root) }

// Apply puts a layer on top of what is there. After an error the tree is to be thrown away.
//
// Errors: IMAGE_REFUSED, IMAGE_CORRUPT, HOST_DISK_FULL.
func (t *Tree) Apply(ctx context.Context, layer Layer, meter *Meter) error {
	t.begin()
	err := each(ctx, layer, meter, func(e *entry, from io.Reader) error { return t.take(e, filling{from: from}, meter) })
	if err != nil {
		return err
	}
	t.end()
	return nil
}

func (t *Tree) begin() { t.made, t.dated = make(map[place]struct{}), make(map[string]time.Time) }

func (t *Tree) end() {
	for name, at := range t.dated {
		t.setDirectoryTime(name, at)
	}
}

func (t *Tree) take(e *entry, holds filling, meter *Meter) error {
	if strings.HasPrefix(e.base, whiteoutPrefix) {
		return t.whiteout(e)
	}
	if e.Typeflag == tar.TypeChar || e.Typeflag == tar.TypeBlock {
		return nil
	}
	if e.base == "" {
		return t.describe(t.root, e, meter)
	}
	parent, err := t.makeDirectories(e.directory)
	if err != nil {
		return err
	}
	defer unix.Close(parent)
	if err := t.clear(parent, e); err != nil {
		return err
	}
	if err := t.create(parent, e, holds, meter); err != nil {
		return err
	}
	return t.mark(parent, e.base)
}

// clear removes what is in an entry's way. A directory stays where a directory comes; whatever else is made anew.
func (t *Tree) clear(parent int, e *entry) error {
	var there unix.Stat_t
	err := unix.Fstatat(parent, e.base, &there, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	isDirectory := there.Mode&unix.S_IFMT == unix.S_IFDIR
	if isDirectory && e.Typeflag == tar.TypeDir {
		return nil
	}
	return remove(parent, e.base, func(int, string) bool { return false })
}

func (t *Tree) create(parent int, e *entry, holds filling, meter *Meter) error {
	switch e.Typeflag {
	case tar.TypeDir:
		return t.createDirectory(parent, e, meter)
	case tar.TypeSymlink:
		if err := unix.Symlinkat(e.Linkname, parent, e.base); err != nil {
			return err
		}
		return t.describeLink(parent, e)
	case tar.TypeLink:
		return t.createHardLink(parent, e)
	case tar.TypeFifo:
		if err := unix.Mkfifoat(parent, e.base, 0o600); err != nil {
			return err
		}
		if err := t.own(func(uid, gid int) error { return unix.Fchownat(parent, e.base, uid, gid, unix.AT_SYMLINK_NOFOLLOW) }, e); err != nil {
			return err
		}
		return unix.Fchmodat(parent, e.base, modeOf(e), 0)
	}
	if holds.staged != nil {
		return unix.Renameat(holds.staged.files, numbered(holds.number), parent, e.base)
	}
	return t.write(parent, e.base, e, holds.from, meter)
}

// write makes a file anew, with content and description.
func (s *scribe) write(parent int, name string, e *entry, from io.Reader, meter *Meter) error {
	file, err := unix.Openat(parent, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer unix.Close(file)
	if err := s.fill(file, from); err != nil {
		return err
	}
	return s.describe(file, e, meter)
}

func (t *Tree) createDirectory(parent int, e *entry, meter *Meter) error {
	if err := unix.Mkdirat(parent, e.base, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	made, err := unix.Openat(parent, e.base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(made)
	t.dated[joined(e)] = e.ModTime
	return t.describe(made, e, meter)
}

// createHardLink makes a second name. The target's last part is not followed: a link to a symlink is one.
func (t *Tree) createHardLink(parent int, e *entry) error {
	directory, base := split(e.link)
	from, err := t.open(directory)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	var target unix.Stat_t
	if err := unix.Fstatat(from, base, &target, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if target.Mode&unix.S_IFMT == unix.S_IFDIR {
		return refuse("%.200q is a hard link to a directory", e.Name)
	}
	return unix.Linkat(from, base, parent, e.base, 0)
}

// fill writes a file's content, and leaves holes where whole blocks are zero.
func (s *scribe) fill(file int, from io.Reader) error {
	var size int64
	for {
		n, err := io.ReadFull(from, s.block)
		if n > 0 {
			if !zero(s.block[:n]) {
				if err := writeAll(file, s.block[:n], size); err != nil {
					return err
				}
			}
			size += int64(n)
		}
		switch {
		case errors.Is(err, io.EOF):
			return unix.Ftruncate(file, size)
		case errors.Is(err, io.ErrUnexpectedEOF) && n < len(s.block):
			// ReadFull says so of a last, shorter block, too: only the reader itself knows.
			if _, again := from.Read(s.block[:1]); errors.Is(again, io.EOF) {
				return unix.Ftruncate(file, size)
			}
			return err
		case err != nil:
			return err
		}
	}
}

func writeAll(file int, data []byte, at int64) error {
	for len(data) > 0 {
		n, err := unix.Pwrite(file, data, at)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		data, at = data[n:], at+int64(n)
	}
	return nil
}

func zero(block []byte) bool {
	for len(block) >= 8 {
		if block[0]|block[1]|block[2]|block[3]|block[4]|block[5]|block[6]|block[7] != 0 {
			return false
		}
		block = block[8:]
	}
	for _, b := range block {
		if b != 0 {
			return false
		}
	}
	return true
}

// describe gives an open file its owner, mode, attributes and time, in this order: a change of owner takes set-user-id away.
func (s *scribe) describe(file int, e *entry, meter *Meter) error {
	if err := s.own(func(uid, gid int) error { return unix.Fchown(file, uid, gid) }, e); err != nil {
		return err
	}
	if err := unix.Fchmod(file, modeOf(e)); err != nil {
		return err
	}
	for key, value := range e.PAXRecords {
		name, found := strings.CutPrefix(key, "SCHILY.xattr.")
		if !found {
			continue
		}
		if !keepsAttribute(name) {
			meter.leaveOut()
			continue
		}
		if err := unix.Fsetxattr(file, name, []byte(value), 0); err != nil {
			// ext4 says ENOSPC, too, of what does not fit into one of its blocks. A disk that is full says so again.
			isLarge := errors.Is(err, unix.ENOSPC) && len(value) > attributeBytesSafe
			if !isLarge && !errors.Is(err, unix.ENOTSUP) && !errors.Is(err, unix.EPERM) {
				return err
			}
			meter.leaveOut()
		}
	}
	if e.Typeflag == tar.TypeDir {
		return nil
	}
	at := timeOf(e.ModTime)
	return unix.UtimesNanoAt(unix.AT_FDCWD, descriptorPath(file), []unix.Timespec{at, at}, 0)
}

func (t *Tree) describeLink(parent int, e *entry) error {
	if err := t.own(func(uid, gid int) error { return unix.Fchownat(parent, e.base, uid, gid, unix.AT_SYMLINK_NOFOLLOW) }, e); err != nil {
		return err
	}
	at := timeOf(e.ModTime)
	return unix.UtimesNanoAt(parent, e.base, []unix.Timespec{at, at}, unix.AT_SYMLINK_NOFOLLOW)
}

func (s *scribe) own(give func(uid, gid int) error, e *entry) error {
	if !s.owned {
		return nil
	}
	return give(e.Uid, e.Gid)
}

func (t *Tree) setDirectoryTime(name string, at time.Time) {
	directory, err := t.open(name)
	if err != nil {
		return // a later entry of the layer took it away
	}
	defer unix.Close(directory)
	moment := timeOf(at)
	_ = unix.UtimesNanoAt(unix.AT_FDCWD, descriptorPath(directory), []unix.Timespec{moment, moment}, 0)
}

// mark remembers that the layer at hand made this name.
func (t *Tree) mark(parent int, name string) error {
	var at unix.Stat_t
	if err := unix.Fstat(parent, &at); err != nil {
		return err
	}
	t.made[place{uint64(at.Dev), at.Ino, name}] = struct{}{}
	return nil
}

// isMade says whether the layer at hand made this name.
func (t *Tree) isMade(parent int, name string) bool {
	var at unix.Stat_t
	if unix.Fstat(parent, &at) != nil {
		return false
	}
	_, found := t.made[place{uint64(at.Dev), at.Ino, name}]
	return found
}

// whiteout hides what lower layers brought, and leaves alone what this one did.
func (t *Tree) whiteout(e *entry) error {
	parent, err := t.open(e.directory)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(parent)
	if e.base == whiteoutOpaque {
		return empty(parent, t.isMade)
	}
	if strings.HasPrefix(e.base, whiteoutMeta) {
		return nil // aufs' own notes
	}
	name := strings.TrimPrefix(e.base, whiteoutPrefix)
	if err := remove(parent, name, t.isMade); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

func joined(e *entry) string {
	if e.directory == "" {
		return e.base
	}
	return e.directory + "/" + e.base
}

func modeOf(e *entry) uint32 { return uint32(e.Mode) & 0o7777 }

// timeOf keeps times that every file system can hold.
func timeOf(at time.Time) unix.Timespec {
	seconds := min(max(at.Unix(), 0), 1<<33)
	return unix.Timespec{Sec: seconds, Nsec: int64(at.Nanosecond())}
}

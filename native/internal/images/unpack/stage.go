package unpack

import (
	"archive/tar"
	"bufio"
	"context"
	"encoding/gob"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Staged is a layer that was read to its end and is what it should be, and of which nothing is in a tree yet: the content of its files
// under numbers, and a list of all its entries. So layers are unpacked side by side, though each stands on those below: what a name of a
// layer means, only Place asks, when the tree below is there.
type Staged struct {
	directory string
	files     int
	list      *os.File
}

// listed is an entry as the list has it; a file's content has the number Content, counted from 1.
type listed struct {
	Name, Directory, Base, Link, Linkname string
	Typeflag                              byte
	Mode                                  int64
	UID, GID                              int
	Time                                  time.Time
	Attributes                            map[string]string
	Content                               uint64
}

// Stage reads a layer into a directory, which it makes. After an error the directory is to be thrown away.
//
// Errors: as Tree.Apply, but for what only a tree can tell.
func Stage(ctx context.Context, layer Layer, meter *Meter, directory string) (*Staged, error) {
	if err := os.Mkdir(directory, 0o700); err != nil {
		return nil, failed(err, directory)
	}
	staged, err := openStaged(directory)
	if err != nil {
		return nil, failed(err, directory)
	}
	out := bufio.NewWriterSize(staged.list, 64<<10)
	w := &stager{scribe: newScribe(), into: staged.files, list: gob.NewEncoder(out), meter: meter}
	err = each(ctx, layer, meter, w.take)
	if err == nil {
		if err = out.Flush(); err != nil {
			err = failed(err, directory)
		}
	}
	if err != nil {
		staged.Close()
		return nil, err
	}
	return staged, nil
}

func openStaged(directory string) (*Staged, error) {
	files, err := unix.Open(directory, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	name := filepath.Join(directory, "list")
	list, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		unix.Close(files)
		return nil, err
	}
	return &Staged{directory: directory, files: files, list: list}, nil
}

// stager takes entries into a directory. Nothing here depends on a name that a layer gives.
type stager struct {
	scribe
	into  int
	count uint64
	list  *gob.Encoder
	meter *Meter
}

func (s *stager) take(e *entry, content io.Reader) error {
	if e.Typeflag == tar.TypeChar || e.Typeflag == tar.TypeBlock {
		return nil
	}
	one := listed{
		Name: e.Name, Directory: e.directory, Base: e.base, Link: e.link, Linkname: e.Linkname, Typeflag: e.Typeflag, Mode: e.Mode,
		UID: e.Uid, GID: e.Gid, Time: e.ModTime,
	}
	isWhiteout := strings.HasPrefix(e.base, whiteoutPrefix)
	if !isWhiteout && e.Typeflag == tar.TypeDir {
		one.Attributes = e.PAXRecords
	}
	if !isWhiteout && hasContent(e) {
		s.count++
		one.Content = s.count
		if err := s.write(s.into, numbered(s.count), e, content, s.meter); err != nil {
			return err
		}
	}
	return s.list.Encode(one)
}

func hasContent(e *entry) bool {
	switch e.Typeflag {
	case tar.TypeDir, tar.TypeSymlink, tar.TypeLink, tar.TypeFifo:
		return false
	}
	return true
}

func numbered(content uint64) string { return strconv.FormatUint(content, 36) }

// Place puts a staged layer on top of what is there, as Apply does. After an error the tree is to be thrown away.
//
// Errors: IMAGE_REFUSED, HOST_DISK_FULL.
func (t *Tree) Place(ctx context.Context, staged *Staged, meter *Meter) error {
	if _, err := staged.list.Seek(0, io.SeekStart); err != nil {
		return failed(err, staged.directory)
	}
	t.begin()
	read := gob.NewDecoder(bufio.NewReaderSize(staged.list, 64<<10))
	for {
		var one listed
		err := read.Decode(&one)
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return failed(err, staged.directory)
		}
		if err := t.take(one.entry(), filling{staged: staged, number: one.Content}, meter); err != nil {
			return failed(err, one.Name)
		}
	}
	t.end()
	return nil
}

func (l *listed) entry() *entry {
	header := &tar.Header{
		Name: l.Name, Linkname: l.Linkname, Typeflag: l.Typeflag, Mode: l.Mode, Uid: l.UID, Gid: l.GID, ModTime: l.Time,
		PAXRecords: l.Attributes,
	}
	return &entry{Header: header, directory: l.Directory, base: l.Base, link: l.Link}
}

// Close lets go of a staged layer. Its directory stays.
func (s *Staged) Close() error { return errors.Join(unix.Close(s.files), s.list.Close()) }

// Remove closes a staged layer and removes its directory.
func (s *Staged) Remove() error { return errors.Join(s.Close(), os.RemoveAll(s.directory)) }

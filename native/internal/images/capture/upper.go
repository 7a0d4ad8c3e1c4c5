package capture

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// redirect says that a directory's content is elsewhere below; an overlay that is mounted without the feature never writes it.
const redirect = "trusted.overlay.redirect"

// walker goes through an upper directory that nobody writes any more.
type walker struct {
	packer *packer
	root   string
	// linked is the first name of each file that has several.
	linked map[uint64]string
}

// FromUpper makes a layer of an overlay's upper directory.
func FromUpper(ctx context.Context, upper, target string, bytesMax int64) (*Packed, error) {
	p, err := newPacker(ctx, target, bytesMax)
	if err != nil {
		return nil, err
	}
	w := &walker{packer: p, root: upper, linked: make(map[uint64]string)}
	return p.finish(w.take("."))
}

// take adds a name and all below it.
func (w *walker) take(name string) error {
	if isLeftOut(name) {
		return nil
	}
	place := filepath.Join(w.root, name)
	var info unix.Stat_t
	if err := unix.Lstat(place, &info); err != nil {
		return fmt.Errorf("%.200q: %w", name, err)
	}
	header, err := w.header(name, place, &info)
	if err != nil || header == nil {
		return err
	}
	if header.Typeflag == tar.TypeReg && header.Size > 0 {
		return w.file(header, place)
	}
	if err := w.packer.add(header, nil); err != nil {
		return err
	}
	if header.Typeflag != tar.TypeDir {
		return nil
	}
	entries, err := os.ReadDir(place)
	if err != nil {
		return err
	}
	sort.Slice(entries, func(i, j int) bool { return entries[i].Name() < entries[j].Name() })
	for _, entry := range entries {
		if err := w.take(path.Join(name, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}

func (w *walker) file(header *tar.Header, place string) error {
	file, err := os.OpenFile(place, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	return w.packer.add(header, io.LimitReader(file, header.Size))
}

// header describes a name; nil for what no layer holds.
func (w *walker) header(name, place string, info *unix.Stat_t) (*tar.Header, error) {
	header := &tar.Header{
		Name: name, Mode: int64(info.Mode & 0o7777), Uid: int(info.Uid), Gid: int(info.Gid),
		ModTime: time.Unix(info.Mtim.Unix()),
	}
	var err error
	switch info.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		header.Typeflag = tar.TypeDir
	case unix.S_IFREG:
		header.Typeflag, header.Size = tar.TypeReg, info.Size
	case unix.S_IFLNK:
		header.Typeflag = tar.TypeSymlink
		header.Linkname, err = os.Readlink(place)
	case unix.S_IFIFO:
		header.Typeflag = tar.TypeFifo
	case unix.S_IFCHR:
		header.Typeflag = tar.TypeChar
		header.Devmajor, header.Devminor = int64(unix.Major(info.Rdev)), int64(unix.Minor(info.Rdev))
	default:
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if header.Typeflag != tar.TypeDir && header.Typeflag != tar.TypeChar && info.Nlink > 1 {
		if first, known := w.linked[info.Ino]; known {
			header.Typeflag, header.Linkname, header.Size = tar.TypeLink, first, 0
			return header, nil
		}
		w.linked[info.Ino] = name
	}
	header.PAXRecords, err = attributes(name, place)
	return header, err
}

// attributes reads a name's own extended attributes, as records of a tar.
func attributes(name, place string) (map[string]string, error) {
	size, err := unix.Llistxattr(place, nil)
	if errors.Is(err, unix.ENOTSUP) || (err == nil && size == 0) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	names := make([]byte, size)
	if size, err = unix.Llistxattr(place, names); err != nil {
		return nil, err
	}
	records := make(map[string]string)
	for one := range strings.SplitSeq(strings.TrimSuffix(string(names[:size]), "\x00"), "\x00") {
		if one == redirect {
			return nil, refuse("%.200q was moved by the overlay alone: mount it without redirect_dir", name)
		}
		value := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(place, one, value)
		if err != nil {
			return nil, err
		}
		records[attributeKey+one] = string(value[:n])
	}
	return records, nil
}

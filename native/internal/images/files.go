package images

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// files is a set of named files: a layout's directory, or an archive that is read where it lies.
type files interface {
	// open returns a file and its size. Errors: fs.ErrNotExist.
	open(name string) (io.ReadCloser, int64, error)
	close() error
}

// directory reads below one directory, and follows no link out of it.
type directory struct{ root int }

func openDirectory(root string) (*directory, error) {
	found, err := unix.Open(root, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return &directory{found}, nil
}

func (d *directory) open(name string) (io.ReadCloser, int64, error) {
	how := unix.OpenHow{Flags: unix.O_RDONLY | unix.O_NONBLOCK | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS}
	found, err := unix.Openat2(d.root, name, &how)
	if err != nil {
		return nil, 0, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	file := os.NewFile(uintptr(found), name)
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = &fs.PathError{Op: "open", Path: name, Err: errors.New("it is no regular file")}
	}
	if err != nil {
		file.Close()
		return nil, 0, err
	}
	return file, info.Size(), nil
}

func (d *directory) close() error { return unix.Close(d.root) }

const archiveEntriesMax = 10_000

// archive is an uncompressed tar, indexed once; its files are read where they lie.
type archive struct {
	file  *os.File
	parts map[string]part
	links map[string]string
}

type part struct{ at, size int64 }

func openArchive(name string) (*archive, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	read := &archive{file: file, parts: make(map[string]part), links: make(map[string]string)}
	if err := read.index(); err != nil {
		file.Close()
		return nil, err
	}
	return read, nil
}

func (a *archive) index() error {
	reader := tar.NewReader(a.file)
	for count := 0; ; count++ {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return failure(CodeCorrupt, err, "the archive is no whole, uncompressed tar")
		}
		if count >= archiveEntriesMax {
			return failure(CodeRefused, nil, "the archive has more than %d entries", archiveEntriesMax)
		}
		name := path.Clean(header.Name)
		switch header.Typeflag {
		case tar.TypeReg:
			// The reader has just read this file's header, so the content begins here.
			at, err := a.file.Seek(0, io.SeekCurrent)
			if err != nil {
				return failure(CodeInternal, err, "the archive cannot be read")
			}
			a.parts[name] = part{at, header.Size}
		case tar.TypeSymlink, tar.TypeLink:
			target := header.Linkname
			if header.Typeflag == tar.TypeSymlink {
				target = path.Join(path.Dir(name), target)
			}
			a.links[name] = path.Clean(target)
		}
	}
}

func (a *archive) open(name string) (io.ReadCloser, int64, error) {
	name = path.Clean(name)
	if target, found := a.links[name]; found {
		name = target
	}
	found, known := a.parts[name]
	if !known {
		return nil, 0, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return io.NopCloser(io.NewSectionReader(a.file, found.at, found.size)), found.size, nil
}

func (a *archive) close() error { return a.file.Close() }

// openFiles takes a directory or a tar.
func openFiles(name string) (files, error) {
	info, err := os.Stat(filepath.Clean(name))
	if err != nil {
		return nil, err
	}
	if info.IsDir() {
		return openDirectory(name)
	}
	return openArchive(name)
}

// readSmall reads a document of a set of files.
func readSmall(from files, name string) ([]byte, error) {
	file, size, err := from.open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	if size > documentBytesMax {
		return nil, failure(CodeRefused, nil, "%.120q has %d bytes, at most %d are allowed", name, size, documentBytesMax)
	}
	return io.ReadAll(file)
}

func blobName(digest string) string { return "blobs/" + strings.Replace(digest, ":", "/", 1) }

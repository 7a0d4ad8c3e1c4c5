package objects

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Folder keeps objects as files: `ROOT/KIND/sha256/HEX`; `ROOT/partial` holds what is being written.
type Folder struct{ root string }

// OpenFolder uses a directory; what it needs is made when it is first written.
func OpenFolder(root string) *Folder { return &Folder{root} }

// Put writes beside the place, and has all of it on the disk before it appears there.
func (f *Folder) Put(ctx context.Context, name Name, size int64, content io.Reader) error {
	if err := name.Check(); err != nil {
		return err
	}
	target, partial := filepath.Join(f.root, name.Path()), filepath.Join(f.root, "partial")
	for _, directory := range []string{partial, filepath.Dir(target)} {
		if err := os.MkdirAll(directory, 0o750); err != nil {
			return err
		}
	}
	file, err := os.CreateTemp(partial, "object-*")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if _, err := io.Copy(file, NewContextReader(ctx, verify(name, size, content))); err != nil {
		return err
	}
	if err := errors.Join(file.Chmod(0o640), file.Sync()); err != nil {
		return err
	}
	return os.Rename(file.Name(), target)
}

// Get reads a part of a file.
func (f *Folder) Get(_ context.Context, name Name, offset, length int64) (io.ReadCloser, error) {
	if err := name.Check(); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(filepath.Join(f.root, name.Path()), os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, missing(err)
	}
	if _, err := file.Seek(offset, io.SeekStart); err != nil {
		file.Close()
		return nil, err
	}
	if length < 0 {
		return file, nil
	}
	return &part{io.LimitReader(file, length), file}, nil
}

type part struct {
	io.Reader
	io.Closer
}

// Head looks at a file.
func (f *Folder) Head(_ context.Context, name Name) (Info, error) {
	if err := name.Check(); err != nil {
		return Info{}, err
	}
	info, err := os.Lstat(filepath.Join(f.root, name.Path()))
	if err != nil {
		return Info{}, missing(err)
	}
	if !info.Mode().IsRegular() {
		return Info{}, ErrMissing
	}
	return Info{name, info.Size()}, nil
}

// List reads a directory; what goes meanwhile is left out.
func (f *Folder) List(ctx context.Context, kind string, visit func(Info) error) error {
	entries, err := os.ReadDir(filepath.Join(f.root, kind, "sha256"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, entry := range entries {
		name, valid := named(kind, entry.Name())
		if !valid {
			continue
		}
		info, err := f.Head(ctx, name)
		if errors.Is(err, ErrMissing) {
			continue
		}
		if err != nil {
			return err
		}
		if err := visit(info); err != nil {
			return err
		}
	}
	return nil
}

// Delete removes a file.
func (f *Folder) Delete(_ context.Context, name Name) error {
	if err := name.Check(); err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(f.root, name.Path())); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// NewContextReader ends a copy when its context does.
func NewContextReader(ctx context.Context, from io.Reader) io.Reader {
	return &contextReader{ctx, from}
}

type contextReader struct {
	ctx  context.Context
	from io.Reader
}

func (r *contextReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.from.Read(p)
}

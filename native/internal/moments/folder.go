package moments

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Folder is the store where it is a folder of this machine's; for measuring, and for tests.
type Folder struct{ root string }

// OpenFolder uses a directory; what it needs is made when it is first written.
func OpenFolder(root string) *Folder { return &Folder{root} }

func (f *Folder) path(kind, digest string) string {
	return filepath.Join(f.root, kind, "sha256", strings.TrimPrefix(digest, "sha256:"))
}

// Manifest implements Remote.
func (f *Folder) Manifest(_ context.Context, digest string) ([]byte, error) {
	if !digestForm.MatchString(digest) {
		return nil, failure(CodeInvalid, nil, "%.80q is no SHA-256 digest", digest)
	}
	content, err := os.ReadFile(f.path("moments", digest))
	if err != nil {
		return nil, lost(err)
	}
	return content, nil
}

// Last implements Remote.
func (f *Folder) Last(ctx context.Context, of string) ([]byte, error) {
	digest, err := os.ReadFile(filepath.Join(f.root, "receipts", of))
	if err != nil {
		return nil, lost(err)
	}
	return f.Manifest(ctx, string(digest))
}

func lost(err error) error { return failure(CodeUnavailable, err, "it is not in the folder") }

// Pack implements Remote.
func (f *Folder) Pack(_ context.Context, _, pack string, offset, length int64) (io.ReadCloser, error) {
	file, err := os.Open(f.path("packs", pack))
	if err != nil {
		return nil, lost(err)
	}
	if _, err := file.Seek(offset, io.SeekStart); err != nil {
		file.Close()
		return nil, lost(err)
	}
	return struct {
		io.Reader
		io.Closer
	}{io.LimitReader(file, length), file}, nil
}

// Missing implements Remote.
func (f *Folder) Missing(_ context.Context, _ string, packs []string) ([]string, error) {
	var missing []string
	for _, pack := range packs {
		if _, err := os.Stat(f.path("packs", pack)); errors.Is(err, fs.ErrNotExist) {
			missing = append(missing, pack)
		}
	}
	return missing, nil
}

// PutPack implements Remote.
func (f *Folder) PutPack(_ context.Context, _, pack string, content []byte) error {
	if hashOf(content) != pack {
		return failure(CodeCorrupt, nil, "the content is not what its name says")
	}
	return f.write(f.path("packs", pack), content)
}

// PutManifest implements Remote.
func (f *Folder) PutManifest(ctx context.Context, of, digest string, _ []string, content []byte) error {
	m, err := Parse(digest, content)
	if err != nil {
		return err
	}
	for _, pack := range m.Packs {
		if missing, err := f.Missing(ctx, of, []string{pack.SHA256}); err != nil || len(missing) > 0 {
			return failure(CodeIncomplete, err, "pack %s is not there", pack.SHA256)
		}
	}
	if err := f.write(f.path("moments", digest), content); err != nil {
		return err
	}
	return f.write(filepath.Join(f.root, "receipts", of), []byte(digest))
}

// write has a file there whole or not at all, and on the disk.
func (f *Folder) write(target string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
		return diskFailure(err, "it cannot be kept")
	}
	file, err := os.CreateTemp(f.root, "object-*")
	if err != nil {
		return diskFailure(err, "it cannot be kept")
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if _, err := file.Write(content); err != nil {
		return diskFailure(err, "it cannot be kept")
	}
	if err := errors.Join(file.Sync(), os.Rename(file.Name(), target)); err != nil {
		return diskFailure(err, "it cannot be kept")
	}
	return nil
}

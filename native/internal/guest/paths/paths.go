// Package paths turns what a client wrote into an absolute path, and makes parent directories that belong to the user.
//
// Rules of the envd contract: an empty path is the default working directory, `~` and relative paths start at the
// user's home, absolute paths are taken as they are.
package paths

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"atoll.local/native/internal/guest/users"
)

// lengthMax is the kernel's PATH_MAX; anything longer cannot name a file.
const lengthMax = 4096

// Resolve returns the absolute, cleaned path that `path` means for this user.
func Resolve(path string, user *users.User, defaultWorkdir string) (string, error) {
	if path == "" {
		path = defaultWorkdir
	}
	if strings.IndexByte(path, 0) >= 0 {
		return "", errors.New("path contains a NUL byte")
	}
	if len(path) > lengthMax {
		return "", fmt.Errorf("path is longer than %d bytes", lengthMax)
	}
	if strings.HasPrefix(path, "~") {
		if len(path) > 1 && path[1] != '/' {
			return "", fmt.Errorf("failed to expand path '%s' for user '%s': cannot expand user-specific home dir", path, user.Name)
		}
		path = filepath.Join(user.Home, path[1:])
	}
	if !filepath.IsAbs(path) {
		path = filepath.Join(user.Home, path)
	}
	return filepath.Clean(path), nil
}

// NotDirectoryError says that a component on the way is a file.
type NotDirectoryError struct{ Path string }

func (e NotDirectoryError) Error() string { return "path is a file: " + e.Path }

// EnsureDirs makes dir and every missing parent; each level it makes belongs to uid:gid.
//
// Idempotency: existing directories are left as they are, also when somebody makes one at the same time.
func EnsureDirs(dir string, uid, gid int) error {
	info, err := os.Stat(dir)
	if err == nil {
		if !info.IsDir() {
			return NotDirectoryError{dir}
		}
		return nil
	}
	if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
		return fmt.Errorf("failed to stat directory: %w", err)
	}
	if parent := filepath.Dir(dir); parent != dir {
		if err := EnsureDirs(parent, uid, gid); err != nil {
			return err
		}
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		if errors.Is(err, os.ErrExist) {
			return checkDir(dir)
		}
		return fmt.Errorf("failed to create directory: %w", err)
	}
	if err := os.Lchown(dir, uid, gid); err != nil {
		return fmt.Errorf("failed to chown directory: %w", err)
	}
	return nil
}

// checkDir tells a directory made by somebody else just now from a dangling symlink or a file.
func checkDir(dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("failed to stat directory: %w", err)
	}
	if !info.IsDir() {
		return NotDirectoryError{dir}
	}
	return nil
}

package filesystem

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sort"

	"atoll.local/native/internal/guest/entry"
	"atoll.local/native/internal/guest/rpc"
)

// directoryMax bounds one directory: its names are sorted in memory.
const directoryMax = 100_000

type listRequest struct {
	Path  string     `json:"path"`
	Depth rpc.Uint32 `json:"depth"`
}

// listDir lists depth levels in sorted order, without following symlinked directories. The answer is written while
// walking: a tree of a million files costs no memory.
func (s *Service) listDir(w http.ResponseWriter, r *http.Request) {
	request := new(listRequest)
	if !rpc.ReadUnary(w, r, rpc.MessageBytesMax, request) {
		return
	}
	ctx, cancel, err := rpc.WithTimeout(r)
	if err != nil {
		rpc.WriteError(w, err)
		return
	}
	defer cancel()
	shown, _, err := s.located(r, request.Path)
	if err != nil {
		rpc.WriteError(w, err)
		return
	}
	var real string
	var names []string
	s.slots.Do(func() { real, names, err = openDirectory(shown) })
	if err != nil {
		rpc.WriteError(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	l := &lister{service: s, ctx: ctx, out: w}
	_, _ = io.WriteString(w, `{"entries":[`)
	if err := l.walk(real, shown, names, max(1, int(request.Depth))); err != nil {
		// The status is sent: only a broken answer says that it is not whole.
		panic(http.ErrAbortHandler)
	}
	_, _ = io.WriteString(w, "]}")
}

// openDirectory checks what was asked for and reads its names; the errors are the contract's.
func openDirectory(path string) (real string, names []string, err error) {
	real, err = filepath.EvalSymlinks(path)
	if isMissing(err) {
		return "", nil, rpc.Errorf(rpc.NotFound, "directory not found: %v", err)
	}
	if err != nil {
		// What the library finds on a path that exists otherwise is a loop of symlinks.
		return "", nil, rpc.Errorf(rpc.FailedPrecondition, "cyclic symlink or too many links at %q: %v", path, err)
	}
	info, err := os.Stat(real)
	if isMissing(err) {
		return "", nil, rpc.Errorf(rpc.NotFound, "directory not found: %v", err)
	}
	if err == nil && !info.IsDir() {
		return "", nil, rpc.Errorf(rpc.InvalidArgument, "path is not a directory: %s", path)
	}
	if err == nil {
		names, err = readNames(real)
	}
	if err != nil {
		return "", nil, diskError("error reading directory", err)
	}
	return real, names, nil
}

// readNames returns a directory's names in order.
func readNames(path string) ([]string, error) {
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(directoryMax + 1)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if len(names) > directoryMax {
		return nil, rpc.Errorf(rpc.ResourceExhausted, "directory %s has more than %d entries", path, directoryMax)
	}
	sort.Strings(names)
	return names, nil
}

type lister struct {
	service *Service
	ctx     context.Context
	out     io.Writer
	count   int
}

// walk writes the named entries of dir and what is below them; shown is dir's name as the client knows it.
func (l *lister) walk(dir, shown string, names []string, depth int) error {
	for _, name := range names {
		if err := l.ctx.Err(); err != nil {
			return err
		}
		path := filepath.Join(dir, name)
		var info *entry.Info
		var err error
		l.service.slots.Do(func() {
			info, err = entry.Describe(path, filepath.Join(shown, name), l.service.identity.Users)
		})
		if isMissing(err) {
			continue // it went while we looked
		}
		if err != nil {
			return err
		}
		if err := l.write(info); err != nil {
			return err
		}
		if depth <= 1 || info.Type != entry.TypeDirectory || info.IsSymlink {
			continue
		}
		var below []string
		l.service.slots.Do(func() { below, err = readNames(path) })
		if isMissing(err) {
			continue
		}
		if err != nil {
			return err
		}
		if err := l.walk(path, filepath.Join(shown, name), below, depth-1); err != nil {
			return err
		}
	}
	return nil
}

func (l *lister) write(info *entry.Info) error {
	body, err := rpc.Encode(info)
	if err != nil {
		return err
	}
	if l.count++; l.count > 1 {
		if _, err := io.WriteString(l.out, ","); err != nil {
			return err
		}
	}
	_, err = l.out.Write(body)
	return err
}

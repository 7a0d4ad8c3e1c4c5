// Package filesystem is the envd service filesystem.Filesystem: look at, list, make, move, remove and watch files.
//
// Read filesystem.go (the calls on single files), list.go (directories), move.go, then watching.go.
package filesystem

import (
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"syscall"

	"atoll.local/native/internal/guest/entry"
	"atoll.local/native/internal/guest/identity"
	"atoll.local/native/internal/guest/paths"
	"atoll.local/native/internal/guest/rpc"
	"atoll.local/native/internal/guest/threads"
	"atoll.local/native/internal/guest/users"
)

// Service answers for the guest's files.
type Service struct {
	identity *identity.Identity
	slots    threads.Slots
	watchers *watchers
}

// NewService acts as the users that who tells, and waits for disks in slots.
func NewService(who *identity.Identity, slots threads.Slots) *Service {
	return &Service{identity: who, slots: slots, watchers: newWatchers()}
}

// Routes returns the handlers of filesystem.Filesystem by method name.
func (s *Service) Routes() map[string]http.HandlerFunc {
	return map[string]http.HandlerFunc{
		"Stat":             inSlot(s, s.stat),
		"MakeDir":          inSlot(s, s.makeDir),
		"Move":             inSlot(s, s.move),
		"ListDir":          s.listDir,
		"Remove":           inSlot(s, s.remove),
		"WatchDir":         s.watchDir,
		"CreateWatcher":    inSlot(s, s.createWatcher),
		"GetWatcherEvents": inSlot(s, s.getWatcherEvents),
		"RemoveWatcher":    inSlot(s, s.removeWatcher),
	}
}

// inSlot makes the handler of a call that works on the disk.
func inSlot[Req, Resp any](s *Service, call func(context.Context, *http.Request, *Req) (*Resp, error)) http.HandlerFunc {
	return rpc.Unary(rpc.MessageBytesMax, func(ctx context.Context, r *http.Request, request *Req) (answer *Resp, err error) {
		s.slots.Do(func() { answer, err = call(ctx, r, request) })
		return answer, err
	})
}

// Close ends all watchers.
func (s *Service) Close() { s.watchers.closeAll() }

type pathRequest struct {
	Path string `json:"path"`
}

type entryResponse struct {
	Entry *entry.Info `json:"entry"`
}

type empty struct{}

// located is a request's path with the user that it was resolved for.
func (s *Service) located(r *http.Request, path string) (string, *users.User, error) {
	user, err := s.identity.Caller(r)
	if err != nil {
		return "", nil, err
	}
	resolved, err := paths.Resolve(path, user, s.identity.Settings.Current().DefaultWorkdir)
	if err != nil {
		return "", nil, rpc.Errorf(rpc.InvalidArgument, "%v", err)
	}
	return resolved, user, nil
}

// isMissing says whether nothing is at the path; below a file there is nothing either.
func isMissing(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}

// diskError gives a failure its code.
func diskError(context string, err error) error {
	var notDir paths.NotDirectoryError
	var worded *rpc.Error
	switch {
	case errors.As(err, &worded):
		return worded
	case paths.IsNoSpace(err):
		return rpc.Errorf(rpc.ResourceExhausted, "%s: not enough disk space available", context)
	case errors.As(err, &notDir), errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.EINVAL):
		return rpc.Errorf(rpc.InvalidArgument, "%s: %v", context, err)
	}
	return rpc.Errorf(rpc.Internal, "%s: %v", context, err)
}

func (s *Service) describe(path string) (*entryResponse, error) {
	info, err := entry.Describe(path, path, s.identity.Users)
	if isMissing(err) {
		return nil, rpc.Errorf(rpc.NotFound, "file not found: %v", err)
	}
	if err != nil {
		return nil, diskError("error getting file info", err)
	}
	return &entryResponse{info}, nil
}

func (s *Service) stat(_ context.Context, r *http.Request, request *pathRequest) (*entryResponse, error) {
	path, _, err := s.located(r, request.Path)
	if err != nil {
		return nil, err
	}
	return s.describe(path)
}

func (s *Service) makeDir(_ context.Context, r *http.Request, request *pathRequest) (*entryResponse, error) {
	path, user, err := s.located(r, request.Path)
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	switch {
	case err == nil && info.IsDir():
		return nil, rpc.Errorf(rpc.AlreadyExists, "directory already exists: %s", path)
	case err == nil:
		return nil, rpc.Errorf(rpc.InvalidArgument, "path already exists but it is not a directory: %s", path)
	}
	if err := paths.EnsureDirs(path, user.UID, user.GID); err != nil {
		return nil, diskError("error creating directory", err)
	}
	return s.describe(path)
}

func (s *Service) remove(_ context.Context, r *http.Request, request *pathRequest) (*empty, error) {
	path, _, err := s.located(r, request.Path)
	if err != nil {
		return nil, err
	}
	if err := os.RemoveAll(path); err != nil {
		return nil, diskError("error removing file or directory", err)
	}
	return &empty{}, nil
}

type moveRequest struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
}

func (s *Service) move(_ context.Context, r *http.Request, request *moveRequest) (*entryResponse, error) {
	source, user, err := s.located(r, request.Source)
	if err != nil {
		return nil, err
	}
	destination, _, err := s.located(r, request.Destination)
	if err != nil {
		return nil, err
	}
	if _, err := os.Lstat(source); isMissing(err) {
		return nil, rpc.Errorf(rpc.NotFound, "source file not found: %v", err)
	}
	if err := paths.EnsureDirs(filepath.Dir(destination), user.UID, user.GID); err != nil {
		return nil, diskError("error creating directory", err)
	}
	err = os.Rename(source, destination)
	if errors.Is(err, syscall.EXDEV) {
		err = moveAcross(source, destination)
	}
	if isMissing(err) {
		return nil, rpc.Errorf(rpc.NotFound, "source file not found: %v", err)
	}
	if err != nil {
		return nil, diskError("error renaming", err)
	}
	return s.describe(destination)
}

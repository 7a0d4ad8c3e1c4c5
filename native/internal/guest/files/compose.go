package files

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"

	"atoll.local/native/internal/guest/answer"
)

const (
	composeBytesMax   = 4 << 20
	composeSourcesMax = 10_000
	composeSuffix     = ".atoll-compose"
)

type composeRequest struct {
	Sources     []string `json:"source_paths"`
	Destination string   `json:"destination"`
	Username    string   `json:"username"`
}

// Compose serves POST /files/compose: it joins files into one and removes the parts.
func (f *Files) Compose(w http.ResponseWriter, r *http.Request) {
	request := new(composeRequest)
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, composeBytesMax))
	if err := decoder.Decode(request); err != nil {
		answer.Error(w, http.StatusBadRequest, "invalid request body: %v", err)
		return
	}
	var one *written
	var err error
	f.slots.Do(func() { one, err = f.compose(request) })
	if err != nil {
		respond(w, err)
		return
	}
	answer.JSON(w, http.StatusOK, one)
}

func (f *Files) compose(request *composeRequest) (*written, error) {
	switch {
	case len(request.Sources) == 0:
		return nil, failf(http.StatusBadRequest, "source_paths must not be empty")
	case len(request.Sources) > composeSourcesMax:
		return nil, failf(http.StatusBadRequest, "more than %d source_paths", composeSourcesMax)
	case request.Destination == "":
		return nil, failf(http.StatusBadRequest, "destination is required")
	}
	who, err := f.as(request.Username, f.identity.Settings.Current())
	if err != nil {
		return nil, err
	}
	destination, err := who.resolve(request.Destination)
	if err != nil {
		return nil, err
	}
	sources, err := checkSources(request.Sources, destination, who)
	if err != nil {
		return nil, err
	}
	if info, err := os.Stat(destination); err == nil && info.IsDir() {
		return nil, failf(http.StatusBadRequest, "path is a directory: %s", destination)
	}
	if err := ensureParents(destination, who); err != nil {
		return nil, err
	}
	// A temporary file beside the destination: a failure half-way leaves the old content alone.
	temporary := destination + "." + rand.Text()[:8] + composeSuffix
	if err := join(temporary, sources, who); err != nil {
		_ = os.Remove(temporary)
		return nil, err
	}
	if err := os.Rename(temporary, destination); err != nil {
		_ = os.Remove(temporary)
		return nil, diskError("error finalizing compose", err)
	}
	for _, source := range sources {
		_ = os.Remove(source)
	}
	return &written{Path: destination, Name: filepath.Base(destination), Type: "file"}, nil
}

func checkSources(names []string, destination string, who *access) ([]string, error) {
	sources := make([]string, 0, len(names))
	for _, name := range names {
		source, err := who.resolve(name)
		if err != nil {
			return nil, err
		}
		if source == destination {
			return nil, failf(http.StatusBadRequest, "source path %q cannot be the same as destination", name)
		}
		info, err := os.Stat(source)
		if err != nil {
			return nil, failf(http.StatusNotFound, "source file not found: %s", name)
		}
		if !info.Mode().IsRegular() {
			return nil, failf(http.StatusBadRequest, "source path is not a regular file: %s", name)
		}
		sources = append(sources, source)
	}
	return sources, nil
}

// join writes all sources, in order, to a new file that belongs to the user.
func join(target string, sources []string, who *access) (err error) {
	file, err := os.OpenFile(target, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return diskError("error creating destination file", err)
	}
	defer func() {
		if closeErr := file.Close(); err == nil && closeErr != nil {
			err = diskError("error closing destination file", closeErr)
		}
	}()
	if err := file.Chown(who.user.UID, who.user.GID); err != nil {
		return diskError("error changing file ownership", err)
	}
	for _, source := range sources {
		if err := appendFile(file, source); err != nil {
			return err
		}
	}
	return nil
}

// appendFile copies inside the kernel where it can (copy_file_range).
func appendFile(to *os.File, source string) error {
	from, _, err := openRegular(source)
	var f *failure
	if errors.As(err, &f) && f.status == http.StatusNotFound {
		return failf(http.StatusNotFound, "source file not found: %s", source)
	}
	if err != nil {
		return err
	}
	defer from.Close()
	if _, err := io.Copy(to, from); err != nil {
		return diskError("error composing source "+source, err)
	}
	return nil
}

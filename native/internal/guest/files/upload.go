package files

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"atoll.local/native/internal/guest/answer"
	"atoll.local/native/internal/guest/entry"
	"atoll.local/native/internal/guest/paths"
)

// partsMax bounds the files of one multipart upload.
const partsMax = 10_000

// written is one file of an upload's answer.
type written struct {
	Path     string            `json:"path"`
	Name     string            `json:"name"`
	Type     string            `json:"type"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// Upload serves POST /files.
func (f *Files) Upload(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	who, err := f.admit(r, query, operationWrite)
	if err != nil {
		respond(w, err)
		return
	}
	control := http.NewResponseController(w)
	defer func() { _ = control.SetReadDeadline(time.Time{}) }()
	body := &patientReader{from: r.Body, control: control, idle: f.idle}
	all, err := receive(r, query, who, body)
	if err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = failf(http.StatusRequestTimeout, "the upload brought nothing for %s", f.idle)
		}
		respond(w, err)
		return
	}
	answer.JSON(w, http.StatusOK, all)
}

// receive writes the files that the body holds, in either of its two forms.
func receive(r *http.Request, query url.Values, who *access, body io.Reader) ([]written, error) {
	metadata, err := entry.ParseMetadata(r.Header)
	if err != nil {
		return nil, failf(http.StatusBadRequest, "invalid metadata: %v", err)
	}
	encoding, err := contentEncoding(r.Header.Get("Content-Encoding"))
	if err != nil {
		return nil, failf(http.StatusBadRequest, "error decompressing request body: %v", err)
	}
	if encoding == gzipEncoding {
		unpacked, err := gzip.NewReader(body)
		if err != nil {
			return nil, failf(http.StatusBadRequest, "error decompressing request body: %v", err)
		}
		defer unpacked.Close()
		body = unpacked
	}
	contentType := r.Header.Get("Content-Type")
	media, parameters, err := mime.ParseMediaType(contentType)
	switch {
	case err == nil && media == "application/octet-stream":
		return receiveRaw(query, who, metadata, body)
	case err == nil && media == "multipart/form-data":
		return receiveForm(query, who, metadata, multipart.NewReader(body, parameters["boundary"]))
	}
	return nil, failf(http.StatusBadRequest,
		"unsupported content type: %s, expected multipart/form-data or application/octet-stream", contentType)
}

func receiveRaw(query url.Values, who *access, metadata map[string]string, body io.Reader) ([]written, error) {
	if !query.Has("path") {
		return nil, failf(http.StatusBadRequest, "path query parameter is required for raw body upload")
	}
	path, err := who.resolve(query.Get("path"))
	if err != nil {
		return nil, err
	}
	one, err := store(path, who, metadata, body)
	if err != nil {
		return nil, err
	}
	return []written{*one}, nil
}

func receiveForm(query url.Values, who *access, metadata map[string]string, form *multipart.Reader) ([]written, error) {
	all := []written{}
	seen := map[string]bool{}
	for count := 0; ; count++ {
		part, err := form.NextPart()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil, err
		}
		if err != nil {
			return nil, failf(http.StatusBadRequest, "error reading form: %v", err)
		}
		if count >= partsMax {
			return nil, failf(http.StatusBadRequest, "more than %d parts in one upload request", partsMax)
		}
		if part.FormName() != "file" {
			continue
		}
		name := query.Get("path")
		if !query.Has("path") {
			if name, err = fullFileName(part.Header.Get("Content-Disposition")); err != nil {
				return nil, failf(http.StatusBadRequest, "%v", err)
			}
		}
		path, err := who.resolve(name)
		if err != nil {
			return nil, err
		}
		if seen[path] {
			return nil, failf(http.StatusBadRequest,
				"you cannot upload multiple files to the same path '%s' in one upload request, only the first specified file was uploaded", path)
		}
		seen[path] = true
		one, err := store(path, who, metadata, part)
		if err != nil {
			return nil, err
		}
		all = append(all, *one)
	}
}

// fullFileName returns the file name of a part with its directories, which the standard library cuts off.
func fullFileName(disposition string) (string, error) {
	_, parameters, err := mime.ParseMediaType(disposition)
	if err != nil {
		return "", fmt.Errorf("error parsing Content-Disposition: %w", err)
	}
	name := parameters["filename"]
	if name == "" {
		return "", errors.New("filename is missing in the multipart part and no path is given")
	}
	return name, nil
}

// store writes one file and gives it to the user. For whoever watches, a new small file is exactly create, chmod (the
// change of owner) and write.
func store(path string, who *access, metadata map[string]string, body io.Reader) (*written, error) {
	if err := ensureParents(path, who); err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	existed := err == nil
	switch {
	case existed && info.IsDir():
		return nil, failf(http.StatusBadRequest, "path is a directory: %s", path)
	case existed && !info.Mode().IsRegular():
		return nil, failf(http.StatusBadRequest, "path is not a regular file: %s", path)
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NONBLOCK, 0o666)
	if err != nil {
		return nil, diskError("error opening file", err)
	}
	err = fill(file, path, who, metadata, body)
	if closeErr := file.Close(); err == nil && closeErr != nil {
		err = diskError("error writing file", closeErr)
	}
	if err != nil {
		if !existed {
			// Half a file helps nobody, and on a full disk its space is what is missing.
			_ = os.Remove(path)
		}
		return nil, err
	}
	return &written{Path: path, Name: filepath.Base(path), Type: "file", Metadata: metadata}, nil
}

func fill(file *os.File, path string, who *access, metadata map[string]string, body io.Reader) error {
	if err := file.Chown(who.user.UID, who.user.GID); err != nil {
		return diskError("error changing file ownership", err)
	}
	if _, err := io.Copy(file, body); err != nil {
		var pathErr *os.PathError
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return err
		case errors.As(err, &pathErr):
			return diskError("error writing file", err)
		}
		return failf(http.StatusBadRequest, "error reading the upload: %v", err)
	}
	if err := entry.ReplaceMetadata(path, metadata); err != nil {
		return diskError("error writing file metadata", err)
	}
	return nil
}

// ensureParents makes the directories above path.
func ensureParents(path string, who *access) error {
	err := paths.EnsureDirs(filepath.Dir(path), who.user.UID, who.user.GID)
	var notDir paths.NotDirectoryError
	if errors.As(err, &notDir) {
		return failf(http.StatusBadRequest, "error ensuring directories: %v", err)
	}
	if err != nil {
		return diskError("error ensuring directories", err)
	}
	return nil
}

// patientReader gives the client a new deadline with each read, so that a slow upload lives and a dead one does not.
type patientReader struct {
	from    io.Reader
	control *http.ResponseController
	idle    time.Duration
	renewed time.Time
}

func (p *patientReader) Read(into []byte) (int, error) {
	// Setting a deadline is a lock and a timer; once in a while is enough.
	if now := time.Now(); now.Sub(p.renewed) > p.idle/16 {
		p.renewed = now
		_ = p.control.SetReadDeadline(now.Add(p.idle + p.idle/16))
	}
	return p.from.Read(into)
}

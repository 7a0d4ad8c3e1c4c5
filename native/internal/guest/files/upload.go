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
	"atoll.local/native/internal/guest/threads"
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
	all, err := f.receive(r, query, who, body)
	if err != nil {
		drain(body)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = failf(http.StatusRequestTimeout, "the upload brought nothing for %s", f.idle)
		}
		respond(w, err)
		return
	}
	answer.JSON(w, http.StatusOK, all)
}

// drainBytesMax bounds what is read for nothing after a failure.
const drainBytesMax = 1 << 30

// drain reads what the client still sends: most clients write their request to its end before they look at the answer,
// and would see a reset connection instead of, say, the full disk.
func drain(body io.Reader) { _, _ = io.Copy(io.Discard, io.LimitReader(body, drainBytesMax)) }

// receive writes the files that the body holds, in either of its two forms.
func (f *Files) receive(r *http.Request, query url.Values, who *access, body io.Reader) ([]written, error) {
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
		return f.receiveRaw(query, who, metadata, body)
	case err == nil && media == "multipart/form-data" && parameters["boundary"] == "":
		return nil, failf(http.StatusBadRequest, "error parsing multipart form: no boundary in Content-Type")
	case err == nil && media == "multipart/form-data":
		return f.receiveForm(query, who, metadata, multipart.NewReader(body, parameters["boundary"]))
	}
	return nil, failf(http.StatusBadRequest,
		"unsupported content type: %s, expected multipart/form-data or application/octet-stream", contentType)
}

func (f *Files) receiveRaw(query url.Values, who *access, metadata map[string]string, body io.Reader) ([]written, error) {
	if !query.Has("path") {
		return nil, failf(http.StatusBadRequest, "path query parameter is required for raw body upload")
	}
	path, err := who.resolve(query.Get("path"))
	if err != nil {
		return nil, err
	}
	one, err := f.store(path, who, metadata, body)
	if err != nil {
		return nil, err
	}
	return []written{*one}, nil
}

func (f *Files) receiveForm(query url.Values, who *access, metadata map[string]string, form *multipart.Reader) ([]written, error) {
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
		one, err := f.store(path, who, metadata, part)
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
func (f *Files) store(path string, who *access, metadata map[string]string, body io.Reader) (*written, error) {
	var file *os.File
	var created bool
	var err error
	f.slots.Do(func() { file, created, err = open(path, who) })
	if err != nil {
		return nil, err
	}
	_, err = io.Copy(&slotWriter{file, f.slots}, body)
	err = copyError(err)
	f.slots.Do(func() {
		if err == nil {
			if failed := entry.ReplaceMetadata(path, metadata); failed != nil {
				err = diskError("error writing file metadata", failed)
			}
		}
		if failed := file.Close(); err == nil && failed != nil {
			err = diskError("error writing file", failed)
		}
		if err != nil && created {
			// Half a file helps nobody, and on a full disk its space is what is missing.
			_ = os.Remove(path)
		}
	})
	if err != nil {
		return nil, err
	}
	return &written{Path: path, Name: filepath.Base(path), Type: "file", Metadata: metadata}, nil
}

// open makes or empties the file, with its parents, and gives it to the user.
func open(path string, who *access) (file *os.File, created bool, err error) {
	if err := ensureParents(path, who); err != nil {
		return nil, false, err
	}
	info, err := os.Stat(path)
	created = err != nil
	switch {
	case !created && info.IsDir():
		return nil, false, failf(http.StatusBadRequest, "path is a directory: %s", path)
	case !created && !info.Mode().IsRegular():
		return nil, false, failf(http.StatusBadRequest, "path is not a regular file: %s", path)
	}
	file, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NONBLOCK, 0o666)
	if err != nil {
		return nil, false, diskError("error opening file", err)
	}
	if err := file.Chown(who.user.UID, who.user.GID); err != nil {
		_ = file.Close()
		return nil, false, diskError("error changing file ownership", err)
	}
	return file, created, nil
}

// copyError tells a disk that did not take the bytes from a client that did not send them.
func copyError(err error) error {
	var onDisk *os.PathError
	switch {
	case err == nil, errors.Is(err, os.ErrDeadlineExceeded):
		return err
	case errors.As(err, &onDisk):
		return diskError("error writing file", err)
	}
	return failf(http.StatusBadRequest, "error reading the upload: %v", err)
}

// slotWriter writes to the disk in a slot, chunk by chunk: the network is waited for outside of it.
type slotWriter struct {
	file  *os.File
	slots threads.Slots
}

func (w *slotWriter) Write(chunk []byte) (n int, err error) {
	w.slots.Do(func() { n, err = w.file.Write(chunk) })
	return n, err
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

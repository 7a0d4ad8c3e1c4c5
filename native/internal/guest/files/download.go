package files

import (
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"atoll.local/native/internal/guest/answer"
)

// Download serves GET /files.
func (f *Files) Download(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	who, err := f.admit(r, query, operationRead)
	if err != nil {
		respond(w, err)
		return
	}
	path, err := who.resolve(query.Get("path"))
	if err != nil {
		respond(w, err)
		return
	}
	var file *os.File
	var info os.FileInfo
	f.slots.Do(func() { file, info, err = openRegular(path) })
	if err != nil {
		respond(w, err)
		return
	}
	defer file.Close()
	encoding, err := acceptedEncoding(r.Header.Get("Accept-Encoding"))
	if err != nil {
		answer.Error(w, http.StatusNotAcceptable, "%v", err)
		return
	}
	w.Header().Set("Vary", "Accept-Encoding")
	w.Header().Set("Content-Type", contentType(path))
	switch {
	case encoding == gzipEncoding && !isPartial(r.Header):
		compress(w, file)
	case info.Size() == 0:
		// Files under /proc say that they are empty and are not.
		_, _ = io.Copy(w, file)
	default:
		http.ServeContent(w, r, path, info.ModTime(), file)
	}
}

// openRegular opens a file for reading; it never waits, as opening a FIFO would.
func openRegular(path string) (*os.File, os.FileInfo, error) {
	info, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil, nil, failf(http.StatusNotFound, "path '%s' does not exist", path)
	}
	if err != nil {
		return nil, nil, failf(http.StatusInternalServerError, "error checking if path exists '%s': %v", path, err)
	}
	if info.IsDir() {
		return nil, nil, failf(http.StatusBadRequest, "path '%s' is a directory", path)
	}
	if !info.Mode().IsRegular() {
		return nil, nil, failf(http.StatusBadRequest, "path '%s' is not a regular file", path)
	}
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, failf(http.StatusInternalServerError, "error opening file '%s': %v", path, err)
	}
	// The file may have been exchanged in between; what is open now is what counts.
	if info, err = file.Stat(); err != nil || !info.Mode().IsRegular() {
		_ = file.Close()
		return nil, nil, failf(http.StatusBadRequest, "path '%s' is not a regular file", path)
	}
	return file, info, nil
}

// isPartial says whether the request is for a range or conditional; those are answered in identity.
func isPartial(h http.Header) bool {
	for _, name := range []string{"Range", "If-Modified-Since", "If-None-Match", "If-Range"} {
		if h.Get(name) != "" {
			return true
		}
	}
	return false
}

// A compressor holds several hundred KiB, so it is used again. Speed, not size: the link is usually the same machine.
var compressors = sync.Pool{New: func() any {
	c, _ := gzip.NewWriterLevel(io.Discard, gzip.BestSpeed)
	return c
}}

func compress(w http.ResponseWriter, from io.Reader) {
	w.Header().Set("Content-Encoding", gzipEncoding)
	compressor := compressors.Get().(*gzip.Writer)
	compressor.Reset(w)
	_, err := io.Copy(compressor, from)
	if err == nil {
		err = compressor.Close()
	}
	compressor.Reset(io.Discard)
	compressors.Put(compressor)
	if err != nil {
		// The status is sent. Only a broken connection tells the client that this is not the whole file.
		panic(http.ErrAbortHandler)
	}
}

// contentTypes are the few that a browser needs. The system's own table would be read from the sandbox's disk.
var contentTypes = map[string]string{
	".css": "text/css; charset=utf-8", ".csv": "text/csv; charset=utf-8", ".gif": "image/gif",
	".htm": "text/html; charset=utf-8", ".html": "text/html; charset=utf-8", ".jpeg": "image/jpeg", ".jpg": "image/jpeg",
	".js": "text/javascript; charset=utf-8", ".json": "application/json", ".md": "text/markdown; charset=utf-8",
	".mjs": "text/javascript; charset=utf-8", ".mp3": "audio/mpeg", ".mp4": "video/mp4", ".pdf": "application/pdf",
	".png": "image/png", ".svg": "image/svg+xml", ".txt": "text/plain; charset=utf-8", ".wasm": "application/wasm",
	".webm": "video/webm", ".webp": "image/webp", ".xml": "text/xml; charset=utf-8",
}

func contentType(path string) string {
	if known, ok := contentTypes[strings.ToLower(filepath.Ext(path))]; ok {
		return known
	}
	return "application/octet-stream"
}

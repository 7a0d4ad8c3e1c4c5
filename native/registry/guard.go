package main

import (
	"bytes"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/distribution/distribution/v3/registry/auth"
)

// manifestMax is the engine's own limit.
const manifestMax = 4 << 20

var (
	blobPath   = regexp.MustCompile(`^/v2/(.+)/blobs/(sha256:[0-9a-f]{64})$`)
	uploadPath = regexp.MustCompile(`^/v2/(.+)/blobs/uploads/`)
	// What is not of a repository is not uploaded to.
	repositoryPath = regexp.MustCompile(`^/v2/(.+)/(?:blobs/uploads/[^/]*|blobs/[^/]+|manifests/[^/]+|tags/list|referrers/[^/]+)$`)
	manifestPath   = regexp.MustCompile(`^/v2/(.+)/manifests/[^/]+$`)
	digestText     = regexp.MustCompile(`sha256:[0-9a-f]{64}`)
)

// touches mark what a client has begun to count on: the times of files say when, and outlive this process. A file is never
// touched while it is judged and removed.
type touches struct {
	root string
	gate sync.RWMutex
}

func (t *touches) base() string { return filepath.Join(t.root, "docker", "registry", "v2") }

func (t *touches) touch(repository string, digests ...string) {
	t.gate.RLock()
	defer t.gate.RUnlock()
	now := time.Now()
	for _, digest := range digests {
		hex, ok := strings.CutPrefix(digest, "sha256:")
		if !ok || len(hex) != 64 || strings.Contains(hex, "/") || strings.Contains(repository, "..") {
			continue
		}
		// What is not there yet has the time of its making.
		_ = os.Chtimes(filepath.Join(t.base(), "blobs", "sha256", hex[:2], hex, "data"), now, now)
		_ = os.Chtimes(filepath.Join(t.base(), "repositories", repository, "_layers", "sha256", hex, "link"), now, now)
	}
}

// guard stands before the engine.
type guard struct {
	next    http.Handler
	config  Config
	touched *touches
	uploads chan struct{}
	// allowed says whether a request's token permits an action with a repository.
	allowed func(r *http.Request, repository, action string) bool
}

func newGuard(next http.Handler, config Config, touched *touches, allowed func(*http.Request, string, string) bool) *guard {
	return &guard{next: next, config: config, touched: touched, uploads: make(chan struct{}, config.UploadsMax), allowed: allowed}
}

// byToken asks as the engine does, with the same settings.
func byToken(controller auth.AccessController) func(*http.Request, string, string) bool {
	return func(r *http.Request, repository, action string) bool {
		_, err := controller.Authorized(r, auth.Access{Resource: auth.Resource{Type: "repository", Name: repository}, Action: action})
		return err == nil
	}
}

// stranger says that the engine will refuse a request for its token: that takes no place among the uploads, and marks nothing.
func (g *guard) stranger(r *http.Request) bool {
	found := repositoryPath.FindStringSubmatch(r.URL.Path)
	if found == nil {
		return true
	}
	action := "push"
	switch r.Method {
	case http.MethodGet, http.MethodHead:
		action = "pull"
	case http.MethodDelete:
		action = "delete"
	}
	return !g.allowed(r, found[1], action)
}

func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Path
	if g.stranger(r) {
		g.next.ServeHTTP(w, r)
		return
	}
	if r.Method == http.MethodPost || r.Method == http.MethodPut || r.Method == http.MethodPatch {
		select {
		case g.uploads <- struct{}{}:
			defer func() { <-g.uploads }()
		default:
			w.Header().Set("Retry-After", "1")
			refuse(w, http.StatusTooManyRequests, "TOOMANYREQUESTS", "too many uploads at once")
			return
		}
		if !g.room(w, r) {
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, g.config.UploadMax)
	}
	switch {
	case r.Method == http.MethodPut && manifestPath.MatchString(path):
		g.manifest(w, r, manifestPath.FindStringSubmatch(path)[1])
	case uploadPath.MatchString(path):
		repository := uploadPath.FindStringSubmatch(path)[1]
		query := r.URL.Query()
		meant := []string{query.Get("digest"), query.Get("mount")}
		g.touched.touch(repository, meant...)
		if from := query.Get("from"); from != "" && g.allowed(r, from, "pull") {
			g.touched.touch(from, meant...)
		}
		g.next.ServeHTTP(w, r)
		g.touched.touch(repository, meant...)
	case blobPath.MatchString(path) && r.Method == http.MethodHead:
		// A client that is told that a blob is there does not send it.
		found := blobPath.FindStringSubmatch(path)
		g.touched.touch(found[1], found[2])
		g.next.ServeHTTP(w, r)
	default:
		g.next.ServeHTTP(w, r)
	}
}

// manifest has everything that a manifest names counted on before the engine looks whether it is there.
func (g *guard) manifest(w http.ResponseWriter, r *http.Request, repository string) {
	body, err := io.ReadAll(io.LimitReader(r.Body, manifestMax+1))
	if err != nil {
		refuse(w, http.StatusBadRequest, "MANIFEST_INVALID", "the manifest broke off")
		return
	}
	if len(body) > manifestMax {
		refuse(w, http.StatusRequestEntityTooLarge, "MANIFEST_INVALID", "a manifest has at most 4 MiB")
		return
	}
	g.touched.touch(repository, digestText.FindAllString(string(body), -1)...)
	r.Body = io.NopCloser(bytes.NewReader(body))
	g.next.ServeHTTP(w, r)
	g.touched.touch(repository, w.Header().Get("Docker-Content-Digest"))
}

// room refuses what the disk would not hold, before a byte of it is taken.
func (g *guard) room(w http.ResponseWriter, r *http.Request) bool {
	if r.ContentLength > g.config.UploadMax {
		refuse(w, http.StatusRequestEntityTooLarge, "SIZE_INVALID", "the upload is larger than this registry takes")
		return false
	}
	var disk syscall.Statfs_t
	if err := syscall.Statfs(g.config.Root, &disk); err != nil {
		return true
	}
	if int64(disk.Bavail)*disk.Bsize-max(r.ContentLength, 0) < g.config.SpareBytes {
		refuse(w, http.StatusInsufficientStorage, "UNAVAILABLE", "the registry's disk is full: an operator can collect what nothing refers to (atoll registry gc)")
		return false
	}
	return true
}

func refuse(w http.ResponseWriter, status int, code, message string) {
	answer(w, status, map[string]any{"errors": []map[string]string{{"code": code, "message": message}}})
}

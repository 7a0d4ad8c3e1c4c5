package main

import (
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/distribution/distribution/v3/registry/auth"
	"github.com/opencontainers/go-digest"
)

var (
	blobPath   = regexp.MustCompile(`^/v2/(.+)/blobs/(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})$`)
	uploadPath = regexp.MustCompile(`^/v2/(.+)/blobs/uploads/`)
	// What is not of a repository is not uploaded to.
	repositoryPath = regexp.MustCompile(`^/v2/(.+)/(?:blobs/uploads/[^/]*|blobs/[^/]+|manifests/[^/]+|tags/list|referrers/[^/]+)$`)
	manifestPath   = regexp.MustCompile(`^/v2/(.+)/manifests/([^/]+)$`)
	referrersPath  = regexp.MustCompile(`^/v2/(.+)/referrers/([^/]+)$`)
	digestText     = regexp.MustCompile(`sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}`)
)

// touches mark what a client has begun to count on: the times of files say when, and outlive this process. A file is never
// touched while it is judged and removed.
type touches struct {
	names names
	gate  sync.RWMutex
}

func (t *touches) touch(repository string, digests ...string) {
	t.gate.RLock()
	defer t.gate.RUnlock()
	now := time.Now()
	for _, text := range digests {
		meant, err := digest.Parse(text)
		if err != nil || strings.Contains(repository, "..") {
			continue
		}
		if meant.Algorithm() != digest.Canonical {
			if meant, err = t.names.canonical(repository, layers, meant); err != nil {
				continue
			}
		}
		hex := meant.Encoded()
		// What is not there yet has the time of its making.
		_ = os.Chtimes(filepath.Join(t.names.base(), "blobs", "sha256", hex[:2], hex, "data"), now, now)
		_ = os.Chtimes(t.names.link(repository, layers, meant), now, now)
	}
}

// guard stands before the engine.
type guard struct {
	next      http.Handler
	config    Config
	names     names
	touched   *touches
	manifests *manifests
	shares    *shares
	uploads   chan struct{}
	// free is how many bytes the disk has left; whether that is known.
	free func() (int64, bool)
	// allowed says whether a request's token permits an action with a repository.
	allowed func(r *http.Request, repository, action string) bool
}

func newGuard(next http.Handler, config Config, kept *manifests, allowed func(*http.Request, string, string) bool) *guard {
	return &guard{
		next: next, config: config, names: kept.names, touched: kept.touched, manifests: kept,
		shares: newShares(kept.names), uploads: make(chan struct{}, config.UploadsMax), allowed: allowed,
		free: func() (int64, bool) { return freeOf(config.Root) },
	}
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
		share := shareOf(r)
		portion, ok := g.shares.of(share, r.ContentLength)
		if !ok {
			refuseShare(w)
			return
		}
		if err := g.names.noteTeam(repositoryPath.FindStringSubmatch(path)[1], share.Team); err != nil {
			refuse(w, http.StatusInternalServerError, "UNKNOWN", "the registry could not do that")
			return
		}
		body := &measured{ReadCloser: http.MaxBytesReader(w, r.Body, g.config.UploadMax), portion: portion, spare: g.spare}
		r.Body, w = body, &limited{ResponseWriter: w, body: body}
	}
	if found := manifestPath.FindStringSubmatch(path); found != nil && r.Method == http.MethodPut {
		g.manifests.put(w, r, found[1], found[2])
	} else if found != nil && r.Method == http.MethodDelete && strings.Contains(found[2], ":") {
		if asked, ok := meant(w, found[2]); ok {
			g.manifests.remove(w, r, found[1], asked)
		}
	} else if found := referrersPath.FindStringSubmatch(path); found != nil && (r.Method == http.MethodGet || r.Method == http.MethodHead) {
		if asked, ok := meant(w, found[2]); ok {
			g.manifests.list(w, r, found[1], asked)
		}
	} else if found := uploadPath.FindStringSubmatch(path); found != nil {
		g.upload(w, r, found[1])
	} else if found := blobPath.FindStringSubmatch(path); found != nil {
		if r.Method == http.MethodHead {
			// A client that is told that a blob is there does not send it.
			g.touched.touch(found[1], found[2])
		}
		g.next.ServeHTTP(by(w, found[2]), r)
	} else {
		g.next.ServeHTTP(w, r)
	}
}

// upload has what is sent, or mounted, counted on before and after the engine has it.
func (g *guard) upload(w http.ResponseWriter, r *http.Request, repository string) {
	query := r.URL.Query()
	named := []string{query.Get("digest"), query.Get("mount")}
	g.touched.touch(repository, named...)
	done := func(int) {}
	if from := query.Get("from"); from != "" && g.allowed(r, from, "pull") {
		g.touched.touch(from, named...)
		done = g.mounted(r, repository)
	}
	said := &seen{ResponseWriter: by(w, named[0]+named[1])}
	g.next.ServeHTTP(said, r)
	done(said.status)
	g.touched.touch(repository, named...)
}

// meant is the digest that a path names; a client that names none is told so.
func meant(w http.ResponseWriter, text string) (digest.Digest, bool) {
	asked, err := digest.Parse(text)
	if err != nil {
		refuse(w, http.StatusBadRequest, "DIGEST_INVALID", err.Error())
	}
	return asked, err == nil
}

// room refuses what the disk would not hold, before a byte of it is taken.
func (g *guard) room(w http.ResponseWriter, r *http.Request) bool {
	if r.ContentLength > g.config.UploadMax {
		refuse(w, http.StatusRequestEntityTooLarge, "SIZE_INVALID", "the upload is larger than this registry takes")
		return false
	}
	if free, known := g.free(); known && free-max(r.ContentLength, 0) < g.config.SpareBytes {
		refuseDisk(w)
		return false
	}
	return true
}

// spare says whether the disk has as much left as it is to have.
func (g *guard) spare() bool {
	free, known := g.free()
	return !known || free >= g.config.SpareBytes
}

func freeOf(root string) (int64, bool) {
	var disk syscall.Statfs_t
	if err := syscall.Statfs(root, &disk); err != nil {
		return 0, false
	}
	return int64(disk.Bavail) * disk.Bsize, true
}

func refuseDisk(w http.ResponseWriter) {
	w.Header().Del("Content-Length")
	refuse(w, http.StatusInsufficientStorage, "UNAVAILABLE", "the registry's disk is full: an operator can collect what nothing refers to (atoll registry gc)")
}

func refuse(w http.ResponseWriter, status int, code, message string) {
	answer(w, status, map[string]any{"errors": []map[string]string{{"code": code, "message": message}}})
}

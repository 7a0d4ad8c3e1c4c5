package main

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/distribution/distribution/v3/registry/storage"
	"github.com/distribution/distribution/v3/registry/storage/driver"
	"github.com/distribution/distribution/v3/registry/storage/driver/filesystem"
)

// collector removes what no manifest refers to, while clients push and pull. The engine marks and sweeps; each removal is
// judged once more, at its moment, by the time at which a client last counted on the file.
type collector struct {
	config  Config
	touched *touches
	log     *slog.Logger
	running sync.Mutex
}

// Collected is what a collection did, or would do.
type Collected struct {
	DryRun bool     `json:"dry_run"`
	Blobs  []string `json:"blobs"`
	Links  int      `json:"links"`
	Bytes  int64    `json:"bytes"`
	Kept   int      `json:"kept"` // what nothing refers to, and was counted on lately
}

func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !c.running.TryLock() {
		refuse(w, http.StatusConflict, "UNAVAILABLE", "a collection is under way")
		return
	}
	defer c.running.Unlock()
	done, err := c.collect(r.Context(), r.URL.Query().Get("dry_run") == "true")
	if err != nil {
		c.log.Error("registry.collect.failed", "error", err.Error())
		refuse(w, http.StatusInternalServerError, "UNKNOWN", err.Error())
		return
	}
	c.log.Info("registry.collected", "dry_run", done.DryRun, "blobs", len(done.Blobs), "bytes", done.Bytes, "kept", done.Kept)
	answer(w, http.StatusOK, done)
}

func (c *collector) collect(ctx context.Context, dryRun bool) (*Collected, error) {
	files := filesystem.New(filesystem.DriverParameters{RootDirectory: c.config.Root, MaxThreads: 100})
	registry, err := storage.NewRegistry(ctx, files)
	if err != nil {
		return nil, err
	}
	done := &Collected{DryRun: dryRun, Blobs: []string{}}
	careful := &sweeper{StorageDriver: files, touched: c.touched, kept: time.Duration(c.config.KeptSeconds) * time.Second, done: done}
	// An engine without repositories has no directory of them.
	err = storage.MarkAndSweep(ctx, careful, canonically{registry, c.touched.names}, storage.GCOpts{Quiet: true})
	if missing := (driver.PathNotFoundError{}); err != nil && !errors.As(err, &missing) && !strings.Contains(err.Error(), "Path not found") {
		return nil, err
	}
	c.touched.gate.Lock()
	defer c.touched.gate.Unlock()
	gone, err := c.touched.names.sweep(dryRun)
	done.Links += gone
	return done, err
}

// sweeper is the storage as the engine's sweep sees it: it takes away only what may go now.
type sweeper struct {
	driver.StorageDriver
	touched *touches
	kept    time.Duration
	done    *Collected
}

// Delete removes a blob's or a link's directory, unless a client has counted on it lately.
func (s *sweeper) Delete(ctx context.Context, path string) error {
	file, isBlob := path, false
	if !strings.HasSuffix(path, "/link") {
		file = path + "/link"
	}
	if strings.Contains(path, "/v2/blobs/") {
		path = strings.TrimSuffix(path, "/data")
		file, isBlob = path+"/data", true
	}
	s.touched.gate.Lock()
	defer s.touched.gate.Unlock()
	info, err := s.Stat(ctx, file)
	if missing := (driver.PathNotFoundError{}); errors.As(err, &missing) {
		return nil
	}
	if err != nil {
		return err
	}
	if time.Since(info.ModTime()) < s.kept {
		s.done.Kept++
		return nil
	}
	if isBlob {
		s.done.Blobs = append(s.done.Blobs, "sha256:"+path[strings.LastIndexByte(path, '/')+1:])
		s.done.Bytes += info.Size()
	} else {
		s.done.Links++
	}
	if s.done.DryRun {
		return nil
	}
	return s.StorageDriver.Delete(ctx, path)
}

package filesystem

import (
	"context"
	"crypto/rand"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"atoll.local/native/internal/guest/entry"
	"atoll.local/native/internal/guest/rpc"
	"atoll.local/native/internal/guest/watch"
)

const (
	// watchersMax bounds the watchers that are polled.
	watchersMax = 128
	// abandonedAfter is how long such a watcher must not have been polled before a new one may take its place.
	abandonedAfter = 15 * time.Minute
	// eventsMax bounds the events kept for one watcher between two polls.
	eventsMax = 16_384
)

type watchRequest struct {
	Path               string `json:"path"`
	Recursive          bool   `json:"recursive"`
	IncludeEntry       bool   `json:"includeEntry"`
	AllowNetworkMounts bool   `json:"allowNetworkMounts"`
}

type watchEvent struct {
	Name  string      `json:"name"`
	Type  string      `json:"type"`
	Entry *entry.Info `json:"entry,omitempty"`
}

type watchResponse struct {
	Start      *empty      `json:"start,omitempty"`
	Filesystem *watchEvent `json:"filesystem,omitempty"`
	Keepalive  *empty      `json:"keepalive,omitempty"`
}

// observe checks the request and starts watching; sink gets the events ready for the wire.
func (s *Service) observe(r *http.Request, request *watchRequest, sink func([]watchEvent)) (*watch.Watcher, error) {
	path, _, err := s.located(r, request.Path)
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	switch {
	case isMissing(err):
		return nil, rpc.Errorf(rpc.NotFound, "path %s not found: %v", path, err)
	case err != nil:
		return nil, diskError("error statting path "+path, err)
	case !info.IsDir():
		return nil, rpc.Errorf(rpc.InvalidArgument, "path %s not a directory", path)
	}
	if !request.AllowNetworkMounts {
		network, err := watch.IsNetworkMount(path)
		if err != nil {
			return nil, rpc.Errorf(rpc.Internal, "error checking mount status: %v", err)
		}
		if network {
			return nil, rpc.Errorf(rpc.InvalidArgument, "cannot watch path on network filesystem: %s", path)
		}
	}
	watcher, err := watch.New(path, request.Recursive, func(events []watch.Event) {
		sink(s.dress(path, events, request.IncludeEntry))
	})
	if err != nil {
		return nil, watchError("error creating watcher", err)
	}
	return watcher, nil
}

// watchError tells exhausted kernel limits from other failures.
func watchError(context string, err error) error {
	for _, limit := range []error{watch.ErrTooMany, syscall.ENOSPC, syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM} {
		if errors.Is(err, limit) {
			return rpc.Errorf(rpc.ResourceExhausted, "%s: %v", context, err)
		}
	}
	return rpc.Errorf(rpc.Internal, "%s: %v", context, err)
}

// dress makes events ready for the wire, with the file's description where it was asked for.
func (s *Service) dress(root string, events []watch.Event, entries bool) []watchEvent {
	dressed := make([]watchEvent, 0, len(events))
	for _, e := range events {
		event := watchEvent{Name: e.Name, Type: e.Type}
		if entries && (e.Type == watch.Create || e.Type == watch.Write || e.Type == watch.Chmod) {
			path := filepath.Join(root, e.Name)
			if info, err := entry.Describe(path, path, s.identity.Users); err == nil {
				event.Entry = info
			}
		}
		dressed = append(dressed, event)
	}
	return dressed
}

// watchDir streams events until the client goes. A client that reads slowly is held by the kernel's bounded queue.
func (s *Service) watchDir(w http.ResponseWriter, r *http.Request) {
	request := new(watchRequest)
	stream := rpc.OpenServer(w, r, request)
	if stream == nil {
		return
	}
	limited, release, err := rpc.WithTimeout(r)
	if err != nil {
		stream.End(err)
		return
	}
	defer release()
	ctx, cancel := context.WithCancel(limited)
	defer cancel()
	batches := make(chan []watchEvent)
	var watcher *watch.Watcher
	s.slots.Do(func() {
		watcher, err = s.observe(r, request, func(batch []watchEvent) {
			select {
			case batches <- batch:
			case <-ctx.Done():
			}
		})
	})
	if err != nil {
		stream.End(err)
		return
	}
	defer watcher.Close()
	if stream.Send(watchResponse{Start: &empty{}}) != nil {
		return
	}
	failed := make(chan error, 1)
	go func() { failed <- watcher.Run() }()
	err = streamEvents(ctx, stream, batches, failed, rpc.Keepalive(r.Header))
	cancel()
	if r.Context().Err() == nil {
		stream.End(err)
	}
}

// streamEvents sends batches until the watcher fails or the client's time is up.
func streamEvents(ctx context.Context, stream *rpc.Stream, batches <-chan []watchEvent, failed <-chan error, keepalive time.Duration) error {
	idle := time.NewTimer(keepalive)
	defer idle.Stop()
	for {
		select {
		case batch := <-batches:
			if err := sendEvents(stream, batch); err != nil {
				return err
			}
		case <-idle.C:
			if err := stream.Send(watchResponse{Keepalive: &empty{}}); err != nil {
				return err
			}
		case err := <-failed:
			return watchError("watcher error", err)
		case <-ctx.Done():
			return rpc.Errorf(rpc.DeadlineExceeded, "context deadline exceeded")
		}
		idle.Reset(keepalive)
	}
}

func sendEvents(stream *rpc.Stream, batch []watchEvent) error {
	frames := make([][]byte, 0, len(batch))
	for i := range batch {
		body, err := rpc.Encode(watchResponse{Filesystem: &batch[i]})
		if err != nil {
			return err
		}
		frames = append(frames, rpc.AppendFrame(nil, 0, body))
	}
	return stream.WriteFrames(frames...)
}

// watchers are those that clients poll.
type watchers struct {
	mu   sync.Mutex
	byID map[string]*polled
}

type polled struct {
	watcher *watch.Watcher

	mu     sync.Mutex
	events []watchEvent
	lost   int
	asked  time.Time
}

func newWatchers() *watchers { return &watchers{byID: make(map[string]*polled)} }

func (ws *watchers) closeAll() {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for id, p := range ws.byID {
		p.watcher.Close()
		delete(ws.byID, id)
	}
}

// store keeps p under a new id; when all places are taken, one that nobody polls any more makes room.
func (ws *watchers) store(p *polled) (string, error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if len(ws.byID) >= watchersMax {
		oldest := ""
		var since time.Duration
		for id, other := range ws.byID {
			if idle := other.idle(); idle > since {
				oldest, since = id, idle
			}
		}
		if since < abandonedAfter {
			return "", rpc.Errorf(rpc.ResourceExhausted, "%d watchers exist already", watchersMax)
		}
		ws.byID[oldest].watcher.Close()
		delete(ws.byID, oldest)
	}
	id := "w" + rand.Text()
	ws.byID[id] = p
	return id, nil
}

func (ws *watchers) find(id string, remove bool) (*polled, error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	p := ws.byID[id]
	if p == nil {
		return nil, rpc.Errorf(rpc.NotFound, "watcher with id %s not found", id)
	}
	if remove {
		delete(ws.byID, id)
	}
	return p, nil
}

func (p *polled) idle() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return time.Since(p.asked)
}

// keep puts events into the bounded list.
func (p *polled) keep(events []watchEvent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	room := min(eventsMax-len(p.events), len(events))
	p.events = append(p.events, events[:room]...)
	p.lost += len(events) - room
}

// take returns the events since the last call. Loss is an error, once, after the events before it were handed out.
func (p *polled) take() ([]watchEvent, error) {
	failure := p.watcher.Drain()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked = time.Now()
	events := p.events
	p.events = nil
	switch {
	case len(events) > 0:
		return events, nil
	case p.lost > 0:
		lost := p.lost
		p.lost = 0
		return nil, rpc.Errorf(rpc.ResourceExhausted, "watcher was polled too rarely: %d events were lost", lost)
	case failure != nil:
		return nil, watchError("watcher error", failure)
	}
	return []watchEvent{}, nil
}

type createResponse struct {
	WatcherID string `json:"watcherId"`
}

type watcherRequest struct {
	WatcherID string `json:"watcherId"`
}

type eventsResponse struct {
	Events []watchEvent `json:"events"`
}

func (s *Service) createWatcher(_ context.Context, r *http.Request, request *watchRequest) (*createResponse, error) {
	p := &polled{asked: time.Now()}
	var err error
	if p.watcher, err = s.observe(r, request, p.keep); err != nil {
		return nil, err
	}
	id, err := s.watchers.store(p)
	if err != nil {
		p.watcher.Close()
		return nil, err
	}
	// Also between polls, so that directories that appear are watched soon.
	go func() { _ = p.watcher.Run() }()
	return &createResponse{id}, nil
}

func (s *Service) getWatcherEvents(_ context.Context, _ *http.Request, request *watcherRequest) (*eventsResponse, error) {
	p, err := s.watchers.find(request.WatcherID, false)
	if err != nil {
		return nil, err
	}
	events, err := p.take()
	if err != nil {
		return nil, err
	}
	return &eventsResponse{events}, nil
}

func (s *Service) removeWatcher(_ context.Context, _ *http.Request, request *watcherRequest) (*empty, error) {
	p, err := s.watchers.find(request.WatcherID, true)
	if err != nil {
		return nil, err
	}
	p.watcher.Close()
	return &empty{}, nil
}

package edge

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"atoll.local/native/internal/node"
)

// Edge is the whole program between its listener and control.
type Edge struct {
	config   Config
	domain   string
	log      *slog.Logger
	metrics  *metrics
	table    *table
	control  *controlClient
	asker    *asker
	waker    *waker
	locator  *locator
	api      *api
	registry *api // nil where there is none
	draining atomic.Bool
}

// New makes an edge that has not started yet.
func New(config Config, log *slog.Logger) (*Edge, error) {
	if err := config.check(); err != nil {
		return nil, err
	}
	config.Limits.fill()
	base, err := url.Parse(config.Control)
	if err != nil {
		return nil, err
	}
	options := node.DefaultOptions()
	options.MaxOpen = config.Limits.PerSandbox
	e := &Edge{
		config:  config,
		domain:  hostName(config.Domain),
		log:     log,
		metrics: &metrics{started: time.Now()},
		table:   newTable(options),
		control: newControlClient(config.Control, config.TokenFile, config.EdgeID),
		api:     newAPI(base, config.Limits),
	}
	if config.Registry != "" {
		e.registry = newRegistry(config.Registry, config.Limits)
	}
	e.asker = newAsker(e.table, e.control, e.metrics, config.Limits)
	e.waker = newWaker(e.table, e.control, e.metrics, config.Limits)
	e.locator = newLocator(e.control)
	return e, nil
}

// ServeHTTP decides what a request is for.
func (e *Edge) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if conn := connOf(r.Context()); conn != nil && conn.over {
		w.Header().Set("Connection", "close")
		sandboxError{Message: "Too many connections", Code: http.StatusTooManyRequests}.write(w, r)
		return
	}
	// Over HTTP/2 one connection carries many requests, so connections alone are no limit.
	defer e.metrics.requests.Add(-1)
	if e.metrics.requests.Add(1) > int64(e.config.Limits.Requests) {
		e.metrics.requestsRefused.Add(1)
		sandboxError{Message: "Too many requests at once", Code: http.StatusTooManyRequests}.write(w, r)
		return
	}
	defer e.recover(w)
	t := findTarget(r, e.domain)
	switch t.aim {
	case aimSandbox:
		e.serveSandbox(w, r, t)
	case aimSigned:
		e.serveSigned(w, r, t)
	case aimInvalid:
		e.metrics.refused(http.StatusBadRequest)
		sandboxError{Message: t.complaint, Code: http.StatusBadRequest}.write(w, r)
	default:
		if e.registry != nil && forRegistry(r.URL.EscapedPath()) {
			e.serveRegistry(w, r)
			return
		}
		e.serveAPI(w, r)
	}
}

// recover logs a fault of ours without the request, whose URL may be a secret, and lets the server cut the connection.
func (e *Edge) recover(w http.ResponseWriter) {
	fault := recover()
	if fault == nil {
		return
	}
	if err, ok := fault.(error); !ok || !errors.Is(err, http.ErrAbortHandler) {
		e.metrics.panics.Add(1)
		e.log.Error("edge.request.fault", "fault", fmt.Sprint(fault), "stack", string(debug.Stack()))
	}
	cut(w)
	panic(http.ErrAbortHandler)
}

func (e *Edge) server(ctx context.Context) *http.Server {
	limits := e.config.Limits
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler:           e,
		Protocols:         protocols,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: 250, MaxReceiveBufferPerStream: 1 << 20, MaxReceiveBufferPerConnection: 4 << 20},
		ReadHeaderTimeout: time.Duration(limits.HeaderTimeoutS) * time.Second,
		IdleTimeout:       time.Duration(limits.IdleTimeoutS) * time.Second,
		MaxHeaderBytes:    limits.HeaderBytes,
		ErrorLog:          slog.NewLogLogger(e.log.Handler(), slog.LevelDebug),
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ConnContext:       withConn,
	}
}

// Run serves until ctx ends, then lets open requests finish for as long as the drain allows, and cuts the rest.
func (e *Edge) Run(ctx context.Context) error {
	listener, err := net.Listen("tcp", e.config.Listen)
	if err != nil {
		return err
	}
	return e.serve(ctx, listener)
}

func (e *Edge) serve(ctx context.Context, listener net.Listener) error {
	guarded := newGate(listener, e.config.Limits.Connections, e.metrics)
	failed := make(chan error, 2)
	admin, err := e.startAdmin(failed)
	if err != nil {
		_ = listener.Close()
		return err
	}
	defer func() { _ = admin.Close() }()

	var background sync.WaitGroup
	following, stopFollowing := context.WithCancel(context.Background())
	f := &follower{table: e.table, control: e.control, asker: e.asker, metrics: e.metrics, log: e.log, silence: silenceMax}
	background.Go(func() { f.run(following) })
	defer background.Wait()
	defer stopFollowing()

	// Requests outlive ctx by the drain, so theirs is another one.
	server := e.server(context.Background())
	go func() { failed <- server.Serve(guarded) }()
	e.log.Info("edge.started", "listen", listener.Addr().String(), "admin", e.config.Admin, "connections_max", e.config.Limits.Connections)
	select {
	case err := <-failed:
		_ = server.Close()
		return err
	case <-ctx.Done():
	}
	e.draining.Store(true)
	drain, cancel := context.WithTimeout(context.Background(), time.Duration(e.config.Limits.DrainS)*time.Second)
	defer cancel()
	err = server.Shutdown(drain)
	_ = server.Close()
	guarded.closeAll()
	e.log.Info("edge.stopped", "drained", err == nil)
	return nil
}

func (e *Edge) startAdmin(failed chan<- error) (*http.Server, error) {
	server := &http.Server{
		Handler:           e.adminHandler(),
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       30 * time.Second,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(e.log.Handler(), slog.LevelDebug),
	}
	if e.config.Admin == "" {
		return server, nil
	}
	listener, err := net.Listen("tcp", e.config.Admin)
	if err != nil {
		return nil, err
	}
	go func() { failed <- server.Serve(listener) }()
	return server, nil
}

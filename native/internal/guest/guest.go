// Package guest is the agent inside a sandbox: E2B's envd contract for users, and a control side for the host.
//
// Read guest.go (what is joined to what, who may call what), then the rooms: control, process, filesystem, files,
// watch, metrics; below them rpc, identity, paths, entry, users, reap, settings.
package guest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"atoll.local/native/internal/guest/answer"
	"atoll.local/native/internal/guest/control"
	"atoll.local/native/internal/guest/files"
	"atoll.local/native/internal/guest/filesystem"
	"atoll.local/native/internal/guest/identity"
	"atoll.local/native/internal/guest/metrics"
	"atoll.local/native/internal/guest/process"
	"atoll.local/native/internal/guest/readiness"
	"atoll.local/native/internal/guest/reap"
	"atoll.local/native/internal/guest/rpc"
	"atoll.local/native/internal/guest/settings"
	"atoll.local/native/internal/guest/threads"
	"atoll.local/native/internal/guest/users"
)

// How many threads may wait in the kernel at one time: for disks, and for new processes, apart so that a file system
// that hangs does not keep commands from starting.
const (
	diskSlots = 10
	forkSlots = 4
	// KernelSlots is their sum.
	KernelSlots = diskSlots + forkSlots
)

const (
	headerBytesMax = 64 << 10
	headerPatience = 30 * time.Second
	// idleConnection is longer than any client or proxy keeps an idle connection, so that they close first.
	idleConnection = 640 * time.Second
	connectionsMax = 4096
)

// Options are what a guest depends on.
type Options struct {
	Config     *control.Config
	Machine    control.Machine
	PasswdPath string
	GroupPath  string
	// ReapEverything is for PID 1: orphans are reaped too.
	ReapEverything bool
	// Group is the control group that processes of users are born into; nil: the agent's own.
	Group reap.Group
	Now   func() time.Time
	Log   *slog.Logger
}

// Guest is the running agent.
type Guest struct {
	options    Options
	settings   *settings.Store
	disks      threads.Slots
	identity   *identity.Identity
	processes  *process.Service
	filesystem *filesystem.Service
	reaper     *reap.Reaper
	start      *readiness.Start
	server     *http.Server
}

// Under these tags the image's own commands are listed.
const (
	entrypointTag = "entrypoint"
	readyTag      = "ready"
)

// New joins the rooms. Nothing listens yet.
func New(options Options) *Guest {
	g := &Guest{options: options, settings: &settings.Store{}, disks: threads.NewSlots(diskSlots)}
	g.identity = &identity.Identity{
		Users:    users.NewDirectory(options.PasswdPath, options.GroupPath),
		Settings: g.settings,
	}
	g.reaper = reap.New(options.ReapEverything, options.Group)
	g.filesystem = filesystem.NewService(g.identity, g.disks)
	g.processes = process.NewService(g.identity, g.reaper, threads.NewSlots(forkSlots))
	g.start = &readiness.Start{
		Command: func() (readiness.Process, error) { return g.launch(options.Config.Command, entrypointTag) },
		Ready:   func() (readiness.Process, error) { return g.launch(options.Config.Ready, readyTag) },
		Log:     options.Log,
	}
	if len(options.Config.Command) == 0 {
		g.start.Command = nil
	}
	if len(options.Config.Ready) == 0 {
		g.start.Ready = nil
	}
	g.server = &http.Server{
		Handler:           g.handler(),
		ReadHeaderTimeout: headerPatience,
		IdleTimeout:       idleConnection,
		MaxHeaderBytes:    headerBytesMax,
		ErrorLog:          slog.NewLogLogger(options.Log.Handler(), slog.LevelDebug),
	}
	return g
}

// Serve answers on listener until Close.
func (g *Guest) Serve(listener net.Listener) error {
	err := g.server.Serve(&boundedListener{Listener: listener, slots: make(chan struct{}, connectionsMax)})
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Close ends all connections at once and stops reaping. Processes are left alone.
func (g *Guest) Close() {
	_ = g.server.Close()
	g.filesystem.Close()
	g.reaper.Close()
}

// launch runs one of the image's own commands: as whom and where the configuration says, else as root in /.
func (g *Guest) launch(command []string, tag string) (readiness.Process, error) {
	name, cwd := g.options.Config.CommandUser, ""
	if name == "" {
		name, cwd = "root", "/"
	}
	user, err := g.identity.Users.Lookup(name)
	if err != nil {
		return nil, err
	}
	launched, err := g.processes.Launch(command, user, tag, cwd)
	if err != nil {
		return nil, err
	}
	return launched, nil
}

// handler dispatches: control calls by their token, the rest by the envd contract.
func (g *Guest) handler() http.Handler {
	host := control.New(g.options.Config, g.settings, g.options.Machine, g.start)
	routes := g.routes()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer g.reportPanic(r)
		if strings.HasPrefix(r.URL.Path, "/atoll/") {
			host.ServeHTTP(w, r)
			return
		}
		allowOrigin(w, r)
		if isPreflight(r) {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		methods, known := routes[r.URL.Path]
		if !known {
			answer.Error(w, http.StatusNotFound, "not found")
			return
		}
		route, allowed := methods[r.Method]
		switch {
		case !allowed:
			w.Header().Set("Allow", allowList(methods))
			answer.Error(w, http.StatusMethodNotAllowed, "method not allowed")
		case !route.early && g.settings.Latest() == nil:
			answer.Error(w, http.StatusServiceUnavailable, "sandbox is not initialised")
		case !route.open && !g.hasToken(r):
			answer.Error(w, http.StatusUnauthorized,
				"unauthorized access, please provide a valid access token or method signing if supported")
		default:
			route.serve(w, r)
		}
	})
}

// reportPanic logs a bug with its stack and cuts the connection, so that nobody takes half an answer for a whole one.
func (g *Guest) reportPanic(r *http.Request) {
	cause := recover()
	if cause == nil {
		return
	}
	if cause != http.ErrAbortHandler {
		g.options.Log.Error("guest.request.panicked", "path", r.URL.Path, "cause", fmt.Sprint(cause), "stack", string(debug.Stack()))
	}
	panic(http.ErrAbortHandler)
}

// route is one call of the envd contract.
type route struct {
	serve http.HandlerFunc
	open  bool // checks tokens and signatures itself, or needs none
	early bool // answers before the first init
}

func (g *Guest) routes() map[string]map[string]route {
	content := files.New(g.identity, g.disks, g.options.Now)
	routes := map[string]map[string]route{
		"/health": {http.MethodGet: {serve: health, open: true, early: true}},
		"/envs":   {http.MethodGet: {serve: g.envs}},
		"/files": {
			http.MethodGet:  {serve: content.Download, open: true},
			http.MethodPost: {serve: content.Upload, open: true},
		},
		"/files/compose": {http.MethodPost: {serve: content.Compose}},
	}
	routes["/metrics"] = map[string]route{http.MethodGet: {serve: g.metrics(metrics.New("/proc", "/sys/fs/cgroup", "/", g.options.Now))}}
	g.addService(routes, "/process.Process/", g.processes.Routes())
	g.addService(routes, "/filesystem.Filesystem/", g.filesystem.Routes())
	return routes
}

func (g *Guest) addService(routes map[string]map[string]route, prefix string, methods map[string]http.HandlerFunc) {
	for name, serve := range methods {
		routes[prefix+name] = map[string]route{http.MethodPost: {serve: g.withKnownUser(serve)}}
	}
}

// withKnownUser refuses an rpc that names a user who does not exist, also where no user is needed.
func (g *Guest) withKnownUser(serve http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if err := g.identity.CheckBasic(r); err != nil {
			rpc.Refuse(w, r, err)
			return
		}
		serve(w, r)
	}
}

func (g *Guest) hasToken(r *http.Request) bool {
	token := g.settings.Current().AccessToken
	return !token.IsSet() || token.Equals(r.Header.Get("X-Access-Token"))
}

func health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusNoContent)
}

func (g *Guest) envs(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	answer.JSON(w, http.StatusOK, g.settings.Current().Env)
}

func (g *Guest) metrics(meter *metrics.Meter) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		var now *metrics.Metrics
		var err error
		g.disks.Do(func() { now, err = meter.Read() })
		if err != nil {
			answer.Error(w, http.StatusInternalServerError, "error reading metrics: %v", err)
			return
		}
		w.Header().Set("Cache-Control", "no-store")
		answer.JSON(w, http.StatusOK, now)
	}
}

// allowOrigin lets any page call: what protects the sandbox is its token, and no cookie is ever looked at.
func allowOrigin(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Add("Vary", "Origin")
	h.Set("Access-Control-Allow-Origin", "*")
	if !isPreflight(r) {
		h.Set("Access-Control-Expose-Headers",
			"Content-Encoding, Content-Length, Content-Range, Accept-Ranges, Last-Modified, Location, Connect-Protocol-Version")
		return
	}
	h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE")
	h.Set("Access-Control-Max-Age", "7200")
	// "*" would not cover Authorization, so what was asked for is what is allowed.
	if wanted := r.Header.Get("Access-Control-Request-Headers"); wanted != "" {
		h.Set("Access-Control-Allow-Headers", wanted)
	}
}

func isPreflight(r *http.Request) bool {
	return r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != ""
}

func allowList(methods map[string]route) string {
	names := make([]string, 0, len(methods))
	for _, name := range []string{http.MethodGet, http.MethodPost} {
		if _, ok := methods[name]; ok {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// boundedListener closes connections beyond the limit at once: waiting would lock the host out together with whoever
// holds them.
type boundedListener struct {
	net.Listener
	slots chan struct{}
}

func (l *boundedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		select {
		case l.slots <- struct{}{}:
			return &boundedConn{Conn: conn, slots: l.slots}, nil
		default:
			_ = conn.Close()
		}
	}
}

// Listen opens the guest's listener.
func Listen(ctx context.Context, address string) (net.Listener, error) {
	return (&net.ListenConfig{}).Listen(ctx, "tcp", address)
}

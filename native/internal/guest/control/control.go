package control

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"atoll.local/native/internal/guest/answer"
	"atoll.local/native/internal/guest/settings"
	"atoll.local/native/internal/version"
)

// EnvdVersion is the version of E2B's guest contract that this guest keeps; SDKs switch features by it.
const EnvdVersion = "0.6.13"

// The versions of the control protocol that this guest speaks.
const (
	protocolMin = 1
	protocolMax = 1
)

// defaultUser is whom requests act as when init names nobody.
const defaultUser = "user"

const (
	initBytesMax = 4 << 20
	filesMax     = 64
	envMax       = 4096
)

// Control serves the prefix /atoll/.
type Control struct {
	config   atomic.Pointer[Config]
	settings *settings.Store
	machine  Machine
	start    Starter
	bootMS   int64

	initMu   sync.Mutex
	launched sync.Once
	tunnels  chan struct{}
}

// Starter begins the image's own command, once, after the first init, and says how far that is.
type Starter interface {
	Begin()
	State() (state, detail string)
}

// New makes the control side.
func New(config *Config, store *settings.Store, machine Machine, start Starter) *Control {
	c := &Control{
		settings: store,
		machine:  machine,
		start:    start,
		bootMS:   monotonicMS(),
		tunnels:  make(chan struct{}, tunnelsMax),
	}
	c.config.Store(config)
	return c
}

// ServeHTTP dispatches one control call; nothing is answered without the right token.
func (c *Control) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	call := strings.TrimPrefix(r.URL.Path, "/atoll/")
	scope := scopeControl
	if strings.HasPrefix(call, "connect/") {
		scope = scopeConnect
	}
	if err := c.authorize(r, scope); err != nil {
		answer.Error(w, http.StatusUnauthorized, "%v", err)
		return
	}
	switch {
	case r.Method == http.MethodGet && call == "hello":
		c.hello(w)
	case r.Method == http.MethodPost && call == "init":
		c.init(w, r)
	case r.Method == http.MethodPost && call == "sleep":
		// About to be saved: whatever wakes up from that serves nobody before an init has set clock, entropy and token.
		c.lull(w, c.settings.Sleep)
	case r.Method == http.MethodPost && call == "wake":
		// It was not saved after all.
		c.lull(w, c.settings.Wake)
	case r.Method == http.MethodPost && scope == scopeConnect:
		c.connect(w, r, strings.TrimPrefix(call, "connect/"))
	default:
		answer.Error(w, http.StatusNotFound, "not found")
	}
}

// lull changes whether settings are there, never in the middle of an init.
func (c *Control) lull(w http.ResponseWriter, change func()) {
	c.initMu.Lock()
	defer c.initMu.Unlock()
	change()
	w.WriteHeader(http.StatusNoContent)
}

type protocolRange struct {
	Min int `json:"min"`
	Max int `json:"max"`
}

type helloAnswer struct {
	SandboxID    string        `json:"sandbox_id"`
	PlacementID  string        `json:"placement_id"`
	Generation   int64         `json:"generation"`
	Nonce        string        `json:"nonce"`
	GuestVersion string        `json:"guest_version"`
	EnvdVersion  string        `json:"envd_version"`
	Protocol     protocolRange `json:"protocol"`
	Initialised  bool          `json:"initialised"`
	// Start is none (there is no command, or init has not come), starting, ready or failed.
	Start           string `json:"start"`
	StartDetail     string `json:"start_detail"`
	BootMonotonicMS int64  `json:"boot_monotonic_ms"`
	// InitRevision is of the last init that was taken; 0 before the first.
	InitRevision int64 `json:"init_revision"`
}

func (c *Control) hello(w http.ResponseWriter) {
	state, detail := c.start.State()
	who := c.config.Load()
	latest := c.settings.Latest()
	var revision int64
	if latest != nil {
		revision = latest.Revision
	}
	answer.JSON(w, http.StatusOK, helloAnswer{
		SandboxID:       who.SandboxID,
		PlacementID:     who.PlacementID,
		Generation:      who.Generation,
		Nonce:           who.Nonce,
		GuestVersion:    version.Version,
		EnvdVersion:     EnvdVersion,
		Protocol:        protocolRange{protocolMin, protocolMax},
		Initialised:     latest != nil,
		Start:           state,
		StartDetail:     detail,
		BootMonotonicMS: c.bootMS,
		InitRevision:    revision,
	})
}

type initRequest struct {
	Env            map[string]string `json:"env"`
	AccessToken    *string           `json:"access_token"`
	DefaultUser    string            `json:"default_user"`
	DefaultWorkdir *string           `json:"default_workdir"`
	TimeUnixNS     *string           `json:"time_unix_ns"`
	Entropy        *string           `json:"entropy"`
	Hostname       *string           `json:"hostname"`
	Files          []initFile        `json:"files"`
	Revision       int64             `json:"revision"`
}

type initFile struct {
	Path    string `json:"path"`
	Content string `json:"content"`
	Mode    string `json:"mode"`
}

// init replaces all settings. Idempotency: repeating it changes nothing more; the clock, being past, is set each time.
func (c *Control) init(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, initBytesMax))
	if err != nil {
		answer.Error(w, http.StatusRequestEntityTooLarge, "init body: %v", err)
		return
	}
	plan, err := parseInit(body)
	if err != nil {
		answer.Error(w, http.StatusBadRequest, "%v", err)
		return
	}
	c.initMu.Lock()
	defer c.initMu.Unlock()
	// Clock and entropy come first: what is served after a restore must not see the old ones.
	if err := plan.apply(c.machine); err != nil {
		answer.Error(w, http.StatusInternalServerError, "%v", err)
		return
	}
	c.settings.Replace(plan.values)
	c.launched.Do(c.start.Begin)
	w.WriteHeader(http.StatusNoContent)
}

// initPlan is a checked init.
type initPlan struct {
	values   *settings.Values
	unixNano int64
	entropy  []byte
	hostname string
	files    []plannedFile
}

type plannedFile struct {
	path    string
	content string
	mode    os.FileMode
}

func parseInit(body []byte) (*initPlan, error) {
	var request initRequest
	if err := json.Unmarshal(body, &request); err != nil {
		return nil, fmt.Errorf("init body is not valid JSON: %w", err)
	}
	plan := &initPlan{values: &settings.Values{
		Env:            request.Env,
		AccessToken:    settings.Secret(deref(request.AccessToken)),
		DefaultUser:    request.DefaultUser,
		DefaultWorkdir: deref(request.DefaultWorkdir),
		Revision:       request.Revision,
	}}
	if plan.values.DefaultUser == "" {
		plan.values.DefaultUser = defaultUser
	}
	if plan.values.Env == nil {
		plan.values.Env = map[string]string{}
	}
	if len(request.Env) > envMax || len(request.Files) > filesMax {
		return nil, fmt.Errorf("init: at most %d variables and %d files", envMax, filesMax)
	}
	for name, value := range request.Env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.Contains(value, "\x00") {
			return nil, fmt.Errorf("init: env: invalid name or value of %q", name)
		}
	}
	return plan, plan.parseMachine(&request)
}

func (p *initPlan) parseMachine(request *initRequest) error {
	var err error
	if text := deref(request.TimeUnixNS); text != "" {
		if p.unixNano, err = strconv.ParseInt(text, 10, 64); err != nil || p.unixNano <= 0 {
			return errors.New("init: time_unix_ns must be a positive integer in a string")
		}
	}
	if text := deref(request.Entropy); text != "" {
		if p.entropy, err = base64.StdEncoding.DecodeString(text); err != nil {
			return errors.New("init: entropy must be base64")
		}
	}
	p.hostname = deref(request.Hostname)
	if len(p.hostname) > 64 || strings.ContainsAny(p.hostname, " \t\n\x00") {
		return errors.New("init: hostname must be at most 64 bytes without spaces")
	}
	for _, f := range request.Files {
		if !filepath.IsAbs(f.Path) || strings.Contains(f.Path, "\x00") {
			return fmt.Errorf("init: file path %q must be absolute", f.Path)
		}
		mode := uint64(0o644)
		if f.Mode != "" {
			if mode, err = strconv.ParseUint(f.Mode, 8, 12); err != nil {
				return fmt.Errorf("init: file mode %q must be octal", f.Mode)
			}
		}
		p.files = append(p.files, plannedFile{filepath.Clean(f.Path), f.Content, os.FileMode(mode)})
	}
	return nil
}

func (p *initPlan) apply(machine Machine) error {
	if p.unixNano > 0 {
		if err := machine.SetClock(p.unixNano); err != nil {
			return fmt.Errorf("init: cannot set the clock: %w", err)
		}
	}
	if len(p.entropy) > 0 {
		if err := machine.AddEntropy(p.entropy); err != nil {
			return fmt.Errorf("init: cannot add entropy: %w", err)
		}
	}
	if p.hostname != "" {
		if err := machine.SetHostname(p.hostname); err != nil {
			return fmt.Errorf("init: cannot set the host name: %w", err)
		}
	}
	for _, f := range p.files {
		if err := f.write(); err != nil {
			return fmt.Errorf("init: cannot write %s: %w", f.path, err)
		}
	}
	return nil
}

func (f plannedFile) write() error {
	if err := os.MkdirAll(filepath.Dir(f.path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(f.path, []byte(f.content), f.mode); err != nil {
		return err
	}
	return os.Chmod(f.path, f.mode)
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// monotonicMS is when this guest started, on the machine's monotonic clock: another value means another start.
func monotonicMS() int64 {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0
	}
	return now.Nano() / int64(time.Millisecond)
}

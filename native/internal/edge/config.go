package edge

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"
	"syscall"
)

// Config is the file that `atoll-io edge --config` reads.
type Config struct {
	Listen    string `json:"listen"`     // where clients come
	Admin     string `json:"admin"`      // health and metrics, loopback only
	Control   string `json:"control"`    // base URL of control
	TokenFile string `json:"token_file"` // holds the bearer token for control; read again whenever it is needed anew
	Domain    string `json:"domain"`     // sandboxes are {port}-{id}.{domain}; a port in it is ignored
	EdgeID    string `json:"edge_id"`
	Registry  string `json:"registry"` // socket of the registry of images; empty: there is none
	Limits    Limits `json:"limits"`
}

// Limits bound what clients can make the edge hold. Zero means the default.
type Limits struct {
	Connections        int `json:"connections"`          // client connections; above it 429
	Requests           int `json:"requests"`             // open requests of all clients; above it 429
	PerSandbox         int `json:"per_sandbox"`          // open requests of one sandbox; above it 429
	AsksInFlight       int `json:"asks_in_flight"`       // look-ups at control at once
	AsksWaiting        int `json:"asks_waiting"`         // look-ups that may queue behind them
	AsksPerSecond      int `json:"asks_per_second"`      // look-ups that one client address may cause
	WakesHeld          int `json:"wakes_held"`           // requests that may wait for sandboxes to be resumed
	HeaderBytes        int `json:"header_bytes"`         // request line and headers
	HeaderTimeoutS     int `json:"header_timeout_s"`     // for a request's headers to arrive
	IdleTimeoutS       int `json:"idle_timeout_s"`       // between two requests of a connection
	DrainS             int `json:"drain_s"`              // for open requests when the edge stops
	ControlPatienceMS  int `json:"control_patience_ms"`  // an API request waits so long for control to restart; negative: not
	ControlPatienceMax int `json:"control_patience_max"` // API requests that may wait so at once
	ControlAnswerS     int `json:"control_answer_s"`     // for control to begin an answer
}

func orDefault(value *int, fallback int) {
	if *value <= 0 {
		*value = fallback
	}
}

func (l *Limits) fill() {
	// A request costs two descriptors at most: its client's connection, unless others share it, and one into a guest.
	connections := 10000
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err == nil && files.Cur < 1<<20 {
		connections = min(connections, max(64, (int(files.Cur)-256)*2/5))
	}
	orDefault(&l.Connections, connections)
	orDefault(&l.Requests, l.Connections)
	orDefault(&l.PerSandbox, 1024)
	orDefault(&l.AsksInFlight, 16)
	orDefault(&l.AsksWaiting, 256)
	orDefault(&l.AsksPerSecond, 200)
	orDefault(&l.WakesHeld, 2048)
	orDefault(&l.HeaderBytes, 64<<10)
	orDefault(&l.HeaderTimeoutS, 10)
	// The SDKs keep idle connections for 300 s: who closes first must be the client, or it may use a closed one.
	orDefault(&l.IdleTimeoutS, 330)
	orDefault(&l.DrainS, 5)
	orDefault(&l.ControlPatienceMax, 256)
	// A create may be waited for 50 s, and some more where the machine is busy; a control that hangs says nothing for ever.
	orDefault(&l.ControlAnswerS, 90)
	if l.ControlPatienceMS == 0 {
		l.ControlPatienceMS = 3000
	}
}

// LoadConfig reads and checks a configuration file.
func LoadConfig(path string) (Config, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return Config{}, err
	}
	var config Config
	if err := json.Unmarshal(text, &config); err != nil {
		return Config{}, fmt.Errorf("%s: %w", path, err)
	}
	if err := config.check(); err != nil {
		return Config{}, fmt.Errorf("%s: %w", path, err)
	}
	return config, nil
}

func (c *Config) check() error {
	control, err := url.Parse(c.Control)
	if err != nil || control.Scheme != "http" && control.Scheme != "https" || control.Host == "" {
		return errors.New(`"control" must be an http or https URL`)
	}
	c.Control = strings.TrimRight(c.Control, "/")
	if _, _, err := net.SplitHostPort(c.Listen); err != nil {
		return fmt.Errorf(`"listen": %w`, err)
	}
	if c.Admin != "" {
		host, _, err := net.SplitHostPort(c.Admin)
		if err != nil {
			return fmt.Errorf(`"admin": %w`, err)
		}
		if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
			return errors.New(`"admin" must be a loopback address: it shows metrics to anybody`)
		}
	}
	if c.EdgeID == "" {
		c.EdgeID = "edge"
	}
	return nil
}

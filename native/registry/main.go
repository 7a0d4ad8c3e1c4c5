// Command atoll-registry is Atoll's OCI registry: an existing engine (CNCF Distribution) behind a socket of this machine, with
// tokens that control has signed. It decides nothing: what a token permits, control has said.
//
// guard.go holds limits and keeps what clients count on from collection; collect.go collects. A program of its own, with a module
// of its own: the engine is many times as large as everything else that moves bytes here.
package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/distribution/distribution/v3/configuration"
	"github.com/distribution/distribution/v3/registry/auth"
	"github.com/distribution/distribution/v3/registry/handlers"
	"github.com/sirupsen/logrus"

	_ "github.com/distribution/distribution/v3/registry/auth/token"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem"
)

// Config is the file that --config names.
type Config struct {
	Socket      string `json:"socket"`       // where the edge and `atoll registry` come
	Root        string `json:"root"`         // blobs and records of the engine
	Keys        string `json:"keys"`         // JWKS with control's public key
	TokenPath   string `json:"token_path"`   // where clients get tokens, at the address that they use
	Service     string `json:"service"`      // audience of tokens
	Issuer      string `json:"issuer"`       // who signs them
	UploadsMax  int    `json:"uploads_max"`  // bodies that are taken at once; above it 429
	UploadMax   int64  `json:"upload_max"`   // bytes of one body
	SpareBytes  int64  `json:"spare_bytes"`  // what uploads leave free of the disk
	KeptSeconds int64  `json:"kept_seconds"` // what nothing refers to is kept so long after it was last counted on
}

func main() {
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil)).With("program", "registry")
	file := flag.String("config", "", "configuration `FILE` (JSON)")
	flag.Parse()
	if *file == "" || flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if err := run(ctx, *file, log); err != nil {
		log.Error("registry.failed", "error", err.Error())
		os.Exit(1)
	}
}

func load(file string) (Config, error) {
	config := Config{UploadsMax: 32, UploadMax: 32 << 30, SpareBytes: 1 << 30, KeptSeconds: 24 * 3600}
	text, err := os.ReadFile(file)
	if err != nil {
		return config, err
	}
	if err := json.Unmarshal(text, &config); err != nil {
		return config, fmt.Errorf("%s: %w", file, err)
	}
	if config.Socket == "" || config.Root == "" || config.Keys == "" {
		return config, fmt.Errorf("%s: socket, root and keys are needed", file)
	}
	return config, nil
}

func (c Config) engine() *configuration.Configuration {
	engine := &configuration.Configuration{
		Version: configuration.MajorMinorVersion(0, 1),
		Storage: configuration.Storage{
			"filesystem": configuration.Parameters{"rootdirectory": c.Root},
			"delete":     configuration.Parameters{"enabled": true},
			"maintenance": configuration.Parameters{"uploadpurging": map[any]any{
				"enabled": true, "age": "24h", "interval": "6h", "dryrun": false,
			}},
		},
		Auth: configuration.Auth{"token": configuration.Parameters{
			"realm": c.TokenPath, "autoredirect": true, "autoredirectpath": c.TokenPath,
			"service": c.Service, "issuer": c.Issuer, "jwks": c.Keys, "signingalgorithms": []any{"EdDSA"},
		}},
	}
	// Behind the edge clients use addresses that the engine does not know.
	engine.HTTP.RelativeURLs = true
	engine.Catalog.MaxEntries = 1000
	return engine
}

func run(ctx context.Context, file string, log *slog.Logger) error {
	config, err := load(file)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(config.Root, 0o700); err != nil {
		return err
	}
	// The engine warns of every request without a token, which is how each client begins.
	logrus.SetLevel(logrus.ErrorLevel)
	logrus.SetFormatter(&logrus.JSONFormatter{})
	engine := config.engine()
	if engine.HTTP.Secret, err = secret(filepath.Join(filepath.Dir(config.Root), "uploads.key")); err != nil {
		return err
	}
	controller, err := auth.GetAccessController("token", engine.Auth["token"])
	if err != nil {
		return err
	}
	app := handlers.NewApp(context.Background(), engine)
	touched := &touches{names: names{config.Root}}
	kept, err := newManifests(ctx, config, touched, log)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("/v2/", newGuard(app, config, kept, byToken(controller)))
	mux.Handle("GET /-/health", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, map[string]any{"healthy": true})
	}))
	mux.Handle("GET /-/usage", newShares(kept.names))
	mux.Handle("POST /-/collect", &collector{config: config, touched: touched, log: log})
	listener, err := listen(config.Socket)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 60 * time.Second, MaxHeaderBytes: 64 << 10}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	log.Info("registry.started", "root", config.Root)
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	drain, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := server.Shutdown(drain); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	log.Info("registry.stopped")
	return server.Close()
}

// secret signs where an upload has got to: it is kept, so that uploads go on after a restart.
func secret(file string) (string, error) {
	if known, err := os.ReadFile(file); err == nil && len(known) >= 32 {
		return string(known), nil
	}
	made := rand.Text() + rand.Text()
	unfinished := file + ".new"
	if err := os.WriteFile(unfinished, []byte(made), 0o600); err != nil {
		return "", err
	}
	return made, os.Rename(unfinished, file)
}

// listen takes the socket over from a process that has ended: the supervisor lets no second one live.
func listen(socket string) (net.Listener, error) {
	folder, err := os.Open(filepath.Dir(socket))
	if err != nil {
		return nil, err
	}
	defer func() { _ = folder.Close() }()
	// However deep the directory: the kernel takes 107 bytes.
	short := fmt.Sprintf("/proc/self/fd/%d/%s", folder.Fd(), filepath.Base(socket))
	if err := os.Remove(short); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := net.Listen("unix", short)
	if err != nil {
		return nil, err
	}
	// The short name ends with this function; the next start removes what is left.
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	return listener, nil
}

func answer(w http.ResponseWriter, status int, content any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(content)
}

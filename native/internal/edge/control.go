package edge

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
)

// errNotFound is control's word that it has no such thing.
var errNotFound = errors.New("control does not know it")

// errAway says that control gave no usable answer.
var errAway = errors.New("control is away")

const (
	answerBytesMax = 256 << 10
	askTimeout     = 5 * time.Second
	wakeTimeout    = 60 * time.Second
)

// controlClient asks control in the edge's own name.
type controlClient struct {
	base      string
	tokenFile string
	edgeID    string
	http      *http.Client

	mu    sync.Mutex
	token string
}

func newControlClient(base, tokenFile, edgeID string) *controlClient {
	return &controlClient{
		base:      base,
		tokenFile: tokenFile,
		edgeID:    edgeID,
		http: &http.Client{
			Transport: &http.Transport{
				DialContext:         (&net.Dialer{Timeout: 2 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
				MaxIdleConnsPerHost: 16,
				IdleConnTimeout:     controlIdle,
				DisableCompression:  true,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
}

// route asks for one sandbox. Errors: errNotFound, errAway.
func (c *controlClient) route(ctx context.Context, id string) (*Route, error) {
	text, err := c.ask(ctx, http.MethodGet, "/internal/edge/v1/routes/"+id, nil, askTimeout)
	if err != nil {
		return nil, err
	}
	return routeOf(text, id)
}

// wake has a sandbox resumed and gives the way to it. Errors: errNotFound, errAway.
func (c *controlClient) wake(ctx context.Context, id string) (*Route, error) {
	text, err := c.ask(ctx, http.MethodPost, "/internal/edge/v1/routes/"+id+"/wake", nil, wakeTimeout)
	if err != nil {
		return nil, err
	}
	return routeOf(text, id)
}

func routeOf(text []byte, id string) (*Route, error) {
	route, err := parseRoute(text)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errAway, err)
	}
	if route.SandboxID != id {
		return nil, fmt.Errorf("%w: it answered for another sandbox", errAway)
	}
	return route, nil
}

// signedPath is what a signed file URL says.
type signedPath struct {
	Path       string `json:"path"`
	Operation  string `json:"operation"`
	Username   string `json:"username"`
	Signature  string `json:"signature"`
	Expiration *int64 `json:"expiration"`
}

// locate asks whose a signed path is. Errors: errNotFound, errAway.
func (c *controlClient) locate(ctx context.Context, signed signedPath) (string, error) {
	body, err := json.Marshal(signed)
	if err != nil {
		return "", err
	}
	text, err := c.ask(ctx, http.MethodPost, "/internal/edge/v1/locate", body, askTimeout)
	if err != nil {
		return "", err
	}
	var located struct {
		SandboxID string `json:"sandbox_id"`
	}
	if err := json.Unmarshal(text, &located); err != nil || !validID(located.SandboxID) {
		return "", fmt.Errorf("%w: it located no sandbox id", errAway)
	}
	return located.SandboxID, nil
}

func (c *controlClient) ask(ctx context.Context, method, path string, body []byte, patience time.Duration) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	response, err := c.send(ctx, method, path, body, false)
	if err == nil && response.StatusCode == http.StatusUnauthorized {
		// The token may have been replaced since it was read.
		_ = response.Body.Close()
		response, err = c.send(ctx, method, path, body, true)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errAway, err)
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(response.Body, answerBytesMax))
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", errAway, err)
	case response.StatusCode == http.StatusNotFound:
		return nil, errNotFound
	case response.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("%w: it answered %d", errAway, response.StatusCode)
	}
	return text, nil
}

// stream opens the endless stream of routes; the caller closes it.
func (c *controlClient) stream(ctx context.Context) (io.ReadCloser, error) {
	response, err := c.send(ctx, http.MethodGet, "/internal/edge/v1/routes/stream", nil, true)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		_ = response.Body.Close()
		return nil, fmt.Errorf("control answered %d to the stream of routes", response.StatusCode)
	}
	return response.Body, nil
}

func (c *controlClient) send(ctx context.Context, method, path string, body []byte, reread bool) (*http.Response, error) {
	token, err := c.bearer(reread)
	if err != nil {
		return nil, err
	}
	var reader io.Reader
	if body != nil {
		reader = bytes.NewReader(body)
	}
	request, err := http.NewRequestWithContext(ctx, method, c.base+path, reader)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Authorization", "Bearer "+token)
	request.Header.Set("Atoll-Edge-Id", c.edgeID)
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
		// Look-ups change nothing, so a connection that control closed meanwhile may be retried.
		request.Header["X-Idempotency-Key"] = nil
	}
	response, err := c.http.Do(request)
	// An error of Do names the URL, which is dull here; the cause says more.
	var wrapped interface{ Unwrap() error }
	if err != nil && errors.As(err, &wrapped) && wrapped.Unwrap() != nil {
		err = wrapped.Unwrap()
	}
	return response, err
}

func (c *controlClient) bearer(reread bool) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tokenFile == "" || c.token != "" && !reread {
		return c.token, nil
	}
	text, err := os.ReadFile(c.tokenFile)
	if err != nil {
		return "", err
	}
	c.token = strings.TrimSpace(string(text))
	return c.token, nil
}

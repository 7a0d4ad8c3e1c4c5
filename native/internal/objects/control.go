package objects

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"time"
)

// Reader is the part of a store that hosts need.
type Reader interface {
	Get(ctx context.Context, name Name, offset, length int64) (io.ReadCloser, error)
}

// ControlSettings say how a host reads what control keeps: at any of its replicas, over the connection that its agent trusts, too.
type ControlSettings struct {
	URLs       []string `json:"urls"`
	Credential string   `json:"credential"`
	// Authority is a file with who signs control's certificate, where the machine does not know it.
	Authority string `json:"authority,omitempty"`
}

// Control reads blobs from control, as a host; what control keeps in a bucket, from there, by a link that is good for a while.
type Control struct {
	client   *http.Client
	settings ControlSettings
	// elsewhere is for links: it knows neither control's authority nor the host's credential.
	elsewhere *http.Client
	// quiet is how long nothing may come.
	quiet time.Duration
}

const quietMax = 30 * time.Second

// OpenControl talks to nobody yet. Errors: addresses in clear that lead off this machine, an authority that is none.
func OpenControl(settings ControlSettings) (*Control, error) {
	for _, text := range settings.URLs {
		address, err := url.Parse(text)
		if err != nil || !(address.Scheme == "https" || (address.Scheme == "http" && local(address.Hostname()))) {
			return nil, fmt.Errorf("%.200q is no address of control: other machines are spoken to over TLS", text)
		}
	}
	if len(settings.URLs) == 0 {
		return nil, errors.New("no address of control is given")
	}
	carrier := transport()
	if settings.Authority != "" {
		content, err := os.ReadFile(settings.Authority)
		if err != nil {
			return nil, err
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(content) {
			return nil, fmt.Errorf("%s has no certificate", settings.Authority)
		}
		carrier.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	}
	// The credential is for control alone: wherever an answer leads to, it does not go there.
	never := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &Control{
		client:    &http.Client{Transport: carrier, CheckRedirect: never},
		settings:  settings,
		elsewhere: &http.Client{Transport: transport(), CheckRedirect: never},
		quiet:     quietMax,
	}, nil
}

func transport() *http.Transport {
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}
	return &http.Transport{
		DialContext:           dialer.DialContext,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: 60 * time.Second,
		MaxIdleConnsPerHost:   16,
		IdleConnTimeout:       30 * time.Second,
		DisableCompression:    true,
	}
}

func local(host string) bool { return host == "localhost" || host == "127.0.0.1" || host == "::1" }

// Get asks one replica after the other, until one has it.
func (c *Control) Get(ctx context.Context, name Name, offset, length int64) (io.ReadCloser, error) {
	if err := name.Check(); err != nil {
		return nil, err
	}
	return c.Read(ctx, "blobs/"+name.Digest, offset, length)
}

// Read is Get for what hosts may read besides blobs: a path below the agents' routes. ErrMissing means that every replica has said so: what
// one has not may be with another, which could not be asked.
func (c *Control) Read(ctx context.Context, path string, offset, length int64) (io.ReadCloser, error) {
	var said error
	for _, address := range c.settings.URLs {
		body, err := c.ask(ctx, address, path, offset, length)
		if err == nil || errors.Is(err, ErrDenied) {
			return body, err
		}
		if said == nil || errors.Is(said, ErrMissing) {
			said = err
		}
	}
	return nil, said
}

func (c *Control) ask(ctx context.Context, address, path string, offset, length int64) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	quiet := time.AfterFunc(c.quiet, func() { cancel(errQuiet) })
	body, err := c.answer(ctx, address, path, offset, length)
	if err != nil {
		quiet.Stop()
		cancel(nil)
		return nil, err
	}
	return &lively{body, quiet, c.quiet, cancel}, nil
}

var errQuiet = errors.New("nothing came for too long")

// lively gives a connection up on which nothing comes any more: of a network that was cut nobody is told.
type lively struct {
	io.ReadCloser
	timer  *time.Timer
	quiet  time.Duration
	cancel context.CancelCauseFunc
}

func (l *lively) Read(p []byte) (int, error) {
	n, err := l.ReadCloser.Read(p)
	l.timer.Reset(l.quiet)
	return n, err
}

func (l *lively) Close() error {
	l.timer.Stop()
	l.cancel(nil)
	return l.ReadCloser.Close()
}

func (c *Control) answer(ctx context.Context, address, path string, offset, length int64) (io.ReadCloser, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, below(address, path), nil)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Authorization", "Bearer "+c.settings.Credential)
	setRange(request, offset, length)
	response, err := c.client.Do(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode == http.StatusTemporaryRedirect {
		response.Body.Close()
		return c.follow(ctx, response, offset, length)
	}
	switch {
	case response.StatusCode == http.StatusPartialContent, response.StatusCode == http.StatusOK && offset == 0:
		return response.Body, nil
	case response.StatusCode == http.StatusNotFound:
		err = ErrMissing
	case response.StatusCode == http.StatusUnauthorized, response.StatusCode == http.StatusForbidden:
		err = ErrDenied
	default:
		err = said(response)
	}
	response.Body.Close()
	return nil, err
}

// follow reads an object where control says that it is. Links are secrets for as long as they are good, so no error names one; one that is
// not good any more is a failure like any other: whoever goes on asks control again.
func (c *Control) follow(ctx context.Context, answer *http.Response, offset, length int64) (io.ReadCloser, error) {
	link, err := url.Parse(answer.Header.Get("Location"))
	if err != nil || link.Host == "" || (link.Scheme != "https" && link.Scheme != "http") || link.User != nil {
		return nil, errors.New("control names a place that is none")
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, link.String(), nil)
	if err != nil {
		return nil, errors.New("control names a place that is none")
	}
	setRange(request, offset, length)
	response, err := c.elsewhere.Do(request)
	if err != nil {
		var of *url.Error
		if errors.As(err, &of) {
			err = of.Err
		}
		return nil, fmt.Errorf("the store at %s: %w", link.Host, err)
	}
	switch {
	case response.StatusCode == http.StatusPartialContent, response.StatusCode == http.StatusOK && offset == 0:
		return response.Body, nil
	case response.StatusCode == http.StatusNotFound:
		err = ErrMissing
	default:
		err = fmt.Errorf("the store at %s answered %d", link.Host, response.StatusCode)
	}
	response.Body.Close()
	return nil, err
}

func setRange(request *http.Request, offset, length int64) {
	if offset <= 0 && length < 0 {
		return
	}
	last := ""
	if length >= 0 {
		last = strconv.FormatInt(offset+length-1, 10)
	}
	request.Header.Set("Range", fmt.Sprintf("bytes=%d-%s", offset, last))
}

package edge

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"time"
)

// registryPath is what the distribution specification has below /v2/, where E2B's second version has its routes too: none of
// those ends like one of these.
var registryPath = regexp.MustCompile(`^/v2/?$|^/v2/_catalog$|^/v2/[a-z0-9][a-z0-9._/-]*/(blobs/(sha(256|512):[0-9a-f]+|uploads/[A-Za-z0-9=_-]*)|manifests/[A-Za-z0-9_][A-Za-z0-9_.:+-]*|tags/list|referrers/[a-z0-9+._-]+:[A-Za-z0-9=_-]+)$`)

// forRegistry says whether a path, as it was sent, is one of the registry's. Those have no escapes and no dot segments.
func forRegistry(escaped string) bool { return registryPath.MatchString(escaped) }

// newRegistry makes the way to the registry's socket.
func newRegistry(socket string, limits Limits) *api {
	way := newAPI(&url.URL{Scheme: "http", Host: "registry"}, limits)
	way.transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, err := dialSocket(ctx, socket)
		if err != nil {
			return nil, &errNoDial{cause: err}
		}
		return conn, nil
	}
	return way
}

// dialSocket reaches a socket however deep its directory: the kernel takes 107 bytes.
func dialSocket(ctx context.Context, socket string) (net.Conn, error) {
	folder, err := os.Open(filepath.Dir(socket))
	if err != nil {
		return nil, err
	}
	defer func() { _ = folder.Close() }()
	dialer := net.Dialer{Timeout: 2 * time.Second}
	return dialer.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", folder.Fd(), filepath.Base(socket)))
}

// serveRegistry carries a request to the registry and its answer back.
func (e *Edge) serveRegistry(w http.ResponseWriter, r *http.Request) {
	x := newExchange(r.Context(), w, r, r.URL, &e.metrics.bytesOut)
	defer x.finish()
	x.out.URL.Scheme, x.out.URL.Host = e.registry.base.Scheme, e.registry.base.Host
	forwarded(x.out.Header, r)
	response, err := e.registry.send(x)
	if err != nil {
		x.giveUpAlone()
		part(w, r)
		status := http.StatusBadGateway
		var noDial *errNoDial
		if errors.As(err, &noDial) {
			w.Header().Set("Retry-After", "1")
			status = http.StatusServiceUnavailable
		}
		registryAway(w, status)
		return
	}
	e.registry.lastHeard.Store(time.Now().UnixNano())
	if x.deliver(response) != nil {
		x.giveUpAlone()
		part(w, r)
		registryAway(w, http.StatusBadGateway)
	}
}

// registryAway answers in the registry's stead, in its form.
func registryAway(w http.ResponseWriter, status int) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(`{"errors":[{"code":"UNAVAILABLE","message":"the registry cannot be reached now"}]}` + "\n"))
}

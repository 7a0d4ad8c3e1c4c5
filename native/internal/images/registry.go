package images

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"atoll.local/native/internal/objects"
	"atoll.local/native/internal/version"
)

// hub is an image in an OCI registry. A mirror is asked first, without the registry's credentials, which are not for it; what it does not
// have, the registry itself has.
type hub struct {
	places  []name.Reference
	options []remote.Option
	// own is the registry itself, and known is who asks there.
	own    name.Reference
	known  authn.Authenticator
	chosen name.Reference
	// asks reads blobs where the image was found.
	mu        sync.Mutex
	asks      *http.Client
	transport http.RoundTripper
}

// userAgent is a function, since the linker sets the version.
func userAgent() string { return "atoll/" + version.Version }

var backoff = remote.Backoff{Duration: 200 * time.Millisecond, Factor: 3, Jitter: 0.2, Steps: 3}

func openRegistry(text string, options Options) (*hub, error) {
	reference, err := name.ParseReference(text)
	if err != nil {
		return nil, failure(CodeInvalid, err, "%.200q is no reference of an image", text)
	}
	guard := &guarded{inner: newTransport(), plain: options.PlainHTTP}
	found := &hub{own: reference, known: options.authenticator(), transport: guard}
	if mirror := options.Mirrors[reference.Context().RegistryStr()]; mirror != "" {
		moved, err := mirrored(reference, mirror)
		if err != nil {
			return nil, err
		}
		found.places = append(found.places, moved)
	}
	found.places = append(found.places, reference)
	found.options = []remote.Option{
		remote.WithTransport(found.transport),
		remote.WithUserAgent(userAgent()),
		remote.WithRetryBackoff(backoff),
	}
	return found, nil
}

// mirrored is the same repository and tag in another place: `host[:port][/prefix]`.
func mirrored(reference name.Reference, mirror string) (name.Reference, error) {
	separator := ":"
	if strings.HasPrefix(reference.Identifier(), "sha256:") {
		separator = "@"
	}
	moved := fmt.Sprintf("%s/%s%s%s", strings.TrimSuffix(mirror, "/"), reference.Context().RepositoryStr(), separator, reference.Identifier())
	found, err := name.ParseReference(moved)
	if err != nil {
		return nil, failure(CodeInvalid, err, "%.200q is no mirror (host[:port][/prefix])", mirror)
	}
	return found, nil
}

func (o *Options) authenticator() authn.Authenticator {
	switch {
	case o.Token != "":
		return &authn.Bearer{Token: o.Token}
	case o.Username != "" || o.Password != "":
		return &authn.Basic{Username: o.Username, Password: o.Password}
	}
	return authn.Anonymous
}

// newTransport has a limit for every wait but that for the body, which ends with the context.
func newTransport() *http.Transport {
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}
	return &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		DialContext:            dialer.DialContext,
		TLSHandshakeTimeout:    10 * time.Second,
		ResponseHeaderTimeout:  60 * time.Second,
		MaxResponseHeaderBytes: 256 << 10,
		MaxIdleConnsPerHost:    parallel,
		IdleConnTimeout:        30 * time.Second,
		ForceAttemptHTTP2:      true,
	}
}

// guarded refuses plain HTTP to whatever is not on this machine: the library would fall back to it for private addresses.
type guarded struct {
	inner http.RoundTripper
	plain []string
}

func (g *guarded) RoundTrip(request *http.Request) (*http.Response, error) {
	if request.URL.Scheme != "https" && !loopback(request.URL.Hostname()) && !slices.Contains(g.plain, request.URL.Host) {
		return nil, fmt.Errorf("plain HTTP to %s is not allowed", request.URL.Host)
	}
	return g.inner.RoundTrip(request)
}

func loopback(host string) bool {
	address := net.ParseIP(host)
	return host == "localhost" || (address != nil && address.IsLoopback())
}

func (r *hub) Close() error { return nil }

func (r *hub) with(ctx context.Context, place name.Reference, more ...remote.Option) []remote.Option {
	asks := authn.Anonymous
	if place == r.own {
		asks = r.known
	}
	return append(append(slices.Clone(r.options), remote.WithContext(ctx), remote.WithAuth(asks)), more...)
}

func (r *hub) Resolve(ctx context.Context, platform Platform) (*Image, error) {
	var err error
	for _, place := range r.places {
		var found *Image
		if found, err = r.resolveAt(ctx, place, platform); err == nil {
			r.chosen = place
			return found, nil
		}
	}
	return nil, err
}

func (r *hub) resolveAt(ctx context.Context, place name.Reference, platform Platform) (*Image, error) {
	wanted := v1.Platform{OS: platform.OS, Architecture: platform.Architecture, Variant: platform.Variant}
	descriptor, err := remote.Get(place, r.with(ctx, place, remote.WithPlatform(wanted))...)
	if err != nil {
		return nil, remoteFailure(err, place.String())
	}
	for range 4 {
		if len(descriptor.Manifest) > documentBytesMax {
			return nil, failure(CodeRefused, nil, "the manifest has more than %d bytes", documentBytesMax)
		}
		read, err := parseDocument(descriptor.Manifest)
		if err != nil {
			return nil, err
		}
		if digest := digestOf(descriptor.Manifest); digest != descriptor.Digest.String() {
			return nil, failure(CodeCorrupt, nil, "manifest %s is in truth %s", descriptor.Digest, digest)
		}
		if !read.isIndex() {
			return imageOf(descriptor.Digest.String(), descriptor.Manifest)
		}
		chosen, err := read.choose(platform)
		if err != nil {
			return nil, err
		}
		if !digestForm.MatchString(chosen.Digest) {
			return nil, failure(CodeRefused, nil, "%.80q is no SHA-256 digest", chosen.Digest)
		}
		if descriptor, err = remote.Get(place.Context().Digest(chosen.Digest), r.with(ctx, place)...); err != nil {
			return nil, remoteFailure(err, place.String())
		}
	}
	return nil, failure(CodeRefused, nil, "the image's indexes are nested too deeply")
}

// Blob asks by itself, since the library reads blobs from their first byte only.
func (r *hub) Blob(ctx context.Context, blob Descriptor, at int64) (io.ReadCloser, error) {
	client, err := r.client(ctx)
	if err != nil {
		return nil, remoteFailure(err, blob.Digest)
	}
	where := r.chosen.Context()
	path := fmt.Sprintf("%s://%s/v2/%s/blobs/%s", where.Scheme(), where.RegistryStr(), where.RepositoryStr(), blob.Digest)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, path, nil)
	if err != nil {
		return nil, remoteFailure(err, blob.Digest)
	}
	if at > 0 {
		request.Header.Set("Range", fmt.Sprintf("bytes=%d-", at))
	}
	answer, err := client.Do(request)
	if err != nil {
		return nil, remoteFailure(err, blob.Digest)
	}
	err = transport.CheckError(answer, http.StatusOK, http.StatusPartialContent)
	if err == nil && at > 0 && answer.StatusCode == http.StatusOK {
		// It does not know ranges, and sends what is here already once more.
		_, err = io.CopyN(io.Discard, answer.Body, at)
	}
	if err != nil {
		answer.Body.Close()
		return nil, remoteFailure(err, blob.Digest)
	}
	return answer.Body, nil
}

// client is logged in once for all blobs.
func (r *hub) client(ctx context.Context) (*http.Client, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.asks == nil {
		where, who := r.chosen.Context(), authn.Anonymous
		if r.chosen == r.own {
			who = r.known
		}
		inner := transport.NewUserAgent(transport.NewRetry(r.transport, transport.WithRetryBackoff(backoff)), userAgent())
		logged, err := transport.NewWithContext(ctx, where.Registry, who, inner, []string{where.Scope(transport.PullScope)})
		if err != nil {
			return nil, err
		}
		r.asks = &http.Client{Transport: logged}
	}
	return r.asks, nil
}

// remoteFailure says what a registry's answer means for whoever asked for the image.
func remoteFailure(err error, what string) error {
	var answered *transport.Error
	if errors.As(err, &answered) {
		switch answered.StatusCode {
		case http.StatusUnauthorized, http.StatusForbidden:
			return failure(CodeDenied, nil, "the registry does not give %s to this account (status %d)", what, answered.StatusCode)
		case http.StatusNotFound:
			return failure(CodeUnavailable, objects.ErrMissing, "the registry has no %s", what)
		}
		return failure(CodeUnavailable, nil, "the registry answered %d to %s", answered.StatusCode, what)
	}
	return failure(CodeUnavailable, err, "%s cannot be fetched", what)
}

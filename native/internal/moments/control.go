package moments

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"

	"atoll.local/native/internal/objects"
)

// Control is the store by way of control, which knows what a host may send and have; what is kept in a bucket goes there and comes from there by
// links that are good for a while.
type Control struct {
	control *objects.Control
	lock    sync.Mutex
	links   map[string]string
}

// OpenControl talks to nobody yet.
func OpenControl(settings objects.ControlSettings) (*Control, error) {
	control, err := objects.OpenControl(settings)
	if err != nil {
		return nil, failure(CodeInvalid, err, "control cannot be reached so")
	}
	return &Control{control: control, links: map[string]string{}}, nil
}

// Manifest implements Remote.
func (c *Control) Manifest(ctx context.Context, digest string) ([]byte, error) {
	if !digestForm.MatchString(digest) {
		return nil, failure(CodeInvalid, nil, "%.80q is no SHA-256 digest", digest)
	}
	return c.document(ctx, "moments/"+digest)
}

// Last implements Remote.
func (c *Control) Last(ctx context.Context, of string) ([]byte, error) {
	return c.document(ctx, "moments/"+of+"/last")
}

func (c *Control) document(ctx context.Context, path string) ([]byte, error) {
	body, err := c.control.Read(ctx, path, 0, -1)
	if err != nil {
		return nil, meant(err, "the manifest of a moment")
	}
	defer body.Close()
	content, err := readAll(body, ManifestBytesMax)
	var known *Error
	if err != nil && !errors.As(err, &known) {
		return nil, meant(err, "the manifest of a moment")
	}
	return content, err
}

// Pack implements Remote.
func (c *Control) Pack(ctx context.Context, moment, pack string, offset, length int64) (io.ReadCloser, error) {
	body, err := c.control.Read(ctx, "moments/"+moment+"/packs/"+pack, offset, length)
	if err != nil {
		return nil, meant(err, "a pack")
	}
	return body, nil
}

// Missing implements Remote.
func (c *Control) Missing(ctx context.Context, of string, packs []string) ([]string, error) {
	var missing []string
	for len(packs) > 0 {
		some := packs[:min(len(packs), askedMax)]
		packs = packs[len(some):]
		asked, err := json.Marshal(map[string][]string{"packs": some})
		if err != nil {
			return nil, err
		}
		answer, err := c.control.Send(ctx, http.MethodPost, "moments/"+of+"/missing", nil, asked)
		if err != nil {
			return nil, meant(err, "which packs are missing")
		}
		var said struct {
			Missing []struct {
				Pack string `json:"pack"`
				Link string `json:"link"`
			} `json:"missing"`
		}
		if json.Unmarshal(answer, &said) != nil {
			return nil, failure(CodeUnavailable, nil, "control's answer makes no sense")
		}
		c.lock.Lock()
		for _, one := range said.Missing {
			missing = append(missing, one.Pack)
			c.links[one.Pack] = one.Link
		}
		c.lock.Unlock()
	}
	return missing, nil
}

const askedMax = 512

// PutPack implements Remote.
func (c *Control) PutPack(ctx context.Context, of, pack string, content []byte) error {
	c.lock.Lock()
	link := c.links[pack]
	delete(c.links, pack)
	c.lock.Unlock()
	if link != "" {
		if err := c.control.PutAt(ctx, link, content); err != nil {
			return failure(CodeUnavailable, err, "a pack could not be sent")
		}
		return nil
	}
	_, err := c.control.Send(ctx, http.MethodPut, "moments/"+of+"/packs/"+pack, octets, content)
	return meant(err, "a pack")
}

// PutManifest implements Remote.
func (c *Control) PutManifest(ctx context.Context, of, digest string, bases []string, content []byte) error {
	header := octets.Clone()
	if len(bases) > 0 {
		header.Set("Atoll-Bases", strings.Join(bases, ","))
	}
	_, err := c.control.Send(ctx, http.MethodPut, "moments/"+of+"/manifests/"+digest, header, content)
	return meant(err, "the manifest of a moment")
}

var octets = http.Header{"Content-Type": {"application/octet-stream"}}

// meant gives a failure its code: what control says where it is one of ours, else that the store is away, which may pass.
func meant(err error, what string) error {
	if err == nil {
		return nil
	}
	var said *objects.Said
	switch {
	case errors.Is(err, objects.ErrDenied):
		return failure(CodeForbidden, err, "%s is not for this host", what)
	case errors.As(err, &said) && said.Status < http.StatusInternalServerError && said.Status != http.StatusTooManyRequests && said.Code != "":
		return failure(said.Code, nil, "%s", said.Message)
	case errors.As(err, &said) && said.Code != "" && said.Code != CodeInternal:
		return failure(CodeUnavailable, nil, "%s: %s", said.Code, said.Message)
	}
	return failure(CodeUnavailable, err, "%s could not be had", what)
}

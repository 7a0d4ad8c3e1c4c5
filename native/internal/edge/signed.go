package edge

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"sync"
	"time"
)

const (
	locatedTTL   = 30 * time.Second
	unlocatedTTL = time.Second
	locatedMax   = 4096
)

// locator finds the sandbox of a signed file URL that doesn't name it. Control tries the signature on live sandboxes,
// which is dear: answers are kept, equal questions asked once, and each client may cause a few only.
type locator struct {
	control *controlClient
	rates   *rates
	slots   chan struct{}

	mu    sync.Mutex
	calls map[locateKey]*locateCall
	known map[locateKey]located
}

type locateKey struct {
	path, operation, username, signature string
	expiration                           int64
	expires                              bool
}

type locateCall struct {
	done chan struct{}
	id   string
	err  error
}

type located struct {
	id    string // empty: nobody's
	until time.Time
}

func newLocator(control *controlClient) *locator {
	return &locator{
		control: control,
		rates:   newRates(20, 40),
		slots:   make(chan struct{}, 4),
		calls:   make(map[locateKey]*locateCall),
		known:   make(map[locateKey]located),
	}
}

// find returns the sandbox's id. Errors: errNotFound, errAway, errRate, errBusy, ctx's.
func (l *locator) find(ctx context.Context, key locateKey, client string) (string, error) {
	l.mu.Lock()
	if answer, ok := l.known[key]; ok && time.Now().Before(answer.until) {
		l.mu.Unlock()
		if answer.id == "" {
			return "", errNotFound
		}
		return answer.id, nil
	}
	c, asked := l.calls[key]
	if !asked {
		var err error
		if len(l.calls) >= 64 {
			err = errBusy
		} else if !l.rates.take(client) {
			err = errRate
		}
		if err != nil {
			l.mu.Unlock()
			return "", err
		}
		c = &locateCall{done: make(chan struct{})}
		l.calls[key] = c
		go l.carryOut(key, c)
	}
	l.mu.Unlock()
	select {
	case <-c.done:
		return c.id, c.err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func (l *locator) carryOut(key locateKey, c *locateCall) {
	signed := signedPath{Path: key.path, Operation: key.operation, Username: key.username, Signature: key.signature}
	if key.expires {
		signed.Expiration = &key.expiration
	}
	l.slots <- struct{}{}
	c.id, c.err = l.control.locate(context.Background(), signed)
	<-l.slots
	l.mu.Lock()
	delete(l.calls, key)
	if len(l.known) >= locatedMax {
		clear(l.known)
	}
	if c.err == nil {
		l.known[key] = located{id: c.id, until: time.Now().Add(locatedTTL)}
	} else if errors.Is(c.err, errNotFound) {
		l.known[key] = located{until: time.Now().Add(unlocatedTTL)}
	}
	l.mu.Unlock()
	close(c.done)
}

// forget drops what is known of a URL whose sandbox turned out to be gone.
func (l *locator) forget(key locateKey) {
	l.mu.Lock()
	delete(l.known, key)
	l.mu.Unlock()
}

// signedKey reads a signed URL. Its parts are as the guest reads them.
func signedKey(r *http.Request) (locateKey, bool) {
	query := r.URL.Query()
	key := locateKey{path: query.Get("path"), username: query.Get("username"), signature: query.Get("signature")}
	method := r.Method
	if method == http.MethodOptions {
		method = r.Header.Get("Access-Control-Request-Method")
	}
	switch method {
	case http.MethodGet, http.MethodHead:
		key.operation = "read"
	case http.MethodPost, http.MethodPut:
		key.operation = "write"
	default:
		return locateKey{}, false
	}
	if text := query.Get("signature_expiration"); text != "" {
		seconds, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return locateKey{}, false
		}
		key.expiration, key.expires = seconds, true
	}
	fits := len(key.path) <= 8192 && len(key.username) <= 256 && len(key.signature) <= 256
	return key, fits
}

// guestError is how the guest complains about a file request.
type guestError struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

// serveSigned finds whose signed URL it is and carries the request there.
func (e *Edge) serveSigned(w http.ResponseWriter, r *http.Request, t target) {
	key, ok := signedKey(r)
	if !ok {
		e.metrics.refused(http.StatusBadRequest)
		writeJSON(w, http.StatusBadRequest, guestError{Code: http.StatusBadRequest, Message: "invalid signed URL"})
		return
	}
	id, err := e.locator.find(r.Context(), key, clientAddress(r))
	switch {
	case err == nil:
		if _, verdict := e.table.find(id); verdict == gone {
			e.locator.forget(key)
		}
		t.sandboxID = id
		e.serveSandbox(w, r, t)
	case errors.Is(err, errNotFound):
		message := "invalid signature"
		if key.expires && key.expiration < time.Now().Unix() {
			message = "signature is already expired"
		}
		e.metrics.refused(http.StatusUnauthorized)
		w.Header().Set("Access-Control-Allow-Origin", "*")
		writeJSON(w, http.StatusUnauthorized, guestError{Code: http.StatusUnauthorized, Message: message})
	case errors.Is(err, errRate), errors.Is(err, errBusy):
		e.metrics.refused(http.StatusTooManyRequests)
		sandboxError{Message: "Too many signed URLs to look up", Code: http.StatusTooManyRequests}.write(w, r)
	default:
		e.metrics.refused(http.StatusServiceUnavailable)
		notYetKnown("").write(w, r)
	}
}

// Package files is the REST side of files: download, upload, compose, with signed URLs and metadata.
//
// The guest reads and writes as root and gives what it makes to the user: whoever holds the sandbox's token may be any
// user in it anyway. Read files.go (who may, and where), then download.go, upload.go, compose.go.
package files

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"atoll.local/native/internal/guest/answer"
	"atoll.local/native/internal/guest/identity"
	"atoll.local/native/internal/guest/paths"
	"atoll.local/native/internal/guest/settings"
	"atoll.local/native/internal/guest/threads"
	"atoll.local/native/internal/guest/users"
)

// Files serves /files and /files/compose.
type Files struct {
	identity *identity.Identity
	slots    threads.Slots
	now      func() time.Time
	idle     time.Duration
}

// uploadIdle is how long an upload may bring nothing before it is given up.
const uploadIdle = 60 * time.Second

// New makes the service; it waits for disks in slots, and now is the clock that signatures expire by.
func New(who *identity.Identity, slots threads.Slots, now func() time.Time) *Files {
	return &Files{identity: who, slots: slots, now: now, idle: uploadIdle}
}

// failure is an error with its HTTP status.
type failure struct {
	status  int
	message string
}

func (f *failure) Error() string { return f.message }

func failf(status int, format string, args ...any) *failure {
	return &failure{status, fmt.Sprintf(format, args...)}
}

func respond(w http.ResponseWriter, err error) {
	var f *failure
	if !errors.As(err, &f) {
		f = failf(http.StatusInternalServerError, "%v", err)
	}
	answer.Error(w, f.status, "%s", f.message)
}

// diskError words a full disk; anything else stays a 500 with its context.
func diskError(context string, err error) *failure {
	if paths.IsNoSpace(err) {
		return failf(http.StatusInsufficientStorage, "not enough disk space available")
	}
	return failf(http.StatusInternalServerError, "%s: %v", context, err)
}

// access is an admitted request: as whom, and with which settings.
type access struct {
	user   *users.User
	values *settings.Values
}

// resolve makes the path absolute by the caller's rules.
func (a *access) resolve(path string) (string, error) {
	resolved, err := paths.Resolve(path, a.user, a.values.DefaultWorkdir)
	if err != nil {
		return "", failf(http.StatusBadRequest, "error resolving path: %v", err)
	}
	return resolved, nil
}

// The operations that a signature names.
const (
	operationRead  = "read"
	operationWrite = "write"
)

// admit checks token or signature, then finds the user.
func (f *Files) admit(r *http.Request, query url.Values, operation string) (*access, error) {
	values := f.identity.Settings.Current()
	if err := checkSignature(r.Header.Get("X-Access-Token"), query, operation, values.AccessToken, f.now()); err != nil {
		return nil, failf(http.StatusUnauthorized, "%v", err)
	}
	return f.as(query.Get("username"), values)
}

// as finds the named user, or the default one for the empty name.
func (f *Files) as(name string, values *settings.Values) (*access, error) {
	if name == "" {
		name = values.DefaultUser
	}
	if name == "" {
		return nil, failf(http.StatusBadRequest, "no user specified")
	}
	user, err := f.identity.Users.Lookup(name)
	if err != nil {
		return nil, failf(http.StatusUnauthorized, "error looking up user '%s': %v", name, err)
	}
	return &access{user, values}, nil
}

// checkSignature admits by access token, or by a signature over path, operation, user name and expiry.
//
// Source: the SDKs sign `path:operation:user:token[:expiration]`, the user being empty for the default one.
func checkSignature(header string, query url.Values, operation string, token settings.Secret, now time.Time) error {
	if !token.IsSet() {
		return nil
	}
	if header != "" {
		if !token.Equals(header) {
			return errors.New("access token present in header but does not match")
		}
		return nil
	}
	if !query.Has("signature") {
		return errors.New("missing signature query parameter")
	}
	parts := []string{query.Get("path"), operation, query.Get("username"), token.Reveal()}
	var expiration int64
	expires := query.Has("signature_expiration")
	if expires {
		var err error
		expiration, err = strconv.ParseInt(query.Get("signature_expiration"), 10, 64)
		if err != nil {
			return errors.New("invalid signature expiration")
		}
		parts = append(parts, strconv.FormatInt(expiration, 10))
	}
	sum := sha256.Sum256([]byte(strings.Join(parts, ":")))
	expected := "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
	if subtle.ConstantTimeCompare([]byte(expected), []byte(query.Get("signature"))) != 1 {
		return errors.New("invalid signature")
	}
	if expires && expiration < now.Unix() {
		return errors.New("signature is already expired")
	}
	return nil
}

package objects

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// TestALinkIsFollowedWithoutCredentials: the store elsewhere gets range and nothing of the host's, and no failure names the link.
func TestALinkIsFollowedWithoutCredentials(t *testing.T) {
	content := "0123456789"
	var status atomic.Int32
	bucket := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" || r.URL.Query().Get("signature") != "secret" {
			t.Errorf("the store saw %v of %s", r.Header, r.URL)
		}
		if code := int(status.Load()); code != 0 {
			w.WriteHeader(code)
			return
		}
		http.ServeContent(w, r, "", time.Time{}, strings.NewReader(content))
	}))
	defer bucket.Close()
	location := bucket.URL + "/atoll/blob?signature=secret"
	control := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer hk_1" {
			t.Errorf("control saw %q", r.Header.Get("Authorization"))
		}
		w.Header().Set("Location", location)
		w.WriteHeader(http.StatusTemporaryRedirect)
	}))
	defer control.Close()
	reader, err := OpenControl(ControlSettings{URLs: []string{control.URL}, Credential: "hk_1"})
	if err != nil {
		t.Fatal(err)
	}
	get := func(offset, length int64) (string, error) {
		body, err := reader.Get(context.Background(), Blob("sha256:"+strings.Repeat("a", 64)), offset, length)
		if err != nil {
			return "", err
		}
		defer body.Close()
		read, err := io.ReadAll(body)
		return string(read), err
	}
	for _, one := range []struct {
		offset, length int64
		want           string
	}{{0, -1, content}, {4, -1, "456789"}, {2, 3, "234"}} {
		if got, err := get(one.offset, one.length); err != nil || got != one.want {
			t.Errorf("%+v: %q, %v", one, got, err)
		}
	}
	for code, is := range map[int]error{http.StatusNotFound: ErrMissing, http.StatusForbidden: nil, http.StatusTemporaryRedirect: nil, 503: nil} {
		status.Store(int32(code))
		_, err := get(0, -1)
		if err == nil || strings.Contains(err.Error(), "secret") || (is != nil && !errors.Is(err, is)) || errors.Is(err, ErrDenied) {
			t.Errorf("%d: %v", code, err)
		}
	}
	bucket.Close()
	if _, err := get(0, -1); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("a store that is away: %v", err)
	}
	for _, wrong := range []string{"", "/relative", "file:///etc/passwd", "ftp://a/b", "http://user:pass@host/x", "::"} {
		location = wrong
		if _, err := get(0, -1); err == nil {
			t.Errorf("%q was followed", wrong)
		}
	}
}

// TestWhatOneReplicaHasNotMayBeWithAnotherThatIsAway: absence is known only once every replica has said so.
func TestWhatOneReplicaHasNotMayBeWithAnotherThatIsAway(t *testing.T) {
	without := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) }))
	defer without.Close()
	away := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }))
	defer away.Close()
	for _, one := range []struct {
		urls    []string
		missing bool
	}{
		{[]string{without.URL, away.URL}, false},
		{[]string{away.URL, without.URL}, false},
		{[]string{without.URL, without.URL}, true},
	} {
		reader, err := OpenControl(ControlSettings{URLs: one.urls, Credential: "hk_1"})
		if err != nil {
			t.Fatal(err)
		}
		_, err = reader.Get(t.Context(), Blob("sha256:"+strings.Repeat("a", 64)), 0, -1)
		if err == nil || errors.Is(err, ErrMissing) != one.missing {
			t.Errorf("%v: %v", one.urls, err)
		}
	}
}

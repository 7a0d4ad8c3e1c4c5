package main

import (
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
)

// as is a request with a token of a team that may keep so much; the guard reads it only, the engine here does not ask for one.
func (w *world) as(team string, limit int64, method, path string, body io.Reader, kind string) *httptest.ResponseRecorder {
	w.t.Helper()
	claims := base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"atoll":{"team":%q,"storage_bytes":%d}}`, team, limit))
	r := httptest.NewRequestWithContext(w.t.Context(), method, path, body)
	r.Header.Set("Authorization", "Bearer x."+claims+".x")
	r.Header.Set("Content-Type", kind)
	said := httptest.NewRecorder()
	w.server.Config.Handler.ServeHTTP(said, r)
	return said
}

func (w *world) send(team string, limit int64, repository, content string, chunked bool) *httptest.ResponseRecorder {
	w.t.Helper()
	begun := w.as(team, limit, "POST", "/v2/"+repository+"/blobs/uploads/", nil, "")
	if begun.Code != http.StatusAccepted {
		return begun
	}
	var body io.Reader = strings.NewReader(content)
	if chunked {
		body = iotest.OneByteReader(body) // of a length that nobody says before
	}
	path := begun.Header().Get("Location") + "&digest=" + sum([]byte(content))
	return w.as(team, limit, "PUT", path, body, "application/octet-stream")
}

// later forgets what was counted, as time does.
func (w *world) later() { w.server.Config.Handler.(*guard).shares.counted = map[string]*counted{} }

func TestATeamKeepsNoMoreThanItMay(t *testing.T) {
	for _, chunked := range []bool{false, true} {
		for _, counted := range []string{"at once", "anew"} {
			w := newWorld(t, nil)
			if said := w.send("team", 100, "team/app", strings.Repeat("a", 60), chunked); said.Code != http.StatusCreated {
				t.Fatalf("within: %d %s", said.Code, said.Body)
			}
			if counted == "anew" {
				w.later()
			}
			said := w.send("team", 100, "team/other", strings.Repeat("b", 41), chunked)
			if said.Code != http.StatusForbidden || !strings.Contains(said.Body.String(), `"`+limitCode+`"`) {
				t.Fatalf("beyond, chunked %v, counted %s: %d %s", chunked, counted, said.Code, said.Body)
			}
			if said := w.send("other", 100, "other/app", strings.Repeat("b", 41), chunked); said.Code != http.StatusCreated {
				t.Fatalf("another team: %d %s", said.Code, said.Body)
			}
			// What another repository of the team has already takes no more room.
			w.later()
			if kept := newShares(w.touched.names).kept("team"); kept < 60 || kept > 101 {
				t.Fatalf("kept: %d", kept)
			}
		}
	}
}

func TestUploadsAtOnceDoNotShareOneRoom(t *testing.T) {
	w := newWorld(t, nil)
	const count = 8
	done := make(chan int, count)
	for at := range count {
		begun := w.as("team", 1000, "POST", "/v2/team/app/blobs/uploads/", nil, "")
		content := strings.Repeat(fmt.Sprint(at), 300)
		path := begun.Header().Get("Location") + "&digest=" + sum([]byte(content))
		go func() {
			done <- w.as("team", 1000, "PUT", path, iotest.HalfReader(strings.NewReader(content)), "application/octet-stream").Code
		}()
	}
	kept := 0
	for range count {
		if <-done == http.StatusCreated {
			kept++
		}
	}
	if kept == 0 || kept > 3 {
		t.Fatalf("%d of 300 bytes fit into 1000", kept)
	}
}

func TestManifestsAndUnfinishedUploadsCount(t *testing.T) {
	w := newWorld(t, nil)
	begun := w.as("team", 1000, "POST", "/v2/team/app/blobs/uploads/", nil, "")
	w.as("team", 1000, "PATCH", begun.Header().Get("Location"), strings.NewReader(strings.Repeat("c", 300)), "application/octet-stream")
	config := w.blob("{}")
	body := manifest(config, 2)
	if said := w.as("team", 1000, "PUT", "/v2/team/app/manifests/one", strings.NewReader(string(body)), manifestKind); said.Code != http.StatusCreated {
		t.Fatalf("manifest: %d %s", said.Code, said.Body)
	}
	if kept := newShares(w.touched.names).kept("team"); kept != int64(300+2+len(body)) {
		t.Fatalf("kept %d", kept)
	}
	if said := w.as("team", 302, "PUT", "/v2/team/app/manifests/two", strings.NewReader(string(body)), manifestKind); said.Code != http.StatusForbidden {
		t.Fatalf("a manifest beyond: %d", said.Code)
	}
}

func TestE2BsNamesCountForTheTeamThatMadeThem(t *testing.T) {
	w := newWorld(t, nil)
	if said := w.send("team", 100, others+"/t1", strings.Repeat("d", 60), false); said.Code != http.StatusCreated {
		t.Fatalf("first: %d", said.Code)
	}
	w.later()
	if said := w.send("team", 100, others+"/t2", strings.Repeat("e", 41), false); said.Code != http.StatusForbidden {
		t.Fatalf("beyond, under another name: %d", said.Code)
	}
	w.send("*", 100, "team/app", "f", false)
	usage := httptest.NewRecorder()
	newShares(w.touched.names).ServeHTTP(usage, nil)
	if strings.TrimSpace(usage.Body.String()) != `{"teams":{"team":61}}` {
		t.Fatalf("usage: %s", usage.Body)
	}
	// The engine's list of repositories goes on past our note.
	w.blob("{}")
	w.collect(false)
	w.age()
	if done := w.collect(false); len(done.Blobs) != 3 {
		t.Fatalf("collection: %+v", done)
	}
}

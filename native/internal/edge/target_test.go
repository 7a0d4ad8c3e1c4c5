package edge

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path"
	"strings"
	"testing"
)

func TestFindTarget(t *testing.T) {
	const id = "iabc"
	for _, c := range []struct {
		host, path, headerID, headerPort string
		want                             string
	}{
		{host: "api.test", path: "/sandboxes", want: "api"},
		{host: "localhost:3000", path: "/sandboxes", want: "api"},
		{host: "127.0.0.1:3000", path: "/", want: "api"},
		{host: "[::1]:3000", path: "/", want: "api"},
		{host: "", path: "/", want: "api"},
		{host: "api.localhost", path: "/", want: "api"},
		{host: "3000.sbx.test", path: "/", want: "api"},
		{host: "my-app.sbx.test", path: "/", want: "api"},
		{host: "3000-iabc.other.test", path: "/", want: "api"},
		{host: "3000-iabc", path: "/", want: "api"},
		{host: "a.3000-iabc.sbx.test", path: "/", want: "api"},
		{host: "3000-iabc.sbx.test", path: "/x", want: "iabc 3000 /x"},
		{host: "3000-IABC.SBX.TEST.:8443", path: "/x", want: "iabc 3000 /x"},
		{host: "3000-iabc-client.sbx.test", path: "/", want: "iabc 3000 /"},
		{host: "0-iabc.sbx.test", path: "/", want: "Invalid sandbox port"},
		{host: "99999-iabc.sbx.test", path: "/", want: "Invalid sandbox port"},
		{host: "3000-i_abc.sbx.test", path: "/", want: "Invalid sandbox ID"},
		{host: "3000-.sbx.test", path: "/", want: "Invalid sandbox ID"},
		{host: "x", path: "/", headerID: id, want: "iabc 49983 /"},
		{host: "x", path: "/", headerID: id, headerPort: "80", want: "iabc 80 /"},
		{host: "80-iabc.sbx.test", path: "/", headerID: id, want: "iabc 80 /"},
		{host: "80-iother.sbx.test", path: "/", headerID: id, want: "iabc 49983 /"},
		{host: "80-iother.sbx.test", path: "/", headerID: id + "-c", headerPort: "81", want: "iabc 81 /"},
		{host: "x", path: "/", headerID: " ", want: "Invalid sandbox ID"},
		{host: "x", path: "/", headerID: id, headerPort: "080000", want: "Invalid sandbox port"},
		{host: "x", path: "/files?signature=v1_x&path=/a", want: "signed"},
		{host: "x", path: "/files?signature=", want: "api"},
		{host: "x", path: "/files/compose?signature=x", want: "api"},
		{host: "x", path: "/atoll/sandbox/iabc/80/a%2Fb?q", want: "iabc 80 /a%2Fb"},
		{host: "x", path: "/atoll/sandbox/iabc/80", want: "iabc 80 /"},
		{host: "x", path: "/atoll/sandbox/iabc/80//", want: "iabc 80 //"},
		{host: "x", path: "/atoll/sandbox/iabc", want: "Invalid sandbox port"},
		{host: "x", path: "/atoll/sandbox//80/", want: "Invalid sandbox ID"},
		{host: "x", path: "/atoll/sandbox/../80/", want: "Invalid sandbox ID"},
		{host: "x", path: "/atoll%2Fsandbox/iabc/80/", want: "api"},
	} {
		u, err := url.ParseRequestURI(c.path)
		if err != nil {
			t.Fatal(err)
		}
		r := &http.Request{Host: c.host, URL: u, Header: http.Header{}}
		if c.headerID != "" {
			r.Header.Set(headerID, c.headerID)
		}
		if c.headerPort != "" {
			r.Header.Set(headerPort, c.headerPort)
		}
		found := findTarget(r, "sbx.test")
		got := map[aim]string{
			aimAPI: "api", aimSigned: "signed", aimInvalid: found.complaint,
		}[found.aim]
		if found.aim == aimSandbox {
			got = fmt.Sprintf("%s %d %s", found.sandboxID, found.port, found.url.EscapedPath())
		}
		if got != c.want {
			t.Errorf("%+v: got %q", c, got)
		}
	}
}

func TestReserved(t *testing.T) {
	for _, escaped := range []string{
		"/init", "/init/", "//init", "///init", "/./init", "/.//init", "/x/../init", "/x/y/../../init", "/%69nit", "/%2569nit", "/%252569nit",
		"/%2e/init", "/x/%2e%2e/init", "/x%2f..%2finit", `/x/..\init`, `\init`, "/INIT", "/Init", "/init;x=1", "/init%3Bx", "/%20init", "/init%20",
		"/init%00", "/atoll", "/atoll/hello", "/atoll//connect/80", "/x/..//atoll/init", "/%61toll/x", "/upgrade", "/freeze", "/unfreeze",
		"/collapse", "/fsfreeze", "/fsthaw", "/../init", "/%2e%2e/init", "init", "/init/../files", "/a/%252e%252e/init",
	} {
		if !reserved(escaped, guestInternal) {
			t.Errorf("%s is let through", escaped)
		}
	}
	for _, escaped := range []string{
		"/", "", "/files", "/process.Process/Start", "/initial", "/x/init", "/health", "/metrics", "/envs", "/a%20b", "/%E2%82%AC", "/100%25", "/atolls",
	} {
		if reserved(escaped, guestInternal) {
			t.Errorf("%s is refused", escaped)
		}
	}
}

// However a server reads a path, what it serves as reserved must have been refused.
func FuzzReserved(f *testing.F) {
	for _, seed := range []string{"/init", "/%69nit", "//x/../init", "/a/%2e%2e/atoll", "/files", `/\init`, "/init;a"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, escaped string) {
		u, err := url.ParseRequestURI("/" + strings.TrimPrefix(escaped, "/"))
		if err != nil {
			return
		}
		raw := u.EscapedPath()
		if reserved(raw, guestInternal) {
			return
		}
		for _, reading := range []string{raw, u.Path, path.Clean(raw), path.Clean(u.Path), strings.TrimLeft(u.Path, "/")} {
			first, _, _ := strings.Cut(strings.TrimLeft(reading, "/"), "/")
			if guestInternal[first] {
				t.Fatalf("%q is let through and may be read as %q", escaped, reading)
			}
		}
	})
}

func FuzzFindTarget(f *testing.F) {
	f.Add("3000-iabc.sbx.test:80", "/atoll/sandbox/iabc/80/x", "iabc-c", "80")
	f.Add("localhost", "/files?signature=x", "", "")
	f.Fuzz(func(t *testing.T, host, target, id, port string) {
		u, err := url.ParseRequestURI(target)
		if err != nil {
			return
		}
		r := &http.Request{Host: host, URL: u, Header: http.Header{}}
		if id != "" {
			r.Header[headerID] = []string{id}
		}
		if port != "" {
			r.Header[headerPort] = []string{port}
		}
		found := findTarget(r, "sbx.test")
		switch found.aim {
		case aimSandbox:
			if !validID(found.sandboxID) || found.port < 1 || found.port > 65535 || found.url == nil {
				t.Fatalf("%+v", found)
			}
			if !strings.HasPrefix(found.url.RequestURI(), "/") && found.url.Opaque == "" && found.url.Path != "*" && found.url.Host == "" {
				t.Fatalf("%q", found.url.RequestURI())
			}
		case aimInvalid:
			if found.complaint == "" {
				t.Fatal("invalid without a complaint")
			}
		}
	})
}

func FuzzHeaders(f *testing.F) {
	f.Add("keep-alive, Upgrade", "websocket", "trailers;q=1")
	f.Fuzz(func(t *testing.T, connection, upgrade, te string) {
		header := http.Header{"Connection": {connection}, "Upgrade": {upgrade}, "Te": {te}, "X-Kept": {"1"}}
		copied, kept := onward(header)
		if copied.Get("Transfer-Encoding") != "" || kept == "" && copied.Get("Upgrade") != "" || te != "" && copied.Get("Te") != "" && copied.Get("Te") != "trailers" {
			t.Fatalf("%v", copied)
		}
		if header.Get("Upgrade") != upgrade {
			t.Fatal("the client's headers were changed")
		}
	})
}

func TestInternalRoutesOfTheGuestAreRefused(t *testing.T) {
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "GUEST "+r.URL.Path) })
	user := g.serve(0, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "user "+r.URL.Path) }))
	for _, path := range []string{"/init", "//init", "/%69nit", "/x/..%2Finit", "/atoll/hello", "/atoll/connect/22", "/fsthaw"} {
		r, _ := http.NewRequest(http.MethodPost, te.url, nil)
		r.URL.Opaque = "//" + te.address + path // as it is, unnormalised
		r.Header.Set(headerID, g.id)
		response, body := do(t, r)
		if response.StatusCode != 404 || strings.Contains(body, "GUEST") {
			t.Errorf("%s: %d %s", path, response.StatusCode, body)
		}
		r, _ = http.NewRequest(http.MethodPost, te.url, nil)
		r.URL.Opaque = fmt.Sprintf("//%s/atoll/sandbox/%s/49983%s", te.address, g.id, path)
		if response, body = do(t, r); response.StatusCode != 404 || strings.Contains(body, "GUEST") {
			t.Errorf("by path, %s: %d %s", path, response.StatusCode, body)
		}
		r, _ = http.NewRequest(http.MethodPost, te.url, nil)
		r.URL.Opaque = "//" + te.address + path
		r.Host = fmt.Sprintf("%d-%s.sandboxes.test", g.guestPort, g.id) // the port where the guest really is
		if response, body = do(t, r); response.StatusCode != 404 || strings.Contains(body, "GUEST") {
			t.Errorf("by host, %s: %d %s", path, response.StatusCode, body)
		}
	}
	response, body := te.get(t, "/init", g.id, user)
	expect(t, response, body, 200, "user /init")
}

func TestTrafficTokens(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	g := newGuest(t)
	route := g.serveGuest(say("guest"))
	sum := sha256.Sum256([]byte("open sesame"))
	digest := hex.EncodeToString(sum[:])
	route.PublicTraffic, route.TrafficTokenSHA256 = false, &digest
	control.put(route)
	te.waitFor(t, g.id)
	port := g.serve(0, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "user %q %q", r.Header.Get(headerTrafficToken), r.Header.Get("X-Access-Token"))
	}))
	response, body := te.get(t, "/", g.id, port)
	expect(t, response, body, 403, `{"sandboxId":"`+g.id+
		`","message":"Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing","code":403}`)
	for token, status := range map[string]int{"wrong": 403, "open sesame": 200, digest: 403} {
		r := te.request(t, http.MethodGet, "/", g.id, port, nil)
		r.Header.Set("E2B-Traffic-Access-Token", token)
		r.Header.Set("X-Access-Token", "kept")
		response, body = do(t, r)
		if response.StatusCode != status || status == 200 && body != `user "" "kept"` {
			t.Errorf("%s: %d %s", token, response.StatusCode, body)
		}
	}
	response, body = te.get(t, "/", g.id, 0)
	expect(t, response, body, 200, "guest")
	// Private and without a token: nobody's.
	route.TrafficTokenSHA256, route.Revision = nil, 9
	control.put(route)
	eventually(t, "the change is there", func() bool { e, _ := te.table.find(g.id); return e.route.Revision == 9 })
	r := te.request(t, http.MethodGet, "/", g.id, port, nil)
	r.Header.Set(headerTrafficToken, "open sesame")
	if response, _ = do(t, r); response.StatusCode != 403 {
		t.Fatal(response.Status)
	}
}

func TestWhatAUsersServerSees(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	g := newGuest(t)
	echo := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s|%s|%s|%s|%s", r.Host, r.Header.Get(headerID), r.Header.Get("X-Forwarded-For"), r.Header.Get("X-Forwarded-Host"), r.UserAgent())
	})
	route := g.serveGuest(echo)
	mask := "app.example:${PORT}"
	route.MaskRequestHost = &mask
	control.put(route)
	te.waitFor(t, g.id)
	port := g.serve(0, echo)
	get := func(port int) string {
		r := te.request(t, http.MethodGet, "/", g.id, port, nil)
		r.Header["User-Agent"] = []string{""}
		_, body := do(t, r)
		return body
	}
	if got, want := get(port), fmt.Sprintf("app.example:%d||127.0.0.1|%s|", port, te.address); got != want {
		t.Errorf("user: %s, want %s", got, want)
	}
	if got, want := get(0), fmt.Sprintf("%s|%s|||", te.address, g.id); got != want {
		t.Errorf("guest: %s, want %s", got, want)
	}
}

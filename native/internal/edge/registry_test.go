package edge

import (
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
)

func TestTheRegistrysPathsAreItsOwn(t *testing.T) {
	digest := "sha256:" + strings.Repeat("a", 64)
	for path, want := range map[string]bool{
		"/v2": true, "/v2/": true, "/v2/_catalog": true,
		"/v2/team/app/manifests/latest":             true,
		"/v2/team/deep/er/app/manifests/" + digest:  true,
		"/v2/team/app/blobs/" + digest:              true,
		"/v2/team/app/blobs/sha512:0a":              true,
		"/v2/team/app/blobs/uploads/":               true,
		"/v2/team/app/blobs/uploads/0b1c-2d_=":      true,
		"/v2/team/app/tags/list":                    true,
		"/v2/team/app/referrers/" + digest:          true,
		"/v2/e2b/custom-envs/abc/manifests/0b1c-2d": true,
		"/v2/sandboxes":                             false,
		"/v2/sandboxes/i0123/connect":               false,
		"/v2/templates":                             false,
		"/v2/templates/t1/builds/b1":                false,
		"/v2/sandboxes/i0123/logs":                  false,
		"/v2/team/app/blobs/uploads/../../secret":   false,
		"/v2/team/%2e%2e/app/tags/list":             false,
		"/v2/Team/app/tags/list":                    false,
		"/v2/team/app/manifests/":                   false,
		"/v2/team/app/manifests/a/b":                false,
		"/v2/team/app/blobs/md5:0a":                 false,
		"/v2//tags/list":                            false,
		"/v1/team/app/tags/list":                    false,
		"/v3/templates":                             false,
		"/":                                         false,
	} {
		if forRegistry(path) != want {
			t.Errorf("%s: the registry's is %v", path, !want)
		}
	}
}

// registryAt answers on a socket, deep enough that its whole name would not do, with its own name.
func registryAt(t *testing.T) string {
	t.Helper()
	folder := t.TempDir()
	t.Chdir(folder)
	socket := filepath.Join(folder, "registry.sock")
	listener, err := net.Listen("unix", "registry.sock")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Seen", r.Method+" "+r.URL.RequestURI()+" "+r.Header.Get("X-Forwarded-Host"))
		_, _ = io.Copy(w, r.Body)
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	return socket
}

func TestRequestsReachTheRegistryOrControl(t *testing.T) {
	control := newFakeControl(t)
	control.setAPI(func(w http.ResponseWriter, r *http.Request) { w.Header().Set("Seen", "control "+r.URL.Path) })
	socket := registryAt(t)
	te := startEdge(t, control, func(config *Config) { config.Registry = socket })
	ask := func(method, path, body string) (*http.Response, string) {
		request, err := http.NewRequestWithContext(t.Context(), method, te.url+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = response.Body.Close() }()
		said, _ := io.ReadAll(response.Body)
		return response, string(said)
	}
	host := strings.TrimPrefix(te.url, "http://")
	response, said := ask("PATCH", "/v2/team/app/blobs/uploads/1?_state=a%2Fb", "some bytes")
	if got := response.Header.Get("Seen"); got != "PATCH /v2/team/app/blobs/uploads/1?_state=a%2Fb "+host || said != "some bytes" {
		t.Fatalf("an upload: %q %q", got, said)
	}
	if response, _ = ask("GET", "/v2/sandboxes", ""); response.Header.Get("Seen") != "control /v2/sandboxes" {
		t.Fatalf("E2B's: %q", response.Header.Get("Seen"))
	}
	// Without a registry all of it is control's.
	bare := startEdge(t, control)
	if response, err := http.Get(bare.url + "/v2/team/app/tags/list"); err != nil || response.Header.Get("Seen") != "control /v2/team/app/tags/list" {
		t.Fatalf("without one: %v %v", response, err)
	}
}

func TestARegistryThatIsAwayIsSaidInItsWords(t *testing.T) {
	te := startEdge(t, newFakeControl(t), func(config *Config) { config.Registry = filepath.Join(t.TempDir(), "none.sock") })
	response, err := http.Get(te.url + "/v2/team/app/tags/list")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	said, _ := io.ReadAll(response.Body)
	if response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") == "" || !strings.Contains(string(said), `"UNAVAILABLE"`) {
		t.Fatalf("%d %s", response.StatusCode, said)
	}
}

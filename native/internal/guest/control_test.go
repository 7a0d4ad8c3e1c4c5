package guest

import (
	"bufio"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/golang-jwt/jwt/v5"

	"atoll.local/native/internal/guest/control"
)

// golden reads a message that the Python side's tests read too.
func golden(t testing.TB, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../../src/atoll/wire/golden/guest", name))
	must(t, err)
	return text
}

func TestGoldenMessages(t *testing.T) {
	config, err := control.ParseConfig(golden(t, "config.json"))
	must(t, err)
	want := control.Config{
		SandboxID: "i0123456789abcdefghij", PlacementID: "plc_0123456789abcdefghij", Generation: 1,
		Nonce: "bm9uY2Utb2YtdGhpcy1wbGFjZW1lbnQ", PublicKey: config.PublicKey, Listen: "0.0.0.0:49983",
		Command: []string{"/usr/bin/server", "--port", "8080"}, CommandUser: "user", Ready: []string{"/bin/bash", "-c", "curl -s localhost"},
		PlacementFile: "/.atoll/placement",
	}
	if !reflect.DeepEqual(*config, want) || len(config.PublicKey) != ed25519.PublicKeySize {
		t.Fatalf("%+v", *config)
	}
	// The key of RFC 8032, test 1: the public half is in the golden config.
	seed := []byte("\x9d\x61\xb1\x9d\xef\xfd\x5a\x60\xba\x84\x4a\xf4\x92\xec\x2c\xc4\x44\x49\xc5\x69\x7b\x32\x69\x19\x70\x3b\xac\x03\x1c\xae\x7f\x60")
	config.Command, config.Ready = nil, nil
	b := newRawBox(t, func(o *Options) { o.Config = config })
	b.key = ed25519.NewKeyFromSeed(seed)
	var claims jwt.MapClaims
	must(t, json.Unmarshal(golden(t, "claims.json"), &claims))
	token := b.sign(claims)
	call := func(method, path, body string) (int, string) {
		r := b.request(method, path, strings.NewReader(body))
		r.Header.Set("Authorization", "Bearer "+token)
		return b.do(r)
	}
	status, body := call("GET", "/atoll/hello", "")
	var hello, wantHello map[string]any
	must(t, json.Unmarshal([]byte(body), &hello))
	must(t, json.Unmarshal(golden(t, "hello.json"), &wantHello))
	if hello["boot_monotonic_ms"].(float64) <= 0 {
		t.Errorf("boot_monotonic_ms: %v", hello)
	}
	hello["boot_monotonic_ms"] = wantHello["boot_monotonic_ms"]
	if status != 200 || !reflect.DeepEqual(hello, wantHello) {
		t.Fatalf("%d %s", status, body)
	}
	init := strings.ReplaceAll(string(golden(t, "init.json")), "/run/e2b/", b.root+"/run/e2b/")
	if status, body = call("POST", "/atoll/init", init); status != http.StatusNoContent || body != "" {
		t.Fatalf("%d %s", status, body)
	}
	if _, body = call("GET", "/atoll/hello", ""); !strings.Contains(body, `"init_revision":2`) {
		t.Fatalf("which init it has taken is not said: %s", body)
	}
	content, err := os.ReadFile(b.root + "/run/e2b/.E2B_SANDBOX")
	must(t, err)
	values := b.guest.settings.Current()
	if string(content) != "true" || values.AccessToken.Reveal() != "ea_0123456789abcdef" || values.DefaultUser != "user" ||
		values.DefaultWorkdir != "/home/user" || values.Env["GREETING"] != "Grüße \"you\"" {
		t.Fatalf("%q %+v", content, values)
	}
	if !reflect.DeepEqual(b.machine.clock, []int64{1764442800000000000}) || len(b.machine.entropy[0]) != 32 ||
		b.machine.hostname[0] != "i0123456789abcdefghij" {
		t.Fatalf("%+v", b.machine)
	}
}

func TestConfigIsChecked(t *testing.T) {
	var good map[string]any
	must(t, json.Unmarshal(golden(t, "config.json"), &good))
	for name, change := range map[string]func(map[string]any){
		"key":        func(c map[string]any) { c["public_key"] = "AAAA" },
		"no key":     func(c map[string]any) { delete(c, "public_key") },
		"nonce":      func(c map[string]any) { c["nonce"] = "" },
		"generation": func(c map[string]any) { c["generation"] = 0 },
		"listen":     func(c map[string]any) { c["listen"] = "everywhere" },
		"type":       func(c map[string]any) { c["sandbox_id"] = 1 },
	} {
		c := map[string]any{}
		for k, v := range good {
			c[k] = v
		}
		change(c)
		text, _ := json.Marshal(c)
		if _, err := control.ParseConfig(text); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	delete(good, "listen")
	good["unknown"] = true
	text, _ := json.Marshal(good)
	if c, err := control.ParseConfig(text); err != nil || c.Listen != "0.0.0.0:49983" {
		t.Fatalf("%+v %v", c, err)
	}
}

func TestControlWantsTheExactToken(t *testing.T) {
	b := newRawBox(t, nil)
	_, stranger, err := ed25519.GenerateKey(nil)
	must(t, err)
	tokens := map[string]string{"none": "", "garbage": "x.y.z"}
	for _, claim := range []string{"sub", "plc", "gen", "non", "scp"} {
		changed := b.claims("control")
		changed[claim] = map[string]any{"sub": "i1", "plc": "plc_1", "gen": 4, "non": "n", "scp": []string{"connect"}}[claim]
		tokens["other "+claim] = b.sign(changed)
		delete(changed, claim)
		tokens["no "+claim] = b.sign(changed)
	}
	tokens["another key"], err = jwt.NewWithClaims(jwt.SigningMethodEdDSA, b.claims("control")).SignedString(stranger)
	must(t, err)
	tokens["alg none"], err = jwt.NewWithClaims(jwt.SigningMethodNone, b.claims("control")).SignedString(jwt.UnsafeAllowNoneSignatureType)
	must(t, err)
	// The classic confusion: the public key as the secret of a symmetric algorithm.
	public := []byte(b.key.Public().(ed25519.PublicKey))
	tokens["HS256"], err = jwt.NewWithClaims(jwt.SigningMethodHS256, b.claims("control")).SignedString(public)
	must(t, err)
	for name, token := range tokens {
		for _, path := range []string{"GET /atoll/hello", "POST /atoll/init", "GET /atoll/none"} {
			method, path, _ := strings.Cut(path, " ")
			r := b.request(method, path, strings.NewReader("{}"))
			if token != "" {
				r.Header.Set("Authorization", "Bearer "+token)
			}
			if status, body := b.do(r); status != 401 || body != `{"code":401,"message":"a valid control token is required"}` {
				t.Errorf("%s %s: %d %s", name, path, status, body)
			}
		}
	}
	if b.guest.settings.Latest() != nil {
		t.Fatal("initialised")
	}
	// Time claims are not looked at: the guest's clock is not trusted.
	old := b.claims("control")
	old["exp"] = 1
	r := b.request("GET", "/atoll/hello", nil)
	r.Header.Set("Authorization", "bearer "+b.sign(old))
	if status, body := b.do(r); status != 200 {
		t.Fatalf("%d %s", status, body)
	}
	if status, _ := b.control("GET", "/atoll/none", ""); status != 404 {
		t.Fatal(status)
	}
	// A control token does not open connections.
	if status, _ := b.control("POST", "/atoll/connect/80", ""); status != 401 {
		t.Fatal(status)
	}
}

func TestNothingIsServedBeforeInit(t *testing.T) {
	b := newRawBox(t, nil)
	for _, path := range []string{"GET /envs", "GET /metrics", "GET /files?path=/etc/passwd", "POST /files", "POST /files/compose",
		"POST /process.Process/List", "POST /filesystem.Filesystem/Stat"} {
		method, path, _ := strings.Cut(path, " ")
		if status, body := b.do(b.request(method, path, nil)); status != 503 || body != `{"code":503,"message":"sandbox is not initialised"}` {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	if status, body := b.get("/health"); status != 204 || body != "" {
		t.Fatalf("health: %d %s", status, body)
	}
	b.init(map[string]any{})
	if status, body := b.get("/envs"); status != 200 || body != "{}" {
		t.Fatalf("%d %s", status, body)
	}
	_, body := b.control("GET", "/atoll/hello", "")
	if !strings.Contains(body, `"initialised":true`) {
		t.Fatal(body)
	}
}

func TestNothingIsServedWhileItSleeps(t *testing.T) {
	b := newBox(t)
	b.init(map[string]any{"env": map[string]string{"KEPT": "1"}, "access_token": "t"})
	b.headers.Set("X-Access-Token", "t")
	for range 2 {
		if status, _ := b.control("POST", "/atoll/sleep", ""); status != 204 {
			t.Fatal(status)
		}
	}
	if status, _ := b.get("/envs"); status != 503 {
		t.Fatalf("asleep, and it answers %d", status)
	}
	if _, body := b.control("GET", "/atoll/hello", ""); !strings.Contains(body, `"initialised":false`) {
		t.Fatal(body)
	}
	for range 2 {
		if status, _ := b.control("POST", "/atoll/wake", ""); status != 204 {
			t.Fatal(status)
		}
	}
	if status, body := b.get("/envs"); status != 200 || body != `{"KEPT":"1"}` {
		t.Fatalf("%d %s", status, body)
	}
	if status, _ := b.control("POST", "/atoll/sleep", ""); status != 204 {
		t.Fatal(status)
	}
	b.init(map[string]any{"env": map[string]string{"NEW": "1"}, "access_token": "u"})
	if status, _ := b.control("POST", "/atoll/wake", ""); status != 204 {
		t.Fatal(status)
	}
	b.headers.Set("X-Access-Token", "u")
	if status, body := b.get("/envs"); status != 200 || body != `{"NEW":"1"}` {
		t.Fatalf("an old setting has come back: %d %s", status, body)
	}
	if status, _ := b.do(b.request("POST", "/atoll/sleep", nil)); status != 401 {
		t.Fatalf("without a token it answers %d", status)
	}
}

// What is restored as another sandbox's guest takes the name that its host's file shows, and with its old name loses
// environment and token; a token alone, or a file that says nothing, changes nothing.
func TestARestoredGuestTakesItsNewName(t *testing.T) {
	file := filepath.Join(t.TempDir(), "placement")
	show := func(text string) { must(t, os.WriteFile(file, []byte(text), 0o644)) }
	same := fmt.Sprintf(`{"sandbox_id":%q,"placement_id":%q,"generation":3,"nonce":%q}`, testSandbox, testPlacement, testNonce)
	show(same)
	b := newRawBox(t, func(o *Options) { o.Config.PlacementFile = file })
	b.init(map[string]any{"env": map[string]string{"OLD": "1"}, "access_token": "old"})
	hello := func(token string) (int, string) {
		r := b.request("GET", "/atoll/hello", nil)
		r.Header.Set("Authorization", "Bearer "+token)
		return b.do(r)
	}
	clone := jwt.MapClaims{"sub": "iclone", "plc": "plc_clone", "gen": 1, "non": "other", "scp": []string{"control"}}
	mine := b.sign(b.claims("control"))
	for _, text := range []string{same, "", "{", `{"sandbox_id":"iclone"}`} {
		show(text)
		if status, _ := hello(b.sign(clone)); status != 401 {
			t.Fatalf("%q: another guest's token is answered %d", text, status)
		}
		if status, body := hello(mine); status != 200 || !strings.Contains(body, `"initialised":true`) {
			t.Fatalf("%q: %d %s", text, status, body)
		}
	}
	show(`{"sandbox_id":"iclone","placement_id":"plc_clone","generation":1,"nonce":"other"}`)
	unsigned := &box{t: t, key: ed25519.NewKeyFromSeed(make([]byte, 32))}
	if status, _ := hello(unsigned.sign(clone)); status != 401 {
		t.Fatal("anybody's token is taken")
	}
	if status, body := hello(mine); status != 200 {
		t.Fatalf("nobody has spoken to it as another yet: %d %s", status, body)
	}
	status, body := hello(b.sign(clone))
	if status != 200 || !strings.Contains(body, `"sandbox_id":"iclone"`) || !strings.Contains(body, `"initialised":false`) ||
		!strings.Contains(body, `"init_revision":0`) {
		t.Fatalf("%d %s", status, body)
	}
	if status, _ := hello(mine); status != 401 {
		t.Fatal("its old name is still good")
	}
	b.headers.Set("X-Access-Token", "old")
	if status, _ := b.get("/envs"); status != 503 {
		t.Fatalf("it serves by old settings: %d", status)
	}
	r := b.request("POST", "/atoll/wake", nil)
	r.Header.Set("Authorization", "Bearer "+b.sign(clone))
	if status, _ := b.do(r); status != 204 {
		t.Fatal(status)
	}
	if status, _ := b.get("/envs"); status != 503 {
		t.Fatalf("old settings can be woken: %d", status)
	}
}

func TestInitReplacesAndRepeats(t *testing.T) {
	b := newBox(t)
	for range 2 {
		b.init(map[string]any{"env": map[string]string{"ONLY": "<this> & that"}, "access_token": "t", "default_user": "root", "default_workdir": "/tmp"})
	}
	if status, _ := b.get("/envs"); status != 401 {
		t.Fatal("the token is not wanted")
	}
	b.headers.Set("X-Access-Token", "t")
	if _, body := b.get("/envs"); body != `{"ONLY":"<this> & that"}` {
		t.Fatal(body)
	}
	if r := b.sh("pwd; id -u; echo $FROM_INIT"); r.out != "/tmp\n0\n\n" {
		t.Fatalf("%+v", r)
	}
	b.init(map[string]any{"access_token": nil})
	b.headers.Del("X-Access-Token")
	if status, body := b.get("/envs"); status != 200 || body != "{}" {
		t.Fatalf("%d %s", status, body)
	}
	for name, body := range map[string]string{
		"json": "{", "time": `{"time_unix_ns":"soon"}`, "entropy": `{"entropy":"?"}`, "path": `{"files":[{"path":"x"}]}`,
		"mode": `{"files":[{"path":"/x","mode":"rw"}]}`, "env": `{"env":{"a=b":""}}`, "hostname": `{"hostname":"a b"}`,
	} {
		if status, _ := b.control("POST", "/atoll/init", body); status != 400 {
			t.Errorf("%s: %d", name, status)
		}
	}
	if status, _ := b.control("POST", "/atoll/init", `{"env":{"A":"`+strings.Repeat("x", 5<<20)+`"}}`); status != 413 {
		t.Fatal(status)
	}
}

func TestEntrypointRunsOnceAfterInit(t *testing.T) {
	b := newRawBox(t, func(o *Options) {
		o.Config.Command = []string{"/bin/sh", "-c", "id -un >> " + filepath.Dir(o.PasswdPath) + "/ran; echo up; exec sleep 1000"}
	})
	ran := func() string {
		text, _ := os.ReadFile(b.root + "/ran")
		return string(text)
	}
	b.init(map[string]any{})
	b.init(map[string]any{})
	eventually(t, "the entrypoint ran", func() bool { return ran() == "root\n" })
	var list struct {
		Processes []struct {
			PID    int
			Tag    string
			Config struct{ Cmd string }
		}
	}
	if e := b.unary("process.Process/List", m{}, &list); e != nil || len(list.Processes) != 1 || list.Processes[0].Tag != "entrypoint" {
		t.Fatalf("%+v %v", list, e)
	}
	_ = b.unary("process.Process/SendSignal", m{"process": m{"tag": "entrypoint"}, "signal": "SIGNAL_SIGKILL"}, nil)
}

// tunnel opens a connection to a port inside.
func (b *box) tunnel(port int, early string) (net.Conn, *bufio.Reader, *http.Response) {
	b.t.Helper()
	conn := dial(b.t, b.address)
	_, err := fmt.Fprintf(conn, "POST /atoll/connect/%d HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nAuthorization: Bearer %s\r\n\r\n%s",
		port, b.sign(b.claims("connect")), early)
	must(b.t, err)
	reader := bufio.NewReader(conn)
	response, err := http.ReadResponse(reader, nil)
	must(b.t, err)
	return conn, reader, response
}

func TestTunnelReachesLoopback(t *testing.T) {
	b := newRawBox(t, nil)
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		server, err := net.Listen("tcp", address)
		if err != nil {
			t.Logf("%s: %v", address, err)
			continue
		}
		defer server.Close()
		go func() {
			conn, err := server.Accept()
			if err != nil {
				return
			}
			defer conn.Close()
			// It answers only when the client has ended its side: half-closing must come through.
			text, _ := io.ReadAll(conn)
			_, _ = conn.Write([]byte("got " + string(text)))
		}()
		conn, reader, response := b.tunnel(server.Addr().(*net.TCPAddr).Port, "early ")
		if response.StatusCode != 101 || response.Header.Get("Upgrade") != "tcp" {
			t.Fatalf("%+v", response)
		}
		_, err = conn.Write([]byte("late"))
		must(t, err)
		must(t, conn.(*net.TCPConn).CloseWrite())
		text, err := io.ReadAll(reader)
		must(t, err)
		if string(text) != "got early late" {
			t.Fatalf("%q", text)
		}
	}
	_, reader, response := b.tunnel(1, "")
	response.Body = io.NopCloser(io.LimitReader(reader, response.ContentLength))
	body, _ := io.ReadAll(response.Body)
	if response.StatusCode != 502 || !strings.Contains(string(body), `"code":502`) {
		t.Fatalf("%d %s", response.StatusCode, body)
	}
	r := b.request("POST", "/atoll/connect/99999", nil)
	r.Header.Set("Authorization", "Bearer "+b.sign(b.claims("connect")))
	if status, _ := b.do(r); status != 400 {
		t.Fatal(status)
	}
	r = b.request("POST", "/atoll/connect/80", nil)
	r.Header.Set("Authorization", "Bearer "+b.sign(b.claims("connect")))
	if status, _ := b.do(r); status != http.StatusUpgradeRequired {
		t.Fatal(status)
	}
}

func TestPublicRoutes(t *testing.T) {
	b := newBox(t)
	for _, path := range []string{"POST /init", "POST /freeze", "POST /unfreeze", "POST /collapse", "POST /fsfreeze", "POST /fsthaw", "POST /upgrade",
		"GET /", "POST /process.Process/Nope"} {
		method, path, _ := strings.Cut(path, " ")
		if status, body := b.do(b.request(method, path, nil)); status != 404 || body != `{"code":404,"message":"not found"}` {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	if status, _ := b.do(b.request("DELETE", "/files", nil)); status != 405 {
		t.Fatal(status)
	}
	if status, _ := b.do(b.request("GET", "/process.Process/List", nil)); status != 405 {
		t.Fatal(status)
	}
}

func TestCORSAllowsAll(t *testing.T) {
	b := newBox(t)
	b.init(map[string]any{"access_token": "t"})
	r := b.request("OPTIONS", "/process.Process/Start", nil)
	r.Header.Set("Origin", "https://page.example")
	r.Header.Set("Access-Control-Request-Method", "POST")
	r.Header.Set("Access-Control-Request-Headers", "authorization,x-access-token")
	response, err := b.client.Do(r)
	must(t, err)
	_ = response.Body.Close()
	h := response.Header
	if response.StatusCode != 204 || h.Get("Access-Control-Allow-Origin") != "*" || !strings.Contains(h.Get("Access-Control-Allow-Methods"), "POST") ||
		h.Get("Access-Control-Allow-Headers") != "authorization,x-access-token" {
		t.Fatalf("%d %v", response.StatusCode, h)
	}
	r = b.request("GET", "/envs", nil)
	r.Header.Set("Origin", "https://page.example")
	response, err = b.client.Do(r)
	must(t, err)
	_ = response.Body.Close()
	if response.StatusCode != 401 || response.Header.Get("Access-Control-Allow-Origin") != "*" {
		t.Fatalf("%d %v", response.StatusCode, response.Header)
	}
	response, err = b.client.Do(b.request("GET", "/atoll/hello", nil))
	must(t, err)
	_ = response.Body.Close()
	if response.Header.Get("Access-Control-Allow-Origin") != "" {
		t.Fatal("the control side is for no page")
	}
}

func TestAccessToken(t *testing.T) {
	b := newBox(t)
	b.init(map[string]any{"access_token": "secret", "default_user": "user"})
	const refusal = `{"code":401,"message":"unauthorized access, please provide a valid access token or method signing if supported"}`
	paths := []string{"GET /envs", "GET /metrics", "POST /files/compose", "POST /process.Process/List", "POST /filesystem.Filesystem/Stat"}
	for _, path := range paths {
		method, path, _ := strings.Cut(path, " ")
		for _, token := range []string{"", "wrong", "secret "} {
			r := b.request(method, path, nil)
			r.Header["X-Access-Token"] = []string{token}
			status, body := b.do(r)
			if token == "secret " {
				// Outer space belongs to no header value.
				if status == 401 {
					t.Errorf("%s: %d", path, status)
				}
				continue
			}
			if status != 401 || body != refusal {
				t.Errorf("%s %q: %d %s", path, token, status, body)
			}
		}
	}
	if status, _ := b.get("/health"); status != 204 {
		t.Fatal(status)
	}
	b.headers.Set("X-Access-Token", "secret")
	if e := b.unary("process.Process/List", m{}, nil); e != nil {
		t.Fatal(e)
	}
}

func TestUnknownUserIsRefusedEverywhere(t *testing.T) {
	b := newBox(t)
	b.headers.Set("Authorization", basic("ghost"))
	e := b.unary("process.Process/List", m{}, nil)
	if e == nil || e.Status != 401 || e.Code != "unauthenticated" || e.Message != "invalid username: 'ghost'" {
		t.Fatal(e)
	}
	_, ended, failure := b.open("filesystem.Filesystem/WatchDir", m{"path": "/"}).next()
	if !ended || failure.Code != "unauthenticated" {
		t.Fatal(failure)
	}
	b.headers.Del("Authorization")
	b.init(map[string]any{"default_user": "nobody-here"})
	if e := b.unary("filesystem.Filesystem/Stat", m{"path": "/"}, nil); e == nil || e.Message != "invalid default user: 'nobody-here'" {
		t.Fatal(e)
	}
}

func TestMetrics(t *testing.T) {
	b := newBox(t)
	_, body := b.get("/metrics")
	var got map[string]float64
	must(t, json.Unmarshal([]byte(body), &got))
	var names []string
	for name := range got {
		names = append(names, name)
	}
	slices.Sort(names)
	want := []string{"cpu_count", "cpu_used_pct", "disk_total", "disk_used", "mem_cache", "mem_total", "mem_total_mib", "mem_used", "mem_used_mib", "ts"}
	if !slices.Equal(names, want) {
		t.Fatalf("%v", names)
	}
	if got["cpu_count"] < 1 || got["mem_total"] < got["mem_used"] || got["mem_used"] == 0 || got["disk_total"] < got["disk_used"] || got["ts"] < 1e9 {
		t.Fatalf("%v", got)
	}
}

func TestSecretsStayOutOfLogs(t *testing.T) {
	b := newBox(t)
	b.init(map[string]any{"access_token": "hush"})
	if text := fmt.Sprintf("%v %+v %#v", b.guest.settings.Current(), b.guest.settings.Current(), *b.guest.settings.Current()); strings.Contains(text, "hush") ||
		strings.Contains(text, base64.StdEncoding.EncodeToString([]byte("hush"))) {
		t.Fatal(text)
	}
}

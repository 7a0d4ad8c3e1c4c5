package guest

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"atoll.local/native/internal/guest/control"
)

const (
	testSandbox   = "i0123456789abcdefghij"
	testPlacement = "plc_0123456789abcdefghij"
	testNonce     = "nonce-of-this-placement"
)

// box is a real guest on loopback with its own accounts; its users exist only in its passwd file.
type box struct {
	t       testing.TB
	guest   *Guest
	url     string
	address string
	key     ed25519.PrivateKey
	root    string // a directory that every user may enter
	home    string // home of "user"
	machine *recordedMachine
	headers http.Header // sent with every request
	client  *http.Client
}

const (
	userUID = 40001
	userGID = 40002
	extra1  = 40010
	extra2  = 40011
)

// recordedMachine remembers what init asked of the machine and touches nothing.
type recordedMachine struct {
	mu       sync.Mutex
	clock    []int64
	entropy  [][]byte
	hostname []string
}

func (m *recordedMachine) SetClock(ns int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.clock = append(m.clock, ns)
	return nil
}

func (m *recordedMachine) AddEntropy(seed []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.entropy = append(m.entropy, seed)
	return nil
}

func (m *recordedMachine) SetHostname(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hostname = append(m.hostname, name)
	return nil
}

// newRawBox starts a guest that was not initialised.
func newRawBox(t testing.TB, change func(*Options)) *box {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("the guest's tests become other users: run them as root")
	}
	public, private, err := ed25519.GenerateKey(nil)
	must(t, err)
	root := t.TempDir()
	// The directories that the test framework made are closed to other users.
	for dir := root; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		must(t, os.Chmod(dir, 0o755))
	}
	b := &box{t: t, key: private, root: root, home: filepath.Join(root, "home"), machine: &recordedMachine{}, headers: http.Header{}}
	must(t, os.Mkdir(b.home, 0o755))
	must(t, os.Chown(b.home, userUID, userGID))
	passwd := fmt.Sprintf("root:x:0:0:root:%s/root:/bin/bash\nuser:x:%d:%d::%s:/bin/bash\nother:x:40003:40003::%s/other:/bin/sh\n",
		root, userUID, userGID, b.home, root)
	group := fmt.Sprintf("root:x:0:\nuser:x:%d:\nteam:x:%d:other,user\nmore:x:%d:user\n", userGID, extra1, extra2)
	must(t, os.Mkdir(filepath.Join(root, "root"), 0o700))
	must(t, os.WriteFile(filepath.Join(root, "passwd"), []byte(passwd), 0o644))
	must(t, os.WriteFile(filepath.Join(root, "group"), []byte(group), 0o644))
	options := Options{
		Config: &control.Config{
			SandboxID: testSandbox, PlacementID: testPlacement, Generation: 3, Nonce: testNonce,
			PublicKey: public, Listen: "127.0.0.1:0", CommandUser: "root",
		},
		Machine:    b.machine,
		PasswdPath: filepath.Join(root, "passwd"),
		GroupPath:  filepath.Join(root, "group"),
		Now:        time.Now,
		Log:        slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(&options)
	}
	b.guest = New(options)
	listener, err := Listen(context.Background(), "127.0.0.1:0")
	must(t, err)
	b.address = listener.Addr().String()
	b.url = "http://" + b.address
	served := make(chan error, 1)
	go func() { served <- b.guest.Serve(listener) }()
	transport := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 16}
	b.client = &http.Client{Transport: transport}
	t.Cleanup(func() {
		b.guest.Close()
		transport.CloseIdleConnections()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return b
}

// newBox starts a guest and initialises it without an access token, with "user" as the default user.
func newBox(t testing.TB) *box {
	t.Helper()
	b := newRawBox(t, nil)
	b.init(map[string]any{"default_user": "user", "env": map[string]string{"FROM_INIT": "yes", "BOTH": "init"}})
	return b
}

func (b *box) claims(scope string) jwt.MapClaims {
	return jwt.MapClaims{"sub": testSandbox, "plc": testPlacement, "gen": 3, "non": testNonce, "scp": []string{scope}}
}

func (b *box) sign(claims jwt.MapClaims) string {
	b.t.Helper()
	token, err := jwt.NewWithClaims(jwt.SigningMethodEdDSA, claims).SignedString(b.key)
	must(b.t, err)
	return token
}

func (b *box) init(body map[string]any) {
	b.t.Helper()
	text, err := json.Marshal(body)
	must(b.t, err)
	status, answer := b.control("POST", "/atoll/init", string(text))
	if status != http.StatusNoContent {
		b.t.Fatalf("init: %d %s", status, answer)
	}
}

func (b *box) control(method, path, body string) (int, string) {
	b.t.Helper()
	r := b.request(method, path, strings.NewReader(body))
	r.Header.Set("Authorization", "Bearer "+b.sign(b.claims("control")))
	return b.do(r)
}

func (b *box) request(method, path string, body io.Reader) *http.Request {
	b.t.Helper()
	r, err := http.NewRequest(method, b.url+path, body)
	must(b.t, err)
	for name, values := range b.headers {
		r.Header[name] = values
	}
	return r
}

func (b *box) do(r *http.Request) (int, string) {
	b.t.Helper()
	response, err := b.client.Do(r)
	must(b.t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	must(b.t, err)
	return response.StatusCode, string(body)
}

func (b *box) get(path string) (int, string) {
	b.t.Helper()
	return b.do(b.request("GET", path, nil))
}

// unary makes one call and decodes a good answer into out.
func (b *box) unary(method string, request, out any) *rpcError {
	b.t.Helper()
	text, err := json.Marshal(request)
	must(b.t, err)
	r := b.request("POST", "/"+method, bytes.NewReader(text))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Connect-Protocol-Version", "1")
	status, body := b.do(r)
	if status != http.StatusOK {
		failure := &rpcError{Status: status}
		if err := json.Unmarshal([]byte(body), failure); err != nil {
			b.t.Fatalf("%s: %d %s", method, status, body)
		}
		return failure
	}
	if out != nil {
		must(b.t, json.Unmarshal([]byte(body), out))
	}
	return nil
}

type rpcError struct {
	Status  int    `json:"-"`
	Code    string `json:"code"`
	Message string `json:"message"`
}

func (e *rpcError) String() string {
	if e == nil {
		return "ok"
	}
	return fmt.Sprintf("%d %s: %s", e.Status, e.Code, e.Message)
}

// stream is the client's side of a server stream.
type stream struct {
	t      testing.TB
	body   io.ReadCloser
	cancel context.CancelFunc
}

func (b *box) open(method string, request any, headers ...string) *stream {
	b.t.Helper()
	text, err := json.Marshal(request)
	must(b.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	r := b.request("POST", "/"+method, bytes.NewReader(envelope(0, text))).WithContext(ctx)
	r.Header.Set("Content-Type", "application/connect+json")
	r.Header.Set("Connect-Protocol-Version", "1")
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	response, err := b.client.Do(r)
	must(b.t, err)
	if response.StatusCode != http.StatusOK || response.Header.Get("Content-Type") != "application/connect+json" {
		body, _ := io.ReadAll(response.Body)
		b.t.Fatalf("%s: %d %s %s", method, response.StatusCode, response.Header.Get("Content-Type"), body)
	}
	s := &stream{t: b.t, body: response.Body, cancel: cancel}
	b.t.Cleanup(s.close)
	return s
}

func (s *stream) close() {
	s.cancel()
	_ = s.body.Close()
}

// next returns the next message, or the stream's end: an error, or nil and ended.
func (s *stream) next() (message json.RawMessage, ended bool, failure *rpcError) {
	s.t.Helper()
	message, ended, failure, err := s.read()
	must(s.t, err)
	return message, ended, failure
}

func (s *stream) read() (message json.RawMessage, ended bool, failure *rpcError, err error) {
	var header [5]byte
	if _, err := io.ReadFull(s.body, header[:]); err != nil {
		return nil, false, nil, err
	}
	body := make([]byte, binary.BigEndian.Uint32(header[1:]))
	if _, err := io.ReadFull(s.body, body); err != nil {
		return nil, false, nil, err
	}
	if header[0]&2 == 0 {
		return body, false, nil, nil
	}
	var end struct {
		Error *rpcError `json:"error"`
	}
	if err := json.Unmarshal(body, &end); err != nil {
		return nil, false, nil, err
	}
	return nil, true, end.Error, nil
}

func envelope(flags byte, body []byte) []byte {
	out := []byte{flags, 0, 0, 0, 0}
	binary.BigEndian.PutUint32(out[1:], uint32(len(body)))
	return append(out, body...)
}

func basic(user string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"))
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually waits for a condition that another process or goroutine brings about.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if condition() {
			return
		}
	}
	t.Fatalf("never happened: %s", what)
}

func dial(t testing.TB, address string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func decode(t testing.TB, text []byte, into any) {
	t.Helper()
	if err := json.Unmarshal(text, into); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
}

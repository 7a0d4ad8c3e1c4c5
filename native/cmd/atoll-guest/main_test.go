package main

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// initGuest is the real program as PID 1 of a process namespace.
type initGuest struct {
	t   *testing.T
	url string
	key ed25519.PrivateKey
	cmd *exec.Cmd
	log *bytes.Buffer
}

// builtIn is the directory to remove after the tests.
var builtIn string

// build makes the program once for all tests.
var build = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "atoll-guest-test-")
	if err != nil {
		return "", err
	}
	builtIn = dir
	program := filepath.Join(dir, "atoll-guest")
	command := exec.Command("go", "build", "-o", program, ".")
	command.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := command.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return program, nil
})

func TestMain(m *testing.M) {
	status := m.Run()
	if builtIn != "" {
		_ = os.RemoveAll(builtIn)
	}
	os.Exit(status)
}

func startInit(t *testing.T) *initGuest {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a process namespace needs root")
	}
	program, err := build()
	if err != nil {
		t.Fatal(err)
	}
	// The machine's own hosts file is not the guest's to change.
	hosts := filepath.Join(t.TempDir(), "hosts")
	if err := os.WriteFile(hosts, []byte("127.0.0.1 localhost\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	port, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := port.Addr().String()
	_ = port.Close()
	config, _ := json.Marshal(map[string]any{"sandbox_id": "i", "placement_id": "p", "generation": 1, "nonce": "n",
		"public_key": base64.StdEncoding.EncodeToString(public), "listen": address})
	g := &initGuest{t: t, url: "http://" + address, key: private, log: &bytes.Buffer{}}
	// The shell gives the namespace a /proc of its own and becomes the guest.
	g.cmd = exec.Command("/bin/sh", "-c", "mount -t proc proc /proc && mount --bind "+hosts+" /etc/hosts && exec "+program)
	g.cmd.Env = []string{"PATH=/usr/bin:/bin:/usr/sbin:/sbin", "ATOLL_GUEST_CONFIG=" + string(config), "OTHER=kept"}
	g.cmd.Stderr = g.log
	g.cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:   syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS,
		Unshareflags: syscall.CLONE_NEWNS,
	}
	if err := g.cmd.Start(); err != nil {
		t.Skipf("cannot make a process namespace here: %v", err)
	}
	t.Cleanup(func() {
		_ = g.cmd.Process.Kill()
		_ = g.cmd.Wait()
		if t.Failed() {
			t.Logf("guest: %s", g.log)
		}
	})
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		response, err := http.Get(g.url + "/health")
		if err == nil {
			_ = response.Body.Close()
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	token, err := jwt.NewWithClaims(jwt.SigningMethodEdDSA, jwt.MapClaims{"sub": "i", "plc": "p", "gen": 1, "non": "n", "scp": []string{"control"}}).SignedString(private)
	if err != nil {
		t.Fatal(err)
	}
	r, _ := http.NewRequest("POST", g.url+"/atoll/init", strings.NewReader(`{"default_user":"root","hostname":"atoll-guest-test","env":{"FROM":"init"}}`))
	r.Header.Set("Authorization", "Bearer "+token)
	response, err := http.DefaultClient.Do(r)
	if err != nil || response.StatusCode != 204 {
		t.Fatal(response, err)
	}
	_ = response.Body.Close()
	return g
}

// run runs a script in the guest and returns its output.
func (g *initGuest) run(script string) string {
	g.t.Helper()
	message, _ := json.Marshal(map[string]any{"process": map[string]any{"cmd": "/bin/bash", "args": []string{"-c", script}, "cwd": "/"}})
	frame := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message)))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r, _ := http.NewRequestWithContext(ctx, "POST", g.url+"/process.Process/Start", bytes.NewReader(append(frame, message...)))
	r.Header.Set("Content-Type", "application/connect+json")
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		g.t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		g.t.Fatal(err)
	}
	var out strings.Builder
	for len(body) > 0 {
		size := binary.BigEndian.Uint32(body[1:])
		var e struct {
			Event struct {
				Data struct{ Stdout, Stderr []byte }
			}
			Error any
		}
		if err := json.Unmarshal(body[5:5+size], &e); err != nil || e.Error != nil {
			g.t.Fatalf("%s %v", body[5:5+size], err)
		}
		out.Write(e.Event.Data.Stdout)
		out.Write(e.Event.Data.Stderr)
		body = body[5+size:]
	}
	return out.String()
}

func TestInitReapsOrphansAndKeepsStatuses(t *testing.T) {
	g := startInit(t)
	script := `for i in $(seq 30); do (sleep 0.0$((i % 9)) &) ; done; exit_status() { return $1; }; for i in 1 2 3; do (exit $i); echo $?; done`
	for range 5 {
		if got := g.run(script); got != "1\n2\n3\n" {
			t.Fatalf("%q", got)
		}
	}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		got := g.run(`cat /proc/[0-9]*/stat | grep -c ') Z '; ls -d /proc/[0-9]* | wc -l`)
		words := strings.Fields(got)
		if n, _ := strconv.Atoi(words[len(words)-1]); words[0] == "0" && n < 8 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("zombies or sleepers: %q", g.run("ps axf"))
		}
	}
}

func TestInitIsDeafToSignals(t *testing.T) {
	g := startInit(t)
	got := g.run(`for s in $(seq 1 64); do kill -$s 1 2>/dev/null; done; sleep 0.3; echo alive; trap`)
	if got != "alive\n" {
		t.Fatalf("%q", got)
	}
	// What PID 1 is deaf to its children hear.
	if got := g.run(`for s in HUP INT TERM USR1 PIPE; do sh -c "kill -$s \$\$; echo deaf to $s"; done 2>/dev/null; echo done`); got != "done\n" {
		t.Fatalf("%q", got)
	}
}

func TestInitHidesItsConfiguration(t *testing.T) {
	g := startInit(t)
	got := g.run(`env; tr '\0' '\n' < /proc/1/environ; tr '\0' '\n' < /proc/self/environ; cat /proc/1/cmdline | tr '\0' ' '`)
	if strings.Contains(got, "ATOLL") || strings.Contains(got, "OTHER") || strings.Contains(got, "nonce") || !strings.Contains(got, "FROM=init") {
		t.Fatal(got)
	}
	if got := g.run("hostname; grep -c ' atoll-guest-test$' /etc/hosts"); got != "atoll-guest-test\n1\n" {
		t.Fatalf("%q", got)
	}
}

func TestInitStaysSmall(t *testing.T) {
	g := startInit(t)
	_ = g.run("true")
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", g.cmd.Process.Pid))
	if err != nil {
		t.Skipf("the kernel does not tell: %v", err)
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); fields[0] == "Pss:" {
			if kib, _ := strconv.Atoi(fields[1]); kib > 10<<10 {
				t.Fatalf("%d KiB after one command", kib)
			}
		}
	}
}

func TestServiceDoesNotNeedPID1(t *testing.T) {
	if os.Getpid() == 1 {
		t.Skip("this test itself runs as PID 1")
	}
	t.Setenv("ATOLL_GUEST_CONFIG", "{}")
	if err := run(); err == nil || !strings.Contains(err.Error(), "public_key") {
		t.Fatal(err)
	}
	if _, there := os.LookupEnv("ATOLL_GUEST_CONFIG"); there {
		t.Fatal("the configuration stayed in the environment")
	}
}

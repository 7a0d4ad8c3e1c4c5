package process

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"atoll.local/native/internal/guest/users"
)

func TestEnvironmentOrder(t *testing.T) {
	t.Setenv("PATH", "/bin")
	user := &users.User{Name: "u", Home: "/h"}
	env, path, err := environment(user, map[string]string{"B": "1", "A": "1", "PATH": "/sandbox"}, map[string]string{"A": "2", "HOME": "/elsewhere", "C": "x=y"})
	want := []string{"PATH=/sandbox", "HOME=/elsewhere", "USER=u", "LOGNAME=u", "A=2", "B=1", "C=x=y"}
	if err != nil || path != "/sandbox" || !slices.Equal(env, want) {
		t.Fatalf("%q %q %v", env, path, err)
	}
	t.Setenv("PATH", "")
	if env, _, _ = environment(user, nil, nil); env[0] != "PATH="+defaultPath {
		t.Fatal(env)
	}
	for _, bad := range []map[string]string{{"": "x"}, {"A=": "x"}, {"A": "x\x00y"}} {
		if _, _, err := environment(user, nil, bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func TestLookPathUsesTheProcessesOwnPath(t *testing.T) {
	dir := t.TempDir()
	for name, mode := range map[string]os.FileMode{"tool": 0o755, "plain": 0o644} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := lookPath("tool", "/nowhere::"+dir); err != nil || got != dir+"/tool" {
		t.Fatal(got, err)
	}
	for _, name := range []string{"plain", "none"} {
		if _, err := lookPath(name, dir); err == nil || !strings.Contains(err.Error(), "executable file not found in $PATH") {
			t.Fatal(name, err)
		}
	}
	if got, _ := lookPath("./relative", ""); got != "./relative" {
		t.Fatal(got)
	}
}

func TestEndOf(t *testing.T) {
	for status, want := range map[syscall.WaitStatus]endEvent{
		0:      {ExitCode: 0, Exited: true, Status: "exit status 0"},
		7 << 8: {ExitCode: 7, Exited: true, Status: "exit status 7"},
		9:      {ExitCode: -1, Status: "signal: killed"},
		139:    {ExitCode: -1, Status: "signal: segmentation fault (core dumped)"},
	} {
		got := endOf(status)
		if got.ExitCode != want.ExitCode || got.Exited != want.Exited || got.Status != want.Status || (got.Error == nil) != (status == 0) {
			t.Errorf("%d: %+v", status, got)
		}
	}
}

func TestResourceErrorsMayPass(t *testing.T) {
	config := processConfig{Cmd: "x", Args: []string{strings.Repeat("y", 1000)}}
	for err, code := range map[error]string{syscall.EAGAIN: "resource_exhausted", syscall.ENOSPC: "resource_exhausted", syscall.ENOENT: "invalid_argument"} {
		got := startError(config, &os.PathError{Op: "fork/exec", Path: "x", Err: err}).Error()
		if !strings.HasPrefix(got, code+": error starting process 'x yyy") || len(got) > 400 {
			t.Errorf("%v: %s", err, got)
		}
	}
}

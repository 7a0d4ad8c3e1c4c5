package group

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// made is a group in a directory that only looks like a hierarchy of control groups.
func made(t *testing.T, pidsMax int) (*Group, string) {
	t.Helper()
	root := t.TempDir()
	g, err := Make(root, pidsMax)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = g.dir.Close() })
	return g, filepath.Join(root, "users")
}

// read returns a file's content, whatever its mode.
func read(t *testing.T, path string) string {
	t.Helper()
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestItIsBoundedAndCanBeMadeTwice(t *testing.T) {
	g, dir := made(t, 200)
	if got := read(t, filepath.Join(dir, "pids.max")); got != "200" {
		t.Fatal(got)
	}
	again, err := Make(filepath.Dir(dir), 100)
	if err != nil {
		t.Fatal(err)
	}
	defer again.dir.Close()
	if got := read(t, filepath.Join(dir, "pids.max")); got != "100" || g.FD() == again.FD() {
		t.Fatal(got)
	}
}

func TestFreezingWaitsForTheKernel(t *testing.T) {
	g, dir := made(t, 0)
	for _, one := range []struct {
		state string
		turn  func() error
	}{{"1", g.Freeze}, {"0", g.Thaw}} {
		state, turn := one.state, one.turn
		if err := os.WriteFile(filepath.Join(dir, "cgroup.events"), []byte("populated 1\nfrozen "+state+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := turn(); err != nil {
			t.Fatal(err)
		}
		if got := read(t, filepath.Join(dir, "cgroup.freeze")); got != state {
			t.Fatal(got)
		}
	}
	if err := g.Freeze(); err == nil || !strings.Contains(err.Error(), "halt") {
		t.Fatalf("it says frozen 0 for ever: %v", err)
	}
}

func TestSignalsReachWhoIsInIt(t *testing.T) {
	g, dir := made(t, 0)
	sleeper := exec.Command("sleep", "60")
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	members := strconv.Itoa(sleeper.Process.Pid) + "\n"
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(members), 0o600); err != nil {
		t.Fatal(err)
	}
	if count := g.Signal(syscall.SIGTERM); count != 1 {
		t.Fatal(count)
	}
	_ = sleeper.Wait()
	if count := g.Signal(0); count != 0 {
		t.Fatalf("%d live on", count)
	}
}

package metrics

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"
)

// tree writes files below a new directory.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func rewrite(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

const meminfoText = "MemTotal: 1024000 kB\nMemFree: 200000 kB\nMemAvailable: 600000 kB\nBuffers: 1000 kB\nCached: 99000 kB\n"

func TestMachineIsTakenWithoutACgroup(t *testing.T) {
	proc := tree(t, map[string]string{
		"meminfo":  meminfoText,
		"stat":     "cpu 0 0 0 0 0 0 0 0 0 0\n",
		"1/stat":   "1 (a b) c) S 0 1 1 0 -1 0 0 0 0 0 100 50 20 10 20 0 1 0 1 1 1\n",
		"self/x":   "",
		"99/other": "",
	})
	now := time.Unix(1000, 0)
	m := New(proc, tree(t, nil), "/", func() time.Time { return now })
	rewrite(t, proc+"/1/stat", "1 (a b) c) S 0 1 1 0 -1 0 0 0 0 0 150 50 20 10 20 0 1 0 1 1 1\n")
	now = now.Add(time.Second)
	got, err := m.Read()
	if err != nil {
		t.Fatal(err)
	}
	// 50 ticks are half a second of all the cores.
	want := 50.0 / float64(runtime.NumCPU())
	if got.CPUUsed != want || got.CPUCount != runtime.NumCPU() || got.Timestamp != 1001 {
		t.Fatalf("%+v", got)
	}
	if got.MemTotal != 1024000<<10 || got.MemUsed != 424000<<10 || got.MemCache != 100000<<10 || got.MemTotalM != 1000 || got.MemUsedM != 414 {
		t.Fatalf("%+v", got)
	}
	if got.DiskTotal == 0 || got.DiskUsed > got.DiskTotal {
		t.Fatalf("%+v", got)
	}
}

func TestCgroupLimitsWin(t *testing.T) {
	proc := tree(t, map[string]string{"meminfo": meminfoText, "stat": "cpu 900000 0 0 0 0 0 0 0 0 0\n"})
	for name, files := range map[string]map[string]string{
		"v2": {"memory.max": "104857600\n", "memory.current": "62914560\n", "memory.stat": "anon 1\nfile 20971520\n", "cpu.max": "50000 100000\n", "cpu.stat": "usage_usec 1000000\n"},
		"v1": {"memory/memory.limit_in_bytes": "104857600\n", "memory/memory.usage_in_bytes": "62914560\n", "memory/memory.stat": "total_cache 20971520\n",
			"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n", "cpuacct/cpuacct.usage": "1000000000\n"},
	} {
		group := tree(t, files)
		now := time.Unix(1000, 0)
		m := New(proc, group, "/", func() time.Time { return now })
		if name == "v2" {
			rewrite(t, group+"/cpu.stat", "usage_usec 1250000\n")
		} else {
			rewrite(t, group+"/cpuacct/cpuacct.usage", "1250000000\n")
		}
		now = now.Add(time.Second)
		got, err := m.Read()
		if err != nil {
			t.Fatal(err)
		}
		// A quarter of a second of half a core.
		if got.CPUUsed != 50 || got.CPUCount != 1 || got.MemTotal != 100<<20 || got.MemUsed != 40<<20 || got.MemCache != 20<<20 {
			t.Errorf("%s: %+v", name, got)
		}
		if again, _ := m.Read(); again.CPUUsed != 0 {
			t.Errorf("%s: %+v", name, again)
		}
	}
}

func TestNoLimitIsNoLimit(t *testing.T) {
	proc := tree(t, map[string]string{"meminfo": meminfoText})
	group := tree(t, map[string]string{"memory.max": "max\n", "memory.current": "1\n", "cpu.max": "max 100000\n"})
	got, err := New(proc, group, "/", time.Now).Read()
	if err != nil || got.MemTotal != 1024000<<10 || got.CPUCount != runtime.NumCPU() {
		t.Fatalf("%+v %v", got, err)
	}
	if _, err := New(tree(t, nil), group, "/", time.Now).Read(); err == nil {
		t.Fatal("no meminfo and no error")
	}
	if _, err := New(proc, group, "/no/such/disk", time.Now).Read(); err == nil {
		t.Fatal("no disk and no error")
	}
}

package boot

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const whole = `{"guest":{"sandbox_id":"i1"},"network":{"address":"192.0.0.2/29","gateway":"192.0.0.1","resolver":"10.64.255.254"},` +
	`"hostname":"box","tmp_mib":40,"shm_mib":20,"run_mib":10}`

func TestConfigIsFilledUpToSectors(t *testing.T) {
	c, err := parseConfig([]byte(whole + strings.Repeat("\x00", 512)))
	if err != nil {
		t.Fatal(err)
	}
	if string(c.Guest) != `{"sandbox_id":"i1"}` || c.Hostname != "box" || c.Network.Gateway != "192.0.0.1" || c.TmpMiB != 40 {
		t.Fatalf("%+v", c)
	}
}

func TestConfigThatIsNotWholeIsRefused(t *testing.T) {
	for name, text := range map[string]string{
		"empty":      "",
		"cut":        whole[:40],
		"no guest":   strings.Replace(whole, `"guest"`, `"other"`, 1),
		"no room":    strings.Replace(whole, `"run_mib":10`, `"run_mib":0`, 1),
		"no address": strings.Replace(whole, "192.0.0.2/29", "fd00::2/64", 1),
		"no gateway": strings.Replace(whole, `"192.0.0.1"`, `"somewhere"`, 1),
	} {
		if _, err := parseConfig([]byte(text)); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
}

func TestAMachineWithoutNetworkNeedsNoAddress(t *testing.T) {
	if err := (&network{}).check(); err != nil {
		t.Fatal(err)
	}
}

func FuzzConfig(f *testing.F) {
	f.Add([]byte(whole))
	f.Add([]byte("\x00\x00"))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := parseConfig(text)
		if err == nil && (c.ShmMiB < 1 || c.RunMiB < 1 || len(c.Guest) == 0) {
			t.Fatalf("%+v", c)
		}
	})
}

func TestALinkIsReplacedByAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.Symlink("/nowhere/stub", path); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := replace(path, "nameserver 10.0.0.1\n"); err != nil {
			t.Fatal(err)
		}
		info, err := os.Lstat(path)
		if err != nil || !info.Mode().IsRegular() {
			t.Fatalf("%v %v", info, err)
		}
	}
}

func TestOnlyTheFirstProcessOfAKernelIsAMachine(t *testing.T) {
	if IsMachine() {
		t.Fatal("a test is no machine")
	}
}

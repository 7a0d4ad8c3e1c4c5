package control

import (
	"crypto/ed25519"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func FuzzConfig(f *testing.F) {
	f.Add([]byte(`{"sandbox_id":"i","placement_id":"p","generation":1,"nonce":"n","public_key":"11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=","listen":"0.0.0.0:1"}`))
	f.Add([]byte(`{"command":[1]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := ParseConfig(text)
		if err == nil && (c.SandboxID == "" || c.Nonce == "" || len(c.PublicKey) != ed25519.PublicKeySize || c.Generation < 1) {
			t.Fatalf("%+v", c)
		}
	})
}

func FuzzInit(f *testing.F) {
	f.Add([]byte(`{"env":{"A":"1"},"access_token":"t","time_unix_ns":"1","entropy":"AA==","hostname":"h","files":[{"path":"/x","content":"","mode":"0600"}]}`))
	f.Add([]byte(`{"files":[{"path":"/../x","mode":"77777777777"}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		plan, err := parseInit(text)
		if err != nil {
			return
		}
		for name := range plan.values.Env {
			if name == "" || strings.ContainsAny(name, "=\x00") {
				t.Fatalf("%q", name)
			}
		}
		for _, file := range plan.files {
			if !filepath.IsAbs(file.path) || file.mode > 0o7777 {
				t.Fatalf("%+v", file)
			}
		}
		if plan.values.DefaultUser == "" || len(plan.hostname) > 64 || plan.unixNano < 0 {
			t.Fatalf("%+v", plan)
		}
	})
}

// FuzzToken: nothing that is not signed gets in.
func FuzzToken(f *testing.F) {
	public, _, err := ed25519.GenerateKey(nil)
	if err != nil {
		f.Fatal(err)
	}
	c := &Config{SandboxID: "i", PlacementID: "p", Generation: 1, Nonce: "n", PublicKey: public}
	f.Add("Bearer a.b.c")
	f.Add("Bearer eyJhbGciOiJub25lIn0.eyJzdWIiOiJpIiwicGxjIjoicCIsImdlbiI6MSwibm9uIjoibiIsInNjcCI6WyJjb250cm9sIl19.")
	f.Add("Basic dXNlcjo=")
	f.Fuzz(func(t *testing.T, header string) {
		if c.authorize(&http.Request{Header: http.Header{"Authorization": {header}}}, scopeControl) == nil {
			t.Fatalf("%q got in", header)
		}
	})
}

func FuzzPlacement(f *testing.F) {
	f.Add([]byte(`{"sandbox_id":"i","placement_id":"p","generation":1,"nonce":"n"}`))
	f.Add([]byte(`{"generation":-1}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		who, ok := parsePlacement(text)
		if ok && (who.SandboxID == "" || who.PlacementID == "" || who.Nonce == "" || who.Generation < 1) {
			t.Fatalf("%+v", who)
		}
	})
}

func TestGoldenPlacement(t *testing.T) {
	text, err := os.ReadFile("../../../../src/atoll/wire/golden/guest/placement.json")
	if err != nil {
		t.Fatal(err)
	}
	want := identity{"i0123456789abcdefghij", "plc_0123456789abcdefghij", 1, "bm9uY2Utb2YtdGhpcy1wbGFjZW1lbnQ"}
	if who, ok := parsePlacement(text); !ok || who != want {
		t.Fatalf("%+v", who)
	}
}

func TestAddHost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hosts")
	for _, name := range []string{"one", "two", "one"} {
		if err := addHost(path, name); err != nil {
			t.Fatal(err)
		}
	}
	if text, _ := os.ReadFile(path); string(text) != "127.0.1.1 one\n127.0.1.1 two\n" {
		t.Fatalf("%q", text)
	}
	if err := os.WriteFile(path, []byte("127.0.0.1 localhost"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := addHost(path, "three"); err != nil {
		t.Fatal(err)
	}
	if text, _ := os.ReadFile(path); string(text) != "127.0.0.1 localhost\n127.0.1.1 three\n" {
		t.Fatalf("%q", text)
	}
}

package paths

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"atoll.local/native/internal/guest/users"
)

var someone = &users.User{Name: "u", Home: "/home/u"}

func TestResolve(t *testing.T) {
	for path, want := range map[string]string{
		"": "/work", "x": "/home/u/x", "./x/": "/home/u/x", "~": "/home/u", "~/x": "/home/u/x", "~/../v": "/home/v",
		"/a/../b//c/": "/b/c", "../../../..": "/", "a~": "/home/u/a~", "/~": "/~",
	} {
		if got, err := Resolve(path, someone, "/work"); err != nil || got != want {
			t.Errorf("%q: %q %v", path, got, err)
		}
	}
	if got, _ := Resolve("", someone, ""); got != "/home/u" {
		t.Fatal(got)
	}
	if got, _ := Resolve("", someone, "~/w"); got != "/home/u/w" {
		t.Fatal(got)
	}
	for _, bad := range []string{"~root/x", "~root", "a\x00", strings.Repeat("a", 5000)} {
		if got, err := Resolve(bad, someone, ""); err == nil {
			t.Errorf("%.10q: %q", bad, got)
		}
	}
}

func FuzzResolve(f *testing.F) {
	for _, path := range []string{"", "~", "~/x", "~x", "/", "a/../..", "\x00"} {
		f.Add(path, "/w")
	}
	f.Fuzz(func(t *testing.T, path, workdir string) {
		got, err := Resolve(path, someone, workdir)
		if err != nil {
			return
		}
		if !filepath.IsAbs(got) || filepath.Clean(got) != got || strings.Contains(got, "\x00") {
			t.Fatalf("%q -> %q", path, got)
		}
	})
}

func TestEnsureDirs(t *testing.T) {
	root := t.TempDir()
	uid, gid := os.Getuid(), os.Getgid()
	deep := filepath.Join(root, "a", "b", "c")
	for range 2 {
		if err := EnsureDirs(deep, uid, gid); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(root, "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, file + "/x", file + "/x/y"} {
		var notDir NotDirectoryError
		if err := EnsureDirs(path, uid, gid); !errors.As(err, &notDir) || notDir.Path != file {
			t.Errorf("%s: %v", path, err)
		}
	}
	if err := os.Symlink("nowhere", filepath.Join(root, "dangling")); err != nil {
		t.Fatal(err)
	}
	if err := EnsureDirs(filepath.Join(root, "dangling", "x"), uid, gid); err == nil {
		t.Fatal("made a directory through a dangling symlink")
	}
	if !IsNoSpace(&os.PathError{Err: syscall.EDQUOT}) || IsNoSpace(os.ErrExist) {
		t.Fatal("IsNoSpace")
	}
}

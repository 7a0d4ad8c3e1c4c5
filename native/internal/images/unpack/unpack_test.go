package unpack

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

type item struct {
	name, body, link string
	kind             byte
	mode             int64
	pax              map[string]string
	uid              int
}

func file(name, body string) item {
	return item{name: name, body: body, kind: tar.TypeReg, mode: 0o644}
}
func dir(name string) item              { return item{name: name, kind: tar.TypeDir, mode: 0o755} }
func symlink(name, target string) item  { return item{name: name, link: target, kind: tar.TypeSymlink} }
func hardlink(name, target string) item { return item{name: name, link: target, kind: tar.TypeLink} }

func pack(t testing.TB, items ...item) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, one := range items {
		header := &tar.Header{
			Name: one.name, Linkname: one.link, Typeflag: one.kind, Mode: one.mode, Size: int64(len(one.body)),
			PAXRecords: one.pax, Uid: one.uid, Gid: one.uid, ModTime: time.Unix(1_700_000_000, 0),
		}
		if err := w.WriteHeader(header); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, one.body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func sum(content []byte) string {
	found := sha256.Sum256(content)
	return "sha256:" + hex.EncodeToString(found[:])
}

func plain(content []byte) Layer {
	return Layer{Content: bytes.NewReader(content), Digest: sum(content), Size: int64(len(content)), DiffID: sum(content)}
}

func apply(t testing.TB, root string, limits Limits, layers ...[]byte) error {
	t.Helper()
	tree, err := OpenTree(root)
	if err != nil {
		t.Fatal(err)
	}
	defer tree.Close()
	meter := &Meter{Limits: limits}
	for _, one := range layers {
		if err := tree.Apply(context.Background(), plain(one), meter); err != nil {
			return err
		}
	}
	return nil
}

func mustApply(t *testing.T, layers ...[]byte) string {
	t.Helper()
	root := t.TempDir()
	if err := apply(t, root, DefaultLimits, layers...); err != nil {
		t.Fatal(err)
	}
	return root
}

func content(t *testing.T, path ...string) string {
	t.Helper()
	found, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		t.Fatal(err)
	}
	return string(found)
}

func absent(t *testing.T, path ...string) {
	t.Helper()
	if _, err := os.Lstat(filepath.Join(path...)); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("%s is there (%v)", filepath.Join(path...), err)
	}
}

func codeOf(err error) string {
	var known *Error
	if errors.As(err, &known) {
		return known.Code
	}
	return ""
}

func TestLayersStack(t *testing.T) {
	root := mustApply(t,
		pack(t, dir("a/"), file("a/kept", "1"), file("a/hidden", "1"), dir("opaque/"), file("opaque/old", "1"), dir("gone/"), file("gone/deep", "1"), file("changed", "old")),
		pack(t, file("a/.wh.hidden", ""), dir("opaque/"), file("opaque/new", "2"), file("opaque/.wh..wh..opq", ""), file(".wh.gone", ""), file("changed", "new"), file("./b/implied", "2")),
	)
	for name, want := range map[string]string{"a/kept": "1", "opaque/new": "2", "changed": "new", "b/implied": "2"} {
		if got := content(t, root, name); got != want {
			t.Errorf("%s holds %q, want %q", name, got, want)
		}
	}
	absent(t, root, "a/hidden")
	absent(t, root, "a/.wh.hidden")
	absent(t, root, "opaque/old")
	absent(t, root, "gone")
}

func TestWhiteoutSparesItsOwnLayer(t *testing.T) {
	root := mustApply(t,
		pack(t, file("x/old", "1")),
		pack(t, file("x/new", "2"), file("x/.wh.new", ""), file("y/z/new", "2"), file("y/.wh..wh..opq", "")),
	)
	if content(t, root, "x/new") != "2" || content(t, root, "y/z/new") != "2" || content(t, root, "x/old") != "1" {
		t.Error("a whiteout took what its own layer made")
	}
}

func TestLinksAndModes(t *testing.T) {
	big := strings.Repeat("x", 300<<10)
	root := mustApply(t, pack(t,
		item{name: "bin/su", body: "s", kind: tar.TypeReg, mode: 0o4755},
		hardlink("bin/su2", "bin/su"),
		symlink("lib", "usr/lib"), dir("usr/lib"), file("lib/through", "t"),
		symlink("dangling", "/nowhere"), hardlink("dangling2", "dangling"),
		file("big", big), item{name: "pipe", kind: tar.TypeFifo, mode: 0o600},
		item{name: "dev/sda", kind: tar.TypeBlock, mode: 0o666}, item{name: "attr", kind: tar.TypeReg, mode: 0o600, pax: map[string]string{
			"SCHILY.xattr.user.colour": "blue", "SCHILY.xattr.trusted.overlay.redirect": "/etc"}},
	))
	one, _ := os.Stat(filepath.Join(root, "bin/su"))
	two, _ := os.Stat(filepath.Join(root, "bin/su2"))
	if !os.SameFile(one, two) || one.Mode()&os.ModeSetuid == 0 || one.Mode().Perm() != 0o755 {
		t.Errorf("hard link or mode: %v %v", one.Mode(), two.Mode())
	}
	if content(t, root, "usr/lib/through") != "t" || content(t, root, "big") != big {
		t.Error("a file through a link inside the root, or a large one, is not right")
	}
	absent(t, root, "dev/sda")
	var value [16]byte
	attr := filepath.Join(root, "attr")
	if n, err := unix.Getxattr(attr, "user.colour", value[:]); err == nil && string(value[:n]) != "blue" {
		t.Errorf("user.colour is %q", value[:n])
	}
	if _, err := unix.Getxattr(attr, "trusted.overlay.redirect", value[:]); err == nil {
		t.Error("an attribute of the host's overlay came through")
	}
	if at, _ := os.Stat(filepath.Join(root, "usr/lib")); at.ModTime().Unix() != 1_700_000_000 {
		t.Errorf("the directory's time is %v", at.ModTime())
	}
}

func TestReplacing(t *testing.T) {
	root := mustApply(t,
		pack(t, dir("d"), file("d/in", "1"), symlink("l", "d"), file("f", "1"), hardlink("f2", "f")),
		pack(t, file("d", "now a file"), dir("l"), file("f", "2")),
	)
	if content(t, root, "d") != "now a file" || content(t, root, "f") != "2" || content(t, root, "f2") != "1" {
		t.Error("something was written through, or not replaced")
	}
	if info, _ := os.Lstat(filepath.Join(root, "l")); !info.IsDir() {
		t.Errorf("l is %v", info.Mode())
	}
}

func TestZerosBecomeHoles(t *testing.T) {
	body := strings.Repeat("\x00", 8<<20) + "end"
	root := mustApply(t, pack(t, file("sparse", body)))
	var info unix.Stat_t
	if err := unix.Stat(filepath.Join(root, "sparse"), &info); err != nil || info.Size != int64(len(body)) || info.Blocks*512 > 1<<20 {
		t.Errorf("size %d, on disk %d (%v)", info.Size, info.Blocks*512, err)
	}
}

// TestHostile: nothing of these may be outside of the root afterwards, and each has its code.
func TestHostile(t *testing.T) {
	small := Limits{Bytes: 1 << 20, Entries: 10, Growth: 50, GrowthFrom: 64 << 10}
	many := make([]item, 11)
	for i := range many {
		many[i] = file("f"+string(rune('a'+i)), "")
	}
	for name, items := range map[string][]item{
		"parent":                 {file("../escaped", "x")},
		"parent inside":          {file("a/../../escaped", "x")},
		"harmless looking":       {file("a/../b", "x")},
		"absolute":               {file("/escaped", "x")},
		"hard link out":          {hardlink("x", "../outside")},
		"hard link absolute":     {hardlink("x", "/etc/passwd")},
		"hard link to nothing":   {hardlink("x", "nothing")},
		"hard link to directory": {dir("d"), hardlink("x", "d")},
		"hard link to root":      {hardlink("x", ".")},
		"whiteout of parent":     {file("a/.wh...", "")},
		"whiteout of nothing":    {file("a/.wh.", "")},
		"below a whiteout":       {file(".wh.a/b", "")},
		"root is a link":         {symlink(".", "/etc")},
		"root is a file":         {file(".", "x")},
		"long part":              {file(strings.Repeat("x", 300), "")},
		"deep":                   {file(strings.Repeat("d/", 300)+"x", "")},
		"too many bytes":         {file("big", strings.Repeat("x", 2<<20))},
		"too many entries":       many,
		"link loop as parent":    {symlink("a", "b"), symlink("b", "a"), file("a/x", "")},
		"file as parent":         {file("a", ""), file("a/x", "")},
		"owner out of range":     {item{name: "x", kind: tar.TypeReg, uid: 1<<32 - 1}},
		"unknown type":           {item{name: "x", kind: 'Z'}},
	} {
		for way, put := range map[string]func(testing.TB, string, Limits, ...[]byte) error{"": apply, ", staged": stacked} {
			t.Run(name+way, func(t *testing.T) {
				outside := t.TempDir()
				root := filepath.Join(outside, "root")
				if err := os.Mkdir(root, 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(outside, "outside"), []byte("mine"), 0o600); err != nil {
					t.Fatal(err)
				}
				if err := put(t, root, small, pack(t, items...)); codeOf(err) != CodeRefused {
					t.Errorf("code %q: %v", codeOf(err), err)
				}
				if left, _ := os.ReadDir(outside); len(left) != 2 {
					t.Errorf("something is outside: %v", left)
				}
			})
		}
	}
}

// TestLinksLeadNowhere: links that point out of the root lead to places inside it.
func TestLinksLeadNowhere(t *testing.T) {
	outside := t.TempDir()
	root := filepath.Join(outside, "root")
	if err := os.Mkdir(root, 0o755); err != nil {
		t.Fatal(err)
	}
	victim := filepath.Join(outside, "victim")
	if err := os.Mkdir(victim, 0o755); err != nil {
		t.Fatal(err)
	}
	err := apply(t, root, DefaultLimits, pack(t,
		symlink("up", "../victim"), symlink("abs", victim), symlink("proc", "/proc/self/root"), dir("victim"),
		file("up/a", "x"), dir("abs"), file("abs/b", "x"), file("up/.wh..wh..opq", "")))
	if err != nil {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(victim); len(left) != 0 {
		t.Errorf("the victim has %v", left)
	}
	if content(t, root, "victim/a") != "x" || content(t, root, "abs/b") != "x" {
		t.Error("a link was not followed inside the root")
	}
}

func TestDigestsAndForms(t *testing.T) {
	raw := pack(t, file("a", strings.Repeat("text ", 1000)))
	var zipped, zstded bytes.Buffer
	z := gzip.NewWriter(&zipped)
	_, _ = z.Write(raw)
	_ = z.Close()
	s, _ := zstd.NewWriter(&zstded)
	_, _ = s.Write(raw)
	_ = s.Close()
	forms := map[Compression][]byte{Plain: raw, Gzip: zipped.Bytes(), Zstd: zstded.Bytes()}
	for form, packed := range forms {
		layer := func(mend func(*Layer)) Layer {
			one := Layer{Content: bytes.NewReader(packed), Compression: form, Digest: sum(packed), Size: int64(len(packed)), DiffID: sum(raw)}
			mend(&one)
			return one
		}
		check := func(one Layer) error { return Check(context.Background(), one, &Meter{Limits: DefaultLimits}) }
		if err := check(layer(func(*Layer) {})); err != nil {
			t.Errorf("form %d: %v", form, err)
		}
		for name, mend := range map[string]func(*Layer){
			"digest":    func(l *Layer) { l.Digest = sum(nil) },
			"diff id":   func(l *Layer) { l.DiffID = sum(nil) },
			"size":      func(l *Layer) { l.Size++ },
			"truncated": func(l *Layer) { l.Content = bytes.NewReader(packed[:len(packed)/2]) },
			"trailing":  func(l *Layer) { l.Content = io.MultiReader(bytes.NewReader(packed), strings.NewReader("more")) },
			"flipped": func(l *Layer) {
				bad := bytes.Clone(packed)
				bad[len(bad)/2] ^= 1
				l.Content = bytes.NewReader(bad)
			},
		} {
			if err := check(layer(mend)); codeOf(err) != CodeCorrupt {
				t.Errorf("form %d, %s: %v", form, name, err)
			}
		}
	}
}

func TestAPlainLayerThatDockerCallsGzip(t *testing.T) {
	raw := pack(t, file("a", strings.Repeat("text ", 1000)))
	layer := Layer{Content: bytes.NewReader(raw), Compression: Gzip, Digest: sum(raw), Size: int64(len(raw)), DiffID: sum(raw)}
	if err := Check(context.Background(), layer, &Meter{Limits: DefaultLimits}); err != nil {
		t.Error(err)
	}
	bad := bytes.Clone(raw)
	bad[600] ^= 1
	layer.Content = bytes.NewReader(bad)
	if err := Check(context.Background(), layer, &Meter{Limits: DefaultLimits}); codeOf(err) != CodeCorrupt {
		t.Errorf("flipped: %v", err)
	}
}

func TestBombs(t *testing.T) {
	raw := pack(t, file("zeros", strings.Repeat("\x00", 32<<20)))
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	_, _ = z.Write(raw)
	_ = z.Close()
	layer := Layer{Content: &zipped, Compression: Gzip, Digest: sum(zipped.Bytes()), Size: -1, DiffID: sum(raw)}
	limits := DefaultLimits
	limits.GrowthFrom = 1 << 20
	if err := Check(context.Background(), layer, &Meter{Limits: limits}); codeOf(err) != CodeRefused {
		t.Errorf("%v", err)
	}
}

func TestFurnish(t *testing.T) {
	for name, items := range map[string][]item{
		"empty":    nil,
		"accounts": {file("etc/passwd", "root:x:0:0::/root:/bin/sh\nsomebody:x:1000:1000::/:/bin/sh"), file("etc/group", "root:x:0:")},
		"links": {
			symlink("etc/resolv.conf", "../run/resolv.conf"), symlink("tmp", "/var/tmp"), symlink("run", "/etc"),
			symlink("etc/passwd", "accounts"), file("etc/accounts", "root:x:0:0::/root:/bin/sh\n"), symlink(".atoll", "/etc"),
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := mustApply(t, pack(t, items...))
			tree, err := OpenTree(root)
			if err != nil {
				t.Fatal(err)
			}
			defer tree.Close()
			for range 2 {
				if err := tree.Furnish(); err != nil {
					t.Fatal(err)
				}
			}
			passwd := content(t, root, "etc/passwd")
			if strings.Count(passwd, "root:x:") != 1 || strings.Count(passwd, "\nuser:x:") != 1 {
				t.Errorf("passwd: %q", passwd)
			}
			if name == "accounts" && !strings.Contains(passwd, "\nuser:x:1001:1001:") {
				t.Errorf("a taken number was given: %q", passwd)
			}
			for _, place := range []string{"proc", "sys", "dev", "run", "tmp", "home/user"} {
				if info, err := os.Lstat(filepath.Join(root, place)); err != nil || !info.IsDir() {
					t.Errorf("%s: %v", place, err)
				}
			}
			for _, place := range []string{".atoll/guest", "etc/resolv.conf"} {
				if info, err := os.Lstat(filepath.Join(root, place)); err != nil || !info.Mode().IsRegular() {
					t.Errorf("%s: %v", place, err)
				}
			}
		})
	}
}

func TestTheUserIsNotLockedOut(t *testing.T) {
	for name, one := range map[string]struct {
		items []item
		has   string
	}{
		"with passwords": {[]item{file("etc/passwd", "root:x:0:0::/root:/bin/sh\n"), file("etc/shadow", "root:*:1:0:99999:7:::")}, "root:*:1:0:99999:7:::\nuser:*::0:99999:7:::\n"},
		"known already":  {[]item{file("etc/passwd", "root:x:0:0::/root:/bin/sh\n"), file("etc/shadow", "user:!:1::::::\n")}, "user:!:1::::::\n"},
		"by a link":      {[]item{file("etc/passwd", "root:x:0:0::/root:/bin/sh\n"), file("etc/elsewhere", "root:*:::::::\n"), symlink("etc/shadow", "elsewhere")}, "root:*:::::::\n"},
		"without":        {[]item{file("etc/passwd", "root:x:0:0::/root:/bin/sh\n")}, ""},
	} {
		root := mustApply(t, pack(t, one.items...))
		path := filepath.Join(root, "etc/shadow")
		if name == "with passwords" {
			if err := os.Chmod(path, 0o640); err != nil {
				t.Fatal(err)
			}
		}
		tree, err := OpenTree(root)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := tree.Furnish(); err != nil {
				t.Fatal(err)
			}
		}
		tree.Close()
		found, _ := os.ReadFile(path)
		if string(found) != one.has {
			t.Errorf("%s: %q", name, found)
		}
		if info, err := os.Lstat(path); name == "with passwords" && (err != nil || info.Mode().Perm() != 0o640) {
			t.Errorf("%s: %v %v", name, info, err)
		}
	}
}

// FuzzApply: whatever a layer is, nothing outside of the root changes, a failure has a code, and staging it makes the same tree.
func FuzzApply(f *testing.F) {
	f.Add(pack(f, dir("a"), file("a/b", "x"), symlink("l", "../.."), hardlink("h", "a/b"), file("l/x", "")))
	f.Add(pack(f, file("a/.wh..wh..opq", ""), file(".wh.a", "")))
	f.Fuzz(func(t *testing.T, raw []byte) {
		outside := t.TempDir()
		root := filepath.Join(outside, "root")
		if err := os.Mkdir(root, 0o755); err != nil {
			t.Fatal(err)
		}
		limits := Limits{Bytes: 1 << 20, Entries: 200, Growth: 100, GrowthFrom: 1 << 20}
		err := apply(t, root, limits, raw)
		if err != nil && codeOf(err) != CodeRefused && codeOf(err) != CodeCorrupt {
			t.Errorf("code %q: %v", codeOf(err), err)
		}
		another := filepath.Join(outside, "another")
		if err := os.Mkdir(another, 0o755); err != nil {
			t.Fatal(err)
		}
		if again := stacked(t, another, limits, raw); (again == nil) != (err == nil) {
			t.Errorf("applied: %v; staged: %v", err, again)
		}
		if left, _ := os.ReadDir(outside); len(left) != 2 {
			t.Errorf("something is outside: %v", left)
		}
		if err == nil && !slices.Equal(described(t, root), described(t, another)) {
			t.Errorf("applied and staged make two trees")
		}
	})
}

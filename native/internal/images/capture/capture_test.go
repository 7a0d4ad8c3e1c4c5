package capture

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"atoll.local/native/internal/images/unpack"
)

const most = 64 << 20

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("whiteouts are device nodes: run it as root")
	}
}

func write(t *testing.T, name, content string, mode os.FileMode) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(content), 0o600), os.Chmod(name, mode)); err != nil {
		t.Fatal(err)
	}
}

func do(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// names reads a layer's headers by name.
func names(t *testing.T, file string) map[string]*tar.Header {
	t.Helper()
	opened, err := os.Open(file)
	do(t, err)
	defer opened.Close()
	found := make(map[string]*tar.Header)
	reader := tar.NewReader(opened)
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		do(t, err)
		found[header.Name] = header
	}
}

// apply puts a layer on a tree, as a host would.
func apply(t *testing.T, root, file string, packed *Packed) {
	t.Helper()
	opened, err := os.Open(file)
	do(t, err)
	defer opened.Close()
	tree, err := unpack.OpenTree(root)
	do(t, err)
	defer tree.Close()
	layer := unpack.Layer{Content: opened, Digest: packed.Digest, Size: packed.Size, DiffID: packed.Digest}
	do(t, tree.Apply(t.Context(), layer, &unpack.Meter{Limits: unpack.DefaultLimits}))
}

func TestUpperBecomesALayerThatMakesTheSameTree(t *testing.T) {
	needRoot(t)
	lower, upper, target := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "layer.tar")
	write(t, lower+"/etc/passwd", "root\n", 0o644)
	write(t, lower+"/gone/file", "x", 0o644)
	write(t, lower+"/hidden/old", "x", 0o644)
	write(t, lower+"/kept/file", "x", 0o644)

	write(t, upper+"/etc/passwd", "root\nuser\n", 0o640)
	write(t, upper+"/bin/tool", "#!/bin/sh\n", 0o4755)
	write(t, upper+"/hidden/new", "y", 0o644)
	write(t, upper+"/etc/resolv.conf", "nameserver 10.0.0.1\n", 0o644)
	write(t, upper+"/run/lock", "", 0o644)
	write(t, upper+"/.atoll/guest", "", 0o755)
	at := time.Unix(1_700_000_000, 123_000_000)
	do(t,
		unix.Mknod(upper+"/gone", unix.S_IFCHR, 0),
		unix.Lsetxattr(upper+"/hidden", "trusted.overlay.opaque", []byte("y"), 0),
		unix.Lsetxattr(upper+"/bin/tool", "user.note", []byte("mine"), 0),
		unix.Lsetxattr(upper+"/bin/tool", "trusted.overlay.origin", []byte("x"), 0),
		os.Link(upper+"/bin/tool", upper+"/bin/same"),
		os.Symlink("tool", upper+"/bin/other"),
		unix.Mkfifo(upper+"/pipe", 0o600),
		os.Mkdir(upper+"/empty", 0o700),
		os.Chown(upper+"/bin/tool", 1000, 1001),
		os.Chmod(upper+"/bin/tool", 0o4755|os.ModeSetuid),
		os.Chtimes(upper+"/bin/tool", at, at),
		os.Chtimes(upper+"/empty", at, at),
	)

	packed, err := FromUpper(t.Context(), upper, target, most)
	do(t, err)
	for _, name := range []string{"etc/resolv.conf", "run/lock", "run/", ".atoll/guest"} {
		if names(t, target)[name] != nil {
			t.Errorf("%s is in the layer", name)
		}
	}
	apply(t, lower, target, packed)

	var tool, same, empty unix.Stat_t
	do(t, unix.Lstat(lower+"/bin/tool", &tool), unix.Lstat(lower+"/bin/same", &same), unix.Lstat(lower+"/empty", &empty))
	if tool.Mode&0o7777 != 0o4755 || tool.Uid != 1000 || tool.Gid != 1001 || tool.Ino != same.Ino || tool.Mtim.Nano() != at.UnixNano() {
		t.Errorf("/bin/tool became %o of %d:%d, inode %d and %d, at %d", tool.Mode, tool.Uid, tool.Gid, tool.Ino, same.Ino, tool.Mtim.Nano())
	}
	if empty.Mode&0o7777 != 0o700 || empty.Mtim.Nano() != at.UnixNano() {
		t.Errorf("/empty became %o at %d", empty.Mode, empty.Mtim.Nano())
	}
	note := make([]byte, 16)
	if n, err := unix.Lgetxattr(lower+"/bin/tool", "user.note", note); err != nil || string(note[:n]) != "mine" {
		t.Errorf("the attribute became %q: %v", note, err)
	}
	if leads, _ := os.Readlink(lower + "/bin/other"); leads != "tool" {
		t.Errorf("the link leads to %q", leads)
	}
	for _, name := range []string{"/gone", "/hidden/old", "/etc/resolv.conf"} {
		if _, err := os.Lstat(lower + name); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is there", name)
		}
	}
	for _, name := range []string{"/hidden/new", "/kept/file", "/pipe"} {
		if _, err := os.Lstat(lower + name); err != nil {
			t.Errorf("%s is not there", name)
		}
	}
	content, _ := os.ReadFile(lower + "/etc/passwd")
	if string(content) != "root\nuser\n" {
		t.Errorf("/etc/passwd became %q", content)
	}
}

func TestTheSameUpperMakesTheSameLayer(t *testing.T) {
	upper := t.TempDir()
	for _, name := range []string{"b", "a", "c/d"} {
		write(t, filepath.Join(upper, name), name, 0o644)
	}
	first, err := FromUpper(t.Context(), upper, filepath.Join(t.TempDir(), "one"), most)
	do(t, err)
	second, err := FromUpper(t.Context(), upper, filepath.Join(t.TempDir(), "two"), most)
	do(t, err)
	if *first != *second || first.Entries != 4 {
		t.Errorf("%v and %v", first, second)
	}
}

func TestNothingWrittenIsNoEntry(t *testing.T) {
	packed, err := FromUpper(t.Context(), t.TempDir(), filepath.Join(t.TempDir(), "layer"), most)
	do(t, err)
	if packed.Entries != 0 {
		t.Errorf("%d entries", packed.Entries)
	}
}

func TestADirectoryThatOnlyTheOverlayMovedIsRefused(t *testing.T) {
	needRoot(t)
	upper := t.TempDir()
	do(t, os.Mkdir(upper+"/new", 0o755), unix.Lsetxattr(upper+"/new", "trusted.overlay.redirect", []byte("/old"), 0))
	target := filepath.Join(t.TempDir(), "layer")
	if _, err := FromUpper(t.Context(), upper, target, most); err == nil {
		t.Error("its content would have been lost, and nobody was told")
	}
	if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
		t.Error("half a layer is left")
	}
}

func TestALayerHasALimit(t *testing.T) {
	upper, target := t.TempDir(), filepath.Join(t.TempDir(), "layer")
	write(t, upper+"/large", strings.Repeat("x", 1<<20), 0o644)
	_, err := FromUpper(t.Context(), upper, target, 1<<19)
	var refused *unpack.Error
	if !errors.As(err, &refused) || refused.Code != unpack.CodeRefused {
		t.Errorf("got %v", err)
	}
	if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
		t.Error("half a layer is left")
	}
}

func TestALinkOutOfTheUpperIsNotFollowed(t *testing.T) {
	upper, target := t.TempDir(), filepath.Join(t.TempDir(), "layer")
	do(t, os.Symlink("/etc/shadow", upper+"/link"), os.Symlink("/etc", upper+"/directory"))
	_, err := FromUpper(t.Context(), upper, target, most)
	do(t, err)
	found := names(t, target)
	if found["link"].Typeflag != tar.TypeSymlink || found["directory"].Typeflag != tar.TypeSymlink || len(found) != 3 {
		t.Errorf("the layer has %v", found)
	}
}

// sentry makes a tar as gVisor does.
func sentry(t *testing.T, headers ...*tar.Header) []byte {
	t.Helper()
	var made bytes.Buffer
	writer := tar.NewWriter(&made)
	for _, header := range headers {
		content := strings.Repeat("x", int(header.Size))
		do(t, writer.WriteHeader(header))
		_, err := writer.Write([]byte(content))
		do(t, err)
	}
	do(t, writer.Close())
	return made.Bytes()
}

func TestWhatGVisorHandsOutBecomesALayer(t *testing.T) {
	opaque := map[string]string{"SCHILY.xattr.trusted.overlay.opaque": "y"}
	made := sentry(t,
		&tar.Header{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755},
		&tar.Header{Typeflag: tar.TypeDir, Name: "./new/", Mode: 0o750, Uid: 5, PAXRecords: opaque, Format: tar.FormatPAX},
		&tar.Header{Typeflag: tar.TypeReg, Name: "./new/file", Mode: 0o4711, Size: 3},
		&tar.Header{Typeflag: tar.TypeLink, Name: "./new/same", Linkname: "./new/file"},
		&tar.Header{Typeflag: tar.TypeSymlink, Name: "./new/link", Linkname: "../etc"},
		&tar.Header{Typeflag: tar.TypeChar, Name: "./gone"},
		// What a rename leaves: every name but the first that is gone is a link to it.
		&tar.Header{Typeflag: tar.TypeLink, Name: "./new/gone-too", Linkname: "./gone"},
		&tar.Header{Typeflag: tar.TypeChar, Name: "./device", Devmajor: 1, Devminor: 3},
		&tar.Header{Typeflag: tar.TypeDir, Name: "./run/", Mode: 0o755},
		&tar.Header{Typeflag: tar.TypeReg, Name: "./etc/hosts", Mode: 0o644, Size: 1},
	)
	target := filepath.Join(t.TempDir(), "layer")
	packed, err := FromTar(t.Context(), bytes.NewReader(made), target, most)
	do(t, err)
	found := names(t, target)
	for name, kind := range map[string]byte{
		"./": tar.TypeDir, "new/": tar.TypeDir, "new/.wh..wh..opq": tar.TypeReg, "new/file": tar.TypeReg, "new/same": tar.TypeLink,
		"new/link": tar.TypeSymlink, ".wh.gone": tar.TypeReg, "new/.wh.gone-too": tar.TypeReg,
	} {
		if found[name] == nil || found[name].Typeflag != kind {
			t.Errorf("%s is %v", name, found[name])
		}
		delete(found, name)
	}
	if len(found) > 0 || packed.Entries != 7 {
		t.Errorf("the layer also has %v, %d entries", found, packed.Entries)
	}
}

func TestATarThatBreaksOffIsNoLayer(t *testing.T) {
	made := sentry(t, &tar.Header{Typeflag: tar.TypeReg, Name: "./file", Mode: 0o644, Size: 4096})
	target := filepath.Join(t.TempDir(), "layer")
	if _, err := FromTar(t.Context(), bytes.NewReader(made[:1024]), target, most); err == nil {
		t.Error("half a file was taken")
	}
	if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
		t.Error("half a layer is left")
	}
}

func FuzzFromTar(f *testing.F) {
	f.Add([]byte("nothing"))
	f.Fuzz(func(t *testing.T, content []byte) {
		target := filepath.Join(t.TempDir(), "layer")
		packed, err := FromTar(context.Background(), bytes.NewReader(content), target, 1<<20)
		if err == nil && packed.Size > 1<<20 {
			t.Errorf("%d bytes were written", packed.Size)
		}
	})
}

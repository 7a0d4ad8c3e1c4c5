package images

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"atoll.local/native/internal/images/unpack"
)

// derive puts an image into the store that has one layer more than another, as control assembles it.
func derive(t *testing.T, store *Store, digest string, annotations map[string]string, members map[string]string) string {
	t.Helper()
	config := Config{OS: "linux", Architecture: "amd64"}
	var layers []Descriptor
	if digest != "" {
		below, known, platform, err := load(store, digest)
		if err != nil {
			t.Fatal(err)
		}
		config, layers = *known, below.Layers
		config.OS, config.Architecture = platform.OS, platform.Architecture
	} else if platform, _ := ParsePlatform(""); true {
		config.OS, config.Architecture = platform.OS, platform.Architecture
	}
	content := tarOf(t, members)
	diff, err := store.Add(t.Context(), content)
	if err != nil {
		t.Fatal(err)
	}
	config.RootFS.Type = "layers"
	config.RootFS.DiffIDs = append(append([]string(nil), config.RootFS.DiffIDs...), diff)
	configText, _ := json.Marshal(config)
	configDigest, err := store.Add(t.Context(), configText)
	if err != nil {
		t.Fatal(err)
	}
	manifest, _ := json.Marshal(document{
		SchemaVersion: 2, MediaType: typeOCIManifest, Annotations: annotations,
		Config: Descriptor{MediaType: typeOCIConfig, Digest: configDigest, Size: int64(len(configText))},
		Layers: append(append([]Descriptor(nil), layers...), Descriptor{MediaType: typeLayerTar, Digest: diff, Size: int64(len(content))}),
	})
	made, err := store.Add(t.Context(), manifest)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func treeOf(cache, digest string) string {
	return filepath.Join(cache, "sha256", strings.TrimPrefix(digest, "sha256:"), "rootfs")
}

func inode(t *testing.T, name string) uint64 {
	t.Helper()
	var info unix.Stat_t
	if err := unix.Lstat(name, &info); err != nil {
		t.Fatal(err)
	}
	return info.Ino
}

func content(t *testing.T, name string) string {
	t.Helper()
	read, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(read)
}

// TestALayerMoreSharesTheRest also proves that the tree below is as it was.
func TestALayerMoreSharesTheRest(t *testing.T) {
	image := makeImage(t, map[string]string{"etc/kept": "1", "etc/changed": "1", "etc/gone": "1"})
	store, cache := newStore(t), t.TempDir()
	record, err := pull(t, store, "oci-layout:"+image.layout(t)+":v1", Options{})
	if err != nil {
		t.Fatal(err)
	}
	below, err := Unpack(t.Context(), store, record.Digest, cache, Making{Limits: unpack.DefaultLimits})
	if err != nil {
		t.Fatal(err)
	}
	outside := map[string]string{annotationOutside: "1"}
	more := derive(t, store, record.Digest, outside, map[string]string{"etc/changed": "2", "etc/.wh.gone": "", "etc/passwd": "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"})
	made, err := Unpack(t.Context(), store, more, cache, Making{Limits: unpack.DefaultLimits})
	if err != nil {
		t.Fatal(err)
	}
	old, new := treeOf(cache, record.Digest), treeOf(cache, more)
	if inode(t, old+"/etc/kept") != inode(t, new+"/etc/kept") {
		t.Error("what no layer touched was copied")
	}
	if content(t, old+"/etc/changed") != "1" || content(t, new+"/etc/changed") != "2" {
		t.Error("a layer wrote into the tree below")
	}
	if _, err := os.Lstat(new + "/etc/gone"); !errors.Is(err, os.ErrNotExist) {
		t.Error("a whiteout hid nothing")
	}
	if content(t, old+"/etc/gone") != "1" || strings.Contains(content(t, old+"/etc/passwd"), "1000:1000::/home/user:/bin/sh\nroot") {
		t.Error("the tree below has changed")
	}
	if !isWhole(old, below) {
		t.Error("the tree below is not what its manifest says any more")
	}
	if made.OwnBytes >= made.SizeBytes || len(made.Chain) != 3 {
		t.Errorf("%+v", made)
	}
	if want := []Share{{record.Digest, below.OwnBytes}}; !slices.Equal(made.Shares, want) || below.Shares != nil || below.OwnBytes != below.SizeBytes {
		t.Errorf("it shares %v, want %v", made.Shares, want)
	}
	third, err := Unpack(t.Context(), store, derive(t, store, more, outside, map[string]string{"third": "3"}), cache, Making{Limits: unpack.DefaultLimits})
	if err != nil {
		t.Fatal(err)
	}
	if want := []Share{{record.Digest, below.OwnBytes}, {more, made.OwnBytes}}; !slices.Equal(third.Shares, want) {
		t.Errorf("the third shares %v, want %v", third.Shares, want)
	}
}

func TestWithoutTheTreeBelowAllLayersAreTaken(t *testing.T) {
	image := makeImage(t, map[string]string{"a": "1"})
	store := newStore(t)
	record, err := pull(t, store, "oci-layout:"+image.layout(t)+":v1", Options{})
	if err != nil {
		t.Fatal(err)
	}
	outside := map[string]string{annotationOutside: "1"}
	more := derive(t, store, derive(t, store, record.Digest, outside, map[string]string{"b": "2"}), outside, map[string]string{"c": "3"})
	var trees []string
	for _, prepared := range [][]string{{more}, {record.Digest, more}} {
		cache := t.TempDir()
		for _, digest := range prepared {
			if _, err := Unpack(t.Context(), store, digest, cache, Making{Limits: unpack.DefaultLimits}); err != nil {
				t.Fatal(err)
			}
		}
		trees = append(trees, treeOf(cache, more))
	}
	for _, name := range []string{"a", "b", "c", "etc/passwd", "home/user"} {
		var one, other unix.Stat_t
		if err := errors.Join(unix.Lstat(trees[0]+"/"+name, &one), unix.Lstat(trees[1]+"/"+name, &other)); err != nil {
			t.Error(err)
		}
		if one.Mode != other.Mode || one.Uid != other.Uid || one.Size != other.Size && one.Mode&unix.S_IFMT == unix.S_IFREG {
			t.Errorf("%s differs: %+v, %+v", name, one, other)
		}
	}
}

func TestABrokenTreeIsNotBuiltUpon(t *testing.T) {
	image := makeImage(t, map[string]string{"a": "1", "b": "2"})
	store, cache := newStore(t), t.TempDir()
	record, err := pull(t, store, "oci-layout:"+image.layout(t)+":v1", Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Unpack(t.Context(), store, record.Digest, cache, Making{Limits: unpack.DefaultLimits}); err != nil {
		t.Fatal(err)
	}
	// As when it is just being removed.
	if err := os.Remove(treeOf(cache, record.Digest) + "/a"); err != nil {
		t.Fatal(err)
	}
	more := derive(t, store, record.Digest, map[string]string{annotationOutside: "1"}, map[string]string{"c": "3"})
	if _, err := Unpack(t.Context(), store, more, cache, Making{Limits: unpack.DefaultLimits}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "b", "c"} {
		if _, err := os.Lstat(treeOf(cache, more) + "/" + name); err != nil {
			t.Error(err)
		}
	}
}

func TestAReadyMadeImageIsSharedAndNamed(t *testing.T) {
	store, cache, base := newStore(t), t.TempDir(), t.TempDir()
	at := time.Unix(1_700_000_000, 0)
	err := errors.Join(os.Mkdir(base+"/etc", 0o751), os.WriteFile(base+"/etc/motd", []byte("hello"), 0o640), os.Chmod(base+"/etc", 0o751),
		os.Link(base+"/etc/motd", base+"/etc/same"), os.Symlink("motd", base+"/etc/link"), os.Chtimes(base+"/etc", at, at))
	if err != nil {
		t.Fatal(err)
	}
	digest := "sha256:" + strings.Repeat("b", 64)
	more := derive(t, store, "", map[string]string{annotationBase: digest, annotationOutside: "0"}, map[string]string{"new/file": "x"})
	if _, err := Unpack(t.Context(), store, more, cache, Making{Limits: unpack.DefaultLimits}); CodeOf(err) != CodeUnavailable {
		t.Fatalf("without the ready-made image: %v", err)
	}
	made, err := Unpack(t.Context(), store, more, cache, Making{Base: Base{Digest: digest, Tree: base}, Limits: unpack.DefaultLimits})
	if err != nil {
		t.Fatal(err)
	}
	if want := []Share{{digest, int64(len("hello"))}}; !slices.Equal(made.Shares, want) {
		t.Errorf("it shares %v, want %v", made.Shares, want)
	}
	tree := treeOf(cache, more)
	if inode(t, tree+"/etc/motd") != inode(t, base+"/etc/motd") || inode(t, tree+"/etc/same") != inode(t, base+"/etc/motd") {
		t.Error("its files are not shared")
	}
	info, err := os.Stat(tree + "/etc")
	if err != nil || info.Mode().Perm() != 0o751 {
		t.Errorf("etc is %v: %v", info.Mode(), err)
	}
	if leads, _ := os.Readlink(tree + "/etc/link"); leads != "motd" {
		t.Errorf("the link leads to %q", leads)
	}
	if content(t, tree+"/new/file") != "x" {
		t.Error("the layer is not there")
	}
	if names, _ := os.ReadDir(base); len(names) != 1 {
		t.Errorf("the ready-made image has changed: %v", names)
	}
}

func TestWhatAnImageSaysOfItselfIsChecked(t *testing.T) {
	store, cache := newStore(t), t.TempDir()
	for _, said := range []map[string]string{
		{annotationBase: "nonsense"}, {annotationOutside: "2"}, {annotationOutside: "-1"}, {annotationOutside: "x"},
		{annotationBase: "sha256:" + strings.Repeat("b", 64), annotationOutside: "1"},
	} {
		image := derive(t, store, "", said, map[string]string{"a": "1"})
		if _, err := Unpack(t.Context(), store, image, cache, Making{Limits: unpack.DefaultLimits}); CodeOf(err) != CodeRefused {
			t.Errorf("%v: %v", said, err)
		}
	}
}

func TestFilesOfAnotherFileSystemAreCopied(t *testing.T) {
	other, err := os.MkdirTemp("/dev/shm", "atoll-clone-")
	if err != nil {
		t.Skip("/dev/shm is missing: mount a tmpfs there")
	}
	defer os.RemoveAll(other)
	to := t.TempDir()
	if err := errors.Join(os.WriteFile(other+"/a", []byte("a"), 0o604), os.Chmod(other+"/a", 0o604), os.Link(other+"/a", other+"/b"), os.Symlink("a", other+"/c")); err != nil {
		t.Fatal(err)
	}
	if copied, err := cloneTree(other, to); err != nil || copied != 1 {
		t.Fatal(copied, err)
	}
	info, err := os.Stat(to + "/a")
	if err != nil || info.Mode().Perm() != 0o604 || content(t, to+"/a") != "a" || inode(t, to+"/a") != inode(t, to+"/b") {
		t.Errorf("%v %v", info, err)
	}
	if leads, _ := os.Readlink(to + "/c"); leads != "a" {
		t.Errorf("the link leads to %q", leads)
	}
}

package unpack

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// stacked puts layers on top of each other by way of staging, all of them read before the first is placed.
func stacked(t testing.TB, root string, limits Limits, layers ...[]byte) error {
	t.Helper()
	tree, err := OpenTree(root)
	if err != nil {
		t.Fatal(err)
	}
	defer tree.Close()
	beside := t.TempDir()
	meter := &Meter{Limits: limits}
	var all []*Staged
	for i, one := range layers {
		staged, err := Stage(context.Background(), plain(one), meter, filepath.Join(beside, fmt.Sprint(i)))
		if err != nil {
			return err
		}
		all = append(all, staged)
	}
	for _, staged := range all {
		if err := tree.Place(context.Background(), staged, meter); err != nil {
			return errors.Join(err, staged.Close())
		}
		if err := staged.Remove(); err != nil {
			t.Fatal(err)
		}
	}
	if left, _ := os.ReadDir(beside); len(left) != 0 {
		t.Errorf("staged layers left %v", left)
	}
	return nil
}

// described is a tree as text: every name with type, mode, owner, time, content, links to the same file, attributes.
func described(t testing.TB, root string) []string {
	t.Helper()
	first := map[uint64]string{}
	var found []string
	err := filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
		var info unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &info)
		}
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(root, path)
		line := fmt.Sprintf("%s %o %d:%d", name, info.Mode, info.Uid, info.Gid)
		if name != "." { // the root's time is that of its last entry
			line += fmt.Sprint(" ", info.Mtim.Sec)
		}
		switch info.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if _, known := first[info.Ino]; !known {
				first[info.Ino] = name
			}
			line += fmt.Sprintf(" %s is %s", sum(content), first[info.Ino])
			var value [64]byte
			if n, err := unix.Lgetxattr(path, "user.colour", value[:]); err == nil {
				line += " " + string(value[:n])
			}
		case unix.S_IFLNK:
			leads, _ := os.Readlink(path)
			line += " -> " + leads
		case unix.S_IFDIR:
			if time.Since(time.Unix(info.Mtim.Unix())) < time.Hour {
				line = strings.TrimSuffix(line, fmt.Sprint(info.Mtim.Sec)) + "now"
			}
		}
		found = append(found, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(found)
	return found
}

func TestStagedLayersMakeTheSameTree(t *testing.T) {
	layers := [][]byte{
		pack(t, dir("a/"), file("a/kept", "1"), file("a/hidden", "1"), dir("opaque/"), file("opaque/old", "1"), dir("gone/"), file("gone/deep", "1"),
			file("changed", "old"), symlink("way", "a"), dir("d"), file("d/in", "1"), file("empty", ""), item{name: "owned", body: "x", kind: tar.TypeReg, mode: 0o6755, uid: 7}),
		pack(t, file("a/.wh.hidden", ""), dir("opaque/"), file("opaque/new", "2"), file("opaque/.wh..wh..opq", ""), file(".wh.gone", ""),
			file("changed", "new"), file("./b/implied", "2"), file("way/through", "2"), hardlink("below", "a/kept"), file("d", "a file now"),
			file("twice", "first"), file("twice", "second"), hardlink("twice2", "twice")),
		pack(t, item{name: "attr", kind: tar.TypeReg, mode: 0o600, body: strings.Repeat("\x00", 1<<20), pax: map[string]string{"SCHILY.xattr.user.colour": "blue"}},
			item{name: "pipe", kind: tar.TypeFifo, mode: 0o600}, item{name: "dev/sda", kind: tar.TypeBlock}, item{name: ".", kind: tar.TypeDir, mode: 0o711},
			file("x/new", "2"), file("x/.wh.new", ""), hardlink("again", "below"), file("big", strings.Repeat("y", 300<<10))),
	}
	whole := mustApply(t, layers...)
	beside := t.TempDir()
	if err := stacked(t, beside, DefaultLimits, layers...); err != nil {
		t.Fatal(err)
	}
	want, got := described(t, whole), described(t, beside)
	if !slices.Equal(want, got) {
		t.Errorf("applied:\n%s\nstaged:\n%s", strings.Join(want, "\n"), strings.Join(got, "\n"))
	}
}

func TestALayerThatIsNotWhatItShouldBeIsNotStaged(t *testing.T) {
	raw := pack(t, file("a", "x"))
	for name, mend := range map[string]func(*Layer){
		"digest":    func(l *Layer) { l.Digest = sum(nil) },
		"diff id":   func(l *Layer) { l.DiffID = sum(nil) },
		"size":      func(l *Layer) { l.Size++ },
		"truncated": func(l *Layer) { l.Content = bytes.NewReader(raw[:700]) },
	} {
		layer := plain(raw)
		mend(&layer)
		staged, err := Stage(t.Context(), layer, &Meter{Limits: DefaultLimits}, filepath.Join(t.TempDir(), "layer"))
		if staged != nil || codeOf(err) != CodeCorrupt {
			t.Errorf("%s: %v %v", name, staged, err)
		}
	}
}

// TestAReaderThatFailsEndsTheReadingAhead: what was read before the failure is still had, and the failure is the reader's own.
func TestAReaderThatFailsEndsTheReadingAhead(t *testing.T) {
	alas := errors.New("alas")
	ended := make(chan struct{})
	from := readAhead(io.MultiReader(strings.NewReader(strings.Repeat("x", 3*aheadBytes)), failing{alas}), func() { close(ended) })
	got, err := io.ReadAll(from)
	if len(got) != 3*aheadBytes || !errors.Is(err, alas) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	<-ended
	from.Close()
}

func TestWhoeverReadsAheadStopsWhenNobodyWantsMore(t *testing.T) {
	ended := make(chan struct{})
	from := readAhead(endless{}, func() { close(ended) })
	if _, err := io.ReadFull(from, make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	from.Close()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Fatal("it reads on")
	}
}

type failing struct{ with error }

func (f failing) Read([]byte) (int, error) { return 0, f.with }

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

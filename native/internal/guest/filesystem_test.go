package guest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

type entryInfo struct {
	Name          string
	Type          string
	Path          string
	Size          string
	Mode          uint32
	Permissions   string
	Owner         string
	Group         string
	ModifiedTime  time.Time
	SymlinkTarget *string
	IsSymlink     bool
	Metadata      map[string]string
}

type entryAnswer struct{ Entry entryInfo }

func (b *box) stat(path string) (entryInfo, *rpcError) {
	b.t.Helper()
	var got entryAnswer
	e := b.unary("filesystem.Filesystem/Stat", m{"path": path}, &got)
	return got.Entry, e
}

func TestStat(t *testing.T) {
	b := newBox(t)
	_, _ = b.put("d/file.txt", "12345")
	must(t, unix.Chmod(b.home+"/d/file.txt", 0o4640))
	e, failure := b.stat("~/d/file.txt")
	if failure != nil || e.Name != "file.txt" || e.Type != "FILE_TYPE_FILE" || e.Path != b.home+"/d/file.txt" || e.Size != "5" || e.Mode != 0o640 ||
		e.Permissions != "urw-r-----" || e.Owner != "user" || e.Group != "user" || time.Since(e.ModifiedTime) > time.Minute || e.SymlinkTarget != nil || e.IsSymlink {
		t.Fatalf("%+v %v", e, failure)
	}
	if e, _ := b.stat("d"); e.Type != "FILE_TYPE_DIRECTORY" || e.Permissions != "drwxr-xr-x" || e.Mode != 0o755 {
		t.Fatalf("%+v", e)
	}
	if e, _ := b.stat(""); e.Path != b.home {
		t.Fatalf("%+v", e)
	}
	must(t, os.Symlink("d/file.txt", b.home+"/link"))
	must(t, os.Symlink("d", b.home+"/dirlink"))
	must(t, os.Symlink("nowhere", b.home+"/broken"))
	must(t, os.Symlink("cycle", b.home+"/cycle"))
	if e, _ := b.stat("link"); e.Type != "FILE_TYPE_FILE" || e.SymlinkTarget == nil || *e.SymlinkTarget != b.home+"/d/file.txt" || e.Path != b.home+"/link" || e.Mode != 0o640 || !e.IsSymlink {
		t.Fatalf("%+v", e)
	}
	if e, _ := b.stat("dirlink"); e.Type != "FILE_TYPE_DIRECTORY" || *e.SymlinkTarget != b.home+"/d" {
		t.Fatalf("%+v", e)
	}
	for _, name := range []string{"broken", "cycle"} {
		if e, failure := b.stat(name); failure != nil || e.Type != "FILE_TYPE_UNSPECIFIED" || *e.SymlinkTarget != b.home+"/"+name {
			t.Fatalf("%+v %v", e, failure)
		}
	}
	must(t, os.Chown(b.home+"/d", 12345, 54321))
	if e, _ := b.stat("d"); e.Owner != "12345" || e.Group != "54321" {
		t.Fatalf("%+v", e)
	}
	for path, want := range map[string]string{"none": "404 not_found: file not found", "d/file.txt/x": "404 not_found: file not found",
		"~other/x": "400 invalid_argument: failed to expand path", strings.Repeat("x/", 3000): "400 invalid_argument: path is longer"} {
		if _, e := b.stat(path); !strings.HasPrefix(e.String(), want) {
			t.Errorf("%.20s: %v", path, e)
		}
	}
}

func TestMakeDir(t *testing.T) {
	b := newBox(t)
	var got entryAnswer
	if e := b.unary("filesystem.Filesystem/MakeDir", m{"path": "a/b/c"}, &got); e != nil || got.Entry.Path != b.home+"/a/b/c" || got.Entry.Type != "FILE_TYPE_DIRECTORY" {
		t.Fatalf("%+v %v", got, e)
	}
	for _, path := range []string{"a", "a/b", "a/b/c"} {
		if uid, gid, mode := owner(t, b.home+"/"+path); uid != userUID || gid != userGID || mode != 0o755 {
			t.Errorf("%s: %d:%d %o", path, uid, gid, mode)
		}
	}
	_, _ = b.put("file", "")
	for path, want := range map[string]string{
		"a/b/c":  "409 already_exists: directory already exists: " + b.home + "/a/b/c",
		"file":   "400 invalid_argument: path already exists but it is not a directory: " + b.home + "/file",
		"file/x": "400 invalid_argument: error creating directory: path is a file: " + b.home + "/file",
	} {
		if e := b.unary("filesystem.Filesystem/MakeDir", m{"path": path}, nil); e.String() != want {
			t.Errorf("%s: %v", path, e)
		}
	}
}

func (b *box) list(path string, depth int) ([]entryInfo, *rpcError) {
	b.t.Helper()
	var got struct{ Entries []entryInfo }
	e := b.unary("filesystem.Filesystem/ListDir", m{"path": path, "depth": depth}, &got)
	return got.Entries, e
}

func TestListDir(t *testing.T) {
	b := newBox(t)
	for _, path := range []string{"d/b/deep/deepest", "d/a", "d/c <&>", "d/B"} {
		_, _ = b.put(path, path)
	}
	must(t, os.Symlink("b", b.home+"/d/link"))
	must(t, os.Symlink("d", b.home+"/root"))
	for depth, want := range map[int]string{
		0: "B a b c <&> link", 1: "B a b c <&> link", 2: "B a b b/deep c <&> link", 3: "B a b b/deep b/deep/deepest c <&> link", 99: "B a b b/deep b/deep/deepest c <&> link",
	} {
		for _, root := range []string{"d", "root"} {
			entries, e := b.list(root, depth)
			var names []string
			for _, entry := range entries {
				name, err := filepath.Rel(b.home+"/"+root, entry.Path)
				must(t, err)
				if filepath.Base(name) != entry.Name || entry.Owner != "user" && !entry.IsSymlink {
					t.Errorf("%+v", entry)
				}
				names = append(names, name)
			}
			if e != nil || strings.Join(names, " ") != want {
				t.Errorf("%s depth %d: %q %v", root, depth, names, e)
			}
		}
	}
	must(t, os.Mkdir(b.home+"/empty", 0o755))
	if entries, e := b.list("empty", 5); e != nil || entries == nil || len(entries) != 0 {
		t.Fatalf("%v %v", entries, e)
	}
	must(t, os.Symlink("cycle", b.home+"/cycle"))
	for path, want := range map[string]string{
		"none":  "404 not_found: directory not found",
		"d/a":   "400 invalid_argument: path is not a directory: " + b.home + "/d/a",
		"d/a/x": "404 not_found: directory not found",
		"cycle": "400 failed_precondition: cyclic symlink",
	} {
		if _, e := b.list(path, 1); !strings.HasPrefix(e.String(), want) {
			t.Errorf("%s: %v", path, e)
		}
	}
}

func TestListDirOfManyFiles(t *testing.T) {
	b := newBox(t)
	dir := b.home + "/many"
	must(t, os.Mkdir(dir, 0o755))
	for i := range 3000 {
		must(t, os.WriteFile(fmt.Sprintf("%s/%05d", dir, i), nil, 0o644))
	}
	entries, e := b.list("many", 1)
	if e != nil || len(entries) != 3000 || entries[2999].Name != "02999" {
		t.Fatalf("%d %v", len(entries), e)
	}
}

func TestMove(t *testing.T) {
	b := newBox(t)
	_, _ = b.put("from", "x")
	var got entryAnswer
	if e := b.unary("filesystem.Filesystem/Move", m{"source": "from", "destination": "new/dir/to"}, &got); e != nil || got.Entry.Path != b.home+"/new/dir/to" || got.Entry.Size != "1" {
		t.Fatalf("%+v %v", got, e)
	}
	if uid, _, _ := owner(t, b.home+"/new/dir"); uid != userUID {
		t.Fatal(uid)
	}
	if e := b.unary("filesystem.Filesystem/Move", m{"source": "from", "destination": "elsewhere/y"}, nil); e == nil || e.Code != "not_found" || !strings.HasPrefix(e.Message, "source file not found") {
		t.Fatal(e)
	}
	if _, err := os.Stat(b.home + "/elsewhere"); err == nil {
		t.Fatal("a failed move made directories")
	}
}

func TestMoveBetweenFileSystems(t *testing.T) {
	b := newBox(t)
	b.smallDisk()
	_, _ = b.put("tree/sub/file", "content")
	must(t, os.Symlink("sub/file", b.home+"/tree/link"))
	must(t, unix.Chmod(b.home+"/tree/sub", 0o2750))
	must(t, unix.Mkfifo(b.home+"/tree/fifo", 0o600))
	when := time.Unix(1_600_000_000, 0)
	must(t, os.Chtimes(b.home+"/tree/sub/file", when, when))
	must(t, os.Chtimes(b.home+"/tree/sub", when, when))
	if e := b.unary("filesystem.Filesystem/Move", m{"source": "tree", "destination": "small/tree"}, nil); e != nil {
		t.Fatal(e)
	}
	if _, err := os.Lstat(b.home + "/tree"); err == nil {
		t.Fatal("the source is left")
	}
	content, err := os.ReadFile(b.home + "/small/tree/link")
	must(t, err)
	info, err := os.Stat(b.home + "/small/tree/sub")
	must(t, err)
	if uid, _, _ := owner(t, b.home+"/small/tree/sub/file"); string(content) != "content" || uid != userUID || info.Mode() != os.ModeDir|os.ModeSetgid|0o750 || !info.ModTime().Equal(when) {
		t.Fatalf("%q %d %v %v", content, uid, info.Mode(), info.ModTime())
	}
	// A move that does not fit changes nothing.
	_, _ = b.put("big", strings.Repeat("x", 2<<20))
	if e := b.unary("filesystem.Filesystem/Move", m{"source": "big", "destination": "small/big"}, nil); e == nil || e.Code != "resource_exhausted" {
		t.Fatal(e)
	}
	items, _ := os.ReadDir(b.home + "/small")
	if len(items) != 1 {
		t.Fatalf("%v", items)
	}
	if e, failure := b.stat("big"); failure != nil || e.Size != fmt.Sprint(2<<20) {
		t.Fatal(failure)
	}
}

func TestRemove(t *testing.T) {
	b := newBox(t)
	_, _ = b.put("d/e/f", "x")
	for _, path := range []string{"d", "d", "never/there"} {
		if e := b.unary("filesystem.Filesystem/Remove", m{"path": path}, nil); e != nil {
			t.Fatalf("%s: %v", path, e)
		}
	}
	items, _ := os.ReadDir(b.home)
	if len(items) != 0 {
		t.Fatalf("%v", items)
	}
}

type fileEvent struct {
	Name  string
	Type  string
	Entry *entryInfo
}

func (b *box) watcher(request m) string {
	b.t.Helper()
	var got struct{ WatcherId string }
	if e := b.unary("filesystem.Filesystem/CreateWatcher", request, &got); e != nil || got.WatcherId == "" {
		b.t.Fatalf("%+v %v", got, e)
	}
	return got.WatcherId
}

// events polls once: all that happened before is there.
func (b *box) events(watcher string) []fileEvent {
	b.t.Helper()
	var got struct{ Events []fileEvent }
	if e := b.unary("filesystem.Filesystem/GetWatcherEvents", m{"watcherId": watcher}, &got); e != nil {
		b.t.Fatal(e)
	}
	return got.Events
}

func words(events []fileEvent) string {
	var all []string
	for _, e := range events {
		all = append(all, e.Name+" "+strings.ToLower(strings.TrimPrefix(e.Type, "EVENT_TYPE_")))
	}
	return strings.Join(all, ", ")
}

func TestWatchNewFile(t *testing.T) {
	b := newBox(t)
	must(t, os.Mkdir(b.home+"/w", 0o755))
	for range 20 {
		id := b.watcher(m{"path": "w"})
		_, _ = b.put("w/f", "some content")
		if got := words(b.events(id)); got != "f create, f chmod, f write" {
			t.Fatal(got)
		}
		if got := b.events(id); got == nil || len(got) != 0 {
			t.Fatal(got)
		}
		must(t, os.Remove(b.home+"/w/f"))
		if got := words(b.events(id)); got != "f remove" {
			t.Fatal(got)
		}
		if e := b.unary("filesystem.Filesystem/RemoveWatcher", m{"watcherId": id}, nil); e != nil {
			t.Fatal(e)
		}
		if e := b.unary("filesystem.Filesystem/RemoveWatcher", m{"watcherId": id}, nil); e.String() != "404 not_found: watcher with id "+id+" not found" {
			t.Fatal(e)
		}
	}
}

func TestWatchEntries(t *testing.T) {
	b := newBox(t)
	id := b.watcher(m{"path": "~", "include_entry": true})
	_, _ = b.put("x", "123")
	for _, e := range b.events(id) {
		if e.Entry != nil {
			t.Fatalf("only lowerCamelCase is spoken: %+v", e)
		}
	}
	id = b.watcher(m{"path": "~", "includeEntry": true})
	_, _ = b.put("f", "123")
	for _, e := range b.events(id) {
		if e.Entry == nil || e.Entry.Path != b.home+"/f" || (e.Type == "EVENT_TYPE_WRITE" && e.Entry.Size != "3") {
			t.Fatalf("%+v", e)
		}
	}
	must(t, os.Rename(b.home+"/f", b.home+"/g"))
	must(t, os.Remove(b.home+"/g"))
	events := b.events(id)
	if words(events) != "f rename, g create, g remove" {
		t.Fatal(words(events))
	}
	for _, e := range events {
		// Only what may still be there has an entry.
		if e.Entry != nil && e.Type != "EVENT_TYPE_CREATE" {
			t.Fatalf("%+v", e)
		}
	}
}

func TestWatchTree(t *testing.T) {
	b := newBox(t)
	must(t, os.MkdirAll(b.home+"/w/old/older", 0o755))
	flat, tree := b.watcher(m{"path": "w"}), b.watcher(m{"path": "w", "recursive": true})
	_, _ = b.put("w/old/older/f", "x")
	if got := words(b.events(tree)); got != "old/older/f create, old/older/f chmod, old/older/f write" {
		t.Fatal(got)
	}
	if got := words(b.events(flat)); got != "" {
		t.Fatal(got)
	}
	if e := b.unary("filesystem.Filesystem/MakeDir", m{"path": "w/new"}, nil); e != nil {
		t.Fatal(e)
	}
	if got := words(b.events(tree)); got != "new create, new chmod" {
		t.Fatal(got)
	}
	_, _ = b.put("w/new/f", "x")
	if got := words(b.events(tree)); got != "new/f create, new/f chmod, new/f write" {
		t.Fatal(got)
	}
	// A renamed directory is watched under its new name, one that left is not watched.
	must(t, os.Rename(b.home+"/w/old", b.home+"/w/young"))
	_, _ = b.put("w/young/older/g", "")
	if got := words(b.events(tree)); got != "old rename, young create, young/older/g create, young/older/g chmod" {
		t.Fatal(got)
	}
	must(t, os.Rename(b.home+"/w/young", b.home+"/gone"))
	if got := words(b.events(tree)); got != "young rename" {
		t.Fatal(got)
	}
	_, _ = b.put("gone/older/h", "")
	if got := words(b.events(tree)); got != "" {
		t.Fatal(got)
	}
	must(t, os.Rename(b.home+"/gone", b.home+"/w/back"))
	if got := words(b.events(tree)); got != "back create" {
		t.Fatal(got)
	}
	_, _ = b.put("w/back/older/i", "")
	if got := words(b.events(tree)); got != "back/older/i create, back/older/i chmod" {
		t.Fatal(got)
	}
	must(t, os.RemoveAll(b.home+"/w/new"))
	if got := words(b.events(tree)); got != "new/f remove, new remove" {
		t.Fatal(got)
	}
	// A new directory of the old name is a new directory.
	must(t, os.Mkdir(b.home+"/w/new", 0o755))
	_ = b.events(tree)
	_, _ = b.put("w/new/again", "")
	if got := words(b.events(tree)); got != "new/again create, new/again chmod" {
		t.Fatal(got)
	}
}

// In a tree that grows faster than it is watched, every directory and file is reported created exactly once, and
// every file that holds something written.
func TestWatchMissesNothingInANewTree(t *testing.T) {
	b := newBox(t)
	must(t, os.Mkdir(b.home+"/w", 0o755))
	id := b.watcher(m{"path": "w", "recursive": true})
	var want []string
	for i := range 40 {
		dir := fmt.Sprintf("d%02d/sub/subsub", i)
		must(t, os.MkdirAll(b.home+"/w/"+dir, 0o755))
		must(t, os.WriteFile(b.home+"/w/"+dir+"/f", []byte("x"), 0o644))
		want = append(want, fmt.Sprintf("d%02d", i), fmt.Sprintf("d%02d/sub", i), dir, dir+"/f")
	}
	created, written := map[string]int{}, map[string]int{}
	for _, e := range b.events(id) {
		switch e.Type {
		case "EVENT_TYPE_CREATE":
			created[e.Name]++
		case "EVENT_TYPE_WRITE":
			written[e.Name]++
		}
	}
	for _, name := range want {
		if created[name] != 1 {
			t.Errorf("%s was created %d times", name, created[name])
		}
		if strings.HasSuffix(name, "/f") && written[name] == 0 {
			t.Errorf("%s was never written", name)
		}
	}
	if len(created) != len(want) {
		t.Errorf("%d, not %d", len(created), len(want))
	}
	// And the next creation of a name that was found counts again.
	must(t, os.Remove(b.home+"/w/d00/sub/subsub/f"))
	must(t, os.WriteFile(b.home+"/w/d00/sub/subsub/f", nil, 0o644))
	if got := words(b.events(id)); got != "d00/sub/subsub/f remove, d00/sub/subsub/f create" {
		t.Fatal(got)
	}
}

func TestWatchItself(t *testing.T) {
	b := newBox(t)
	must(t, os.MkdirAll(b.home+"/w", 0o755))
	id := b.watcher(m{"path": "w", "recursive": true})
	must(t, os.Chmod(b.home+"/w", 0o700))
	must(t, os.Remove(b.home+"/w"))
	got := strings.Split(words(b.events(id)), ", ")
	if got[0] != ". chmod" || got[len(got)-1] != ". remove" {
		t.Fatal(got)
	}
	if got := words(b.events(id)); got != "" {
		t.Fatal(got)
	}
}

func TestWatchRefusals(t *testing.T) {
	b := newBox(t)
	_, _ = b.put("file", "")
	for path, want := range map[string]string{"none": "not_found: path " + b.home + "/none not found", "file": "invalid_argument: path " + b.home + "/file not a directory"} {
		if e := b.unary("filesystem.Filesystem/CreateWatcher", m{"path": path}, nil); !strings.Contains(e.String(), want) {
			t.Errorf("%s: %v", path, e)
		}
		_, ended, failure := b.open("filesystem.Filesystem/WatchDir", m{"path": path}).next()
		if !ended || !strings.Contains(failure.String(), want) {
			t.Errorf("%s: %v", path, failure)
		}
	}
	if e := b.unary("filesystem.Filesystem/GetWatcherEvents", m{"watcherId": "w1"}, nil); e.String() != "404 not_found: watcher with id w1 not found" {
		t.Fatal(e)
	}
}

func TestWatchersAreLimited(t *testing.T) {
	b := newBox(t)
	var last *rpcError
	made := 0
	for range 200 {
		if last = b.unary("filesystem.Filesystem/CreateWatcher", m{"path": "~"}, nil); last != nil {
			break
		}
		made++
	}
	if last == nil || last.Code != "resource_exhausted" || made > 128 {
		t.Fatalf("%d watchers, %v", made, last)
	}
}

func TestWatcherQueueIsBounded(t *testing.T) {
	b := newBox(t)
	id := b.watcher(m{"path": "~"})
	for i := range 6000 {
		name := fmt.Sprintf("%s/%d", b.home, i)
		must(t, os.WriteFile(name, []byte("x"), 0o644))
		must(t, os.Remove(name))
		if i%500 == 0 {
			time.Sleep(5 * time.Millisecond) // so that it is our queue that overflows, not the kernel's
		}
	}
	if got := len(b.events(id)); got == 0 || got > 16384 {
		t.Fatal(got)
	}
	e := b.unary("filesystem.Filesystem/GetWatcherEvents", m{"watcherId": id}, nil)
	if e == nil || (e.Code != "resource_exhausted" && !strings.Contains(e.Message, "overflow")) {
		t.Fatal(e)
	}
}

func TestWatchDirStreams(t *testing.T) {
	b := newBox(t)
	s := b.open("filesystem.Filesystem/WatchDir", m{"path": "~", "recursive": true, "includeEntry": true}, "Keepalive-Ping-Interval", "1")
	if message, _, failure := s.next(); string(message) != `{"start":{}}` {
		t.Fatalf("%s %v", message, failure)
	}
	_, _ = b.put("d/f", "x")
	var got []fileEvent
	for !slices.ContainsFunc(got, func(e fileEvent) bool { return e.Name == "d/f" && e.Type == "EVENT_TYPE_WRITE" }) {
		got = append(got, s.fileEvent(t))
	}
	if got[0].Name != "d" || got[0].Type != "EVENT_TYPE_CREATE" || got[0].Entry == nil || got[0].Entry.Type != "FILE_TYPE_DIRECTORY" {
		t.Fatalf("%+v", got)
	}
	for {
		message, ended, failure := s.next()
		if ended {
			t.Fatal(failure)
		}
		if string(message) == `{"keepalive":{}}` {
			break
		}
	}
}

func (s *stream) fileEvent(t *testing.T) fileEvent {
	t.Helper()
	var e struct{ Filesystem fileEvent }
	message, ended, failure := s.next()
	if ended {
		t.Fatal(failure)
	}
	decode(t, message, &e)
	return e.Filesystem
}

func TestWatchDirEndsAtItsDeadline(t *testing.T) {
	b := newBox(t)
	s := b.open("filesystem.Filesystem/WatchDir", m{"path": "~"}, "Connect-Timeout-Ms", "300")
	_, _, _ = s.next()
	if _, ended, failure := s.next(); !ended || failure == nil || failure.Code != "deadline_exceeded" {
		t.Fatal(failure)
	}
}

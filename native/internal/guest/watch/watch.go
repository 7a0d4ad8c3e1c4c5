// Package watch turns inotify into the events of the envd contract, for one directory or a whole tree.
//
// Theory of operation. One inotify instance per watcher; the kernel's bounded queue is the only buffer, so a slow
// reader costs no memory and learns that it missed something (ErrOverflow). In a tree each directory has a watch of its
// own. A directory that appears is watched first and read second, so nothing in it is missed; what reading finds is
// reported as created, and an inotify event that says the same again is dropped. A directory that is renamed inside
// the tree keeps its watches under its new name; one that is moved out loses them.
//
// The event types are those of fsnotify, which envd uses: moved-to is CREATE, moved-from is RENAME. The library itself
// is not used: it does not watch trees, hides the rename cookies needed for them, and holds 64 KiB per watcher.
package watch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// The event types on the wire.
const (
	Create = "EVENT_TYPE_CREATE"
	Write  = "EVENT_TYPE_WRITE"
	Remove = "EVENT_TYPE_REMOVE"
	Rename = "EVENT_TYPE_RENAME"
	Chmod  = "EVENT_TYPE_CHMOD"
)

// directoriesMax bounds the watches of one tree; the kernel's own limit may be lower.
const directoriesMax = 16_384

const bufferBytes = 16 << 10

var (
	// ErrOverflow says that events came faster than they were read, and that some are lost.
	ErrOverflow = errors.New("queue or buffer overflow")
	// ErrTooMany says that the tree has more directories than can be watched.
	ErrTooMany = errors.New("too many directories to watch")
)

const mask = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_MODIFY | unix.IN_ATTRIB |
	unix.IN_DELETE | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR

// Event is one thing that happened to the file Name, relative to the watched directory ("." is that itself).
type Event struct {
	Name string
	Type string
}

// Watcher watches one directory or tree and hands events to its sink, in order and one call at a time.
type Watcher struct {
	root      string
	recursive bool
	file      *os.File
	sink      func([]Event)

	mu     sync.Mutex // held while events are read and handed on
	buffer []byte
	failed error

	directories map[int32]string // watch → directory relative to root, "" for root itself
	watches     map[string]int32

	// found are names reported because reading a new directory found them. foundBytes of the kernel's queue may
	// still repeat them; after those the set is void.
	found      map[string]struct{}
	foundBytes int
	looked     bool // a new directory was read since the last batch ended

	moved *movedFrom

	closing sync.Once
	closed  atomic.Bool
}

// movedFrom is a directory that left its place with the last event; the next may say where it went.
type movedFrom struct {
	cookie uint32
	name   string
}

// New starts watching root. Events from now on are seen; they come to sink from Run and Drain.
func New(root string, recursive bool, sink func([]Event)) (*Watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init1", err)
	}
	w := &Watcher{
		root:        root,
		recursive:   recursive,
		file:        os.NewFile(uintptr(fd), "inotify"),
		sink:        sink,
		buffer:      make([]byte, bufferBytes),
		directories: make(map[int32]string),
		watches:     make(map[string]int32),
		found:       make(map[string]struct{}),
	}
	if err := w.add("", nil); err != nil {
		w.Close()
		return nil, err
	}
	if len(w.directories) == 0 {
		w.Close()
		return nil, &os.PathError{Op: "watch", Path: root, Err: os.ErrNotExist}
	}
	return w, nil
}

// Close ends the watch and a Run that waits.
func (w *Watcher) Close() {
	w.closing.Do(func() {
		w.closed.Store(true)
		_ = w.file.Close()
	})
}

// Run hands events on as they come, until the watcher is closed (os.ErrClosed) or fails.
func (w *Watcher) Run() error {
	for {
		if err := w.wait(); err != nil {
			return w.closedOr(err)
		}
		if err := w.Drain(); err != nil {
			return err
		}
	}
}

// Drain hands on everything that has happened before the call. The kernel queues an event before the system call that
// caused it returns, so a client that writes and then asks gets its own events.
func (w *Watcher) Drain() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.failed == nil {
		n, err := w.read(w.buffer)
		if err != nil || n == 0 {
			w.failed = w.closedOr(err)
			break
		}
		w.failed = w.process(w.buffer[:n])
	}
	return w.failed
}

// closedOr tells the end that Close makes from failures: the runtime's own error for it has no public name.
func (w *Watcher) closedOr(err error) error {
	if err != nil && w.closed.Load() {
		return os.ErrClosed
	}
	return err
}

func (w *Watcher) process(raw []byte) error {
	var events []Event
	emit := func(name, kind string) { events = append(events, Event{name, kind}) }
	err := parse(raw, func(event rawEvent) error { return w.handle(event, emit) })
	w.forgetMoved()
	w.ageFound(len(raw))
	if len(events) > 0 {
		w.sink(events)
	}
	return err
}

// rawEvent is a struct inotify_event.
type rawEvent struct {
	watch  int32
	mask   uint32
	cookie uint32
	name   string
}

const rawHeaderBytes = 16

// parse splits what one read returned.
func parse(buffer []byte, handle func(rawEvent) error) error {
	for len(buffer) >= rawHeaderBytes {
		length := int(binary.NativeEndian.Uint32(buffer[12:]))
		if length > len(buffer)-rawHeaderBytes {
			return fmt.Errorf("truncated inotify event: %d of %d bytes", len(buffer)-rawHeaderBytes, length)
		}
		name, _, _ := strings.Cut(string(buffer[rawHeaderBytes:rawHeaderBytes+length]), "\x00")
		event := rawEvent{
			watch:  int32(binary.NativeEndian.Uint32(buffer)),
			mask:   binary.NativeEndian.Uint32(buffer[4:]),
			cookie: binary.NativeEndian.Uint32(buffer[8:]),
			name:   name,
		}
		if err := handle(event); err != nil {
			return err
		}
		buffer = buffer[rawHeaderBytes+length:]
	}
	return nil
}

type emitter func(name, kind string)

func (w *Watcher) handle(raw rawEvent, emit emitter) error {
	if raw.mask&unix.IN_Q_OVERFLOW != 0 {
		return ErrOverflow
	}
	directory, known := w.directories[raw.watch]
	if !known {
		return nil
	}
	if raw.mask&unix.IN_IGNORED != 0 {
		w.forget(raw.watch)
		return nil
	}
	if raw.name == "" {
		// What a directory says of itself its parent has said by name; only the root has no watched parent.
		if directory == "" {
			emitAll(".", raw.mask, emit)
		}
		return nil
	}
	name := filepath.Join(directory, raw.name)
	if raw.mask&unix.IN_ISDIR == 0 || !w.recursive {
		w.forgetMoved()
		w.report(name, raw.mask, emit)
		return nil
	}
	return w.handleDirectory(name, raw, emit)
}

// handleDirectory keeps the watches of a tree in step with its directories.
func (w *Watcher) handleDirectory(name string, raw rawEvent, emit emitter) error {
	moved := w.moved
	if raw.mask&unix.IN_MOVED_TO != 0 && moved != nil && moved.cookie == raw.cookie {
		w.moved = nil
		w.relabel(moved.name, name)
		w.report(name, raw.mask, emit)
		return nil
	}
	w.forgetMoved()
	isNew := w.report(name, raw.mask, emit)
	switch {
	case raw.mask&unix.IN_MOVED_FROM != 0:
		w.moved = &movedFrom{raw.cookie, name}
	case raw.mask&unix.IN_CREATE != 0 && isNew:
		return w.add(name, emit)
	case raw.mask&unix.IN_MOVED_TO != 0:
		// What is in it was there before: watched, but not created.
		return w.add(name, nil)
	}
	return nil
}

// report emits the event unless it repeats what reading a directory found, and says whether it did.
func (w *Watcher) report(name string, mask uint32, emit emitter) bool {
	if _, twice := w.found[name]; twice {
		switch {
		case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
			delete(w.found, name)
			return false
		case mask&(unix.IN_DELETE|unix.IN_MOVED_FROM) != 0:
			delete(w.found, name)
		}
	}
	emitAll(name, mask, emit)
	return true
}

// emitAll emits one event per operation, in envd's order.
func emitAll(name string, mask uint32, emit emitter) {
	for _, operation := range []struct {
		bits uint32
		kind string
	}{
		{unix.IN_CREATE | unix.IN_MOVED_TO, Create},
		{unix.IN_MOVED_FROM | unix.IN_MOVE_SELF, Rename},
		{unix.IN_ATTRIB, Chmod},
		{unix.IN_MODIFY, Write},
		{unix.IN_DELETE | unix.IN_DELETE_SELF, Remove},
	} {
		if mask&operation.bits != 0 {
			emit(name, operation.kind)
		}
	}
}

// add watches a directory and, in a tree, all below it. With emit, what is found inside is reported as created.
func (w *Watcher) add(name string, emit emitter) error {
	if len(w.directories) >= directoriesMax {
		return ErrTooMany
	}
	flags := uint32(mask)
	if name != "" {
		flags |= unix.IN_DONT_FOLLOW
	}
	path := filepath.Join(w.root, name)
	watch, err := w.addWatch(path, flags)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil // it went, or is something else by now
	}
	if err != nil {
		return &os.PathError{Op: "inotify_add_watch", Path: path, Err: err}
	}
	// The same inode under an earlier name, when a rename was not seen as one.
	w.forget(watch)
	w.directories[watch] = name
	w.watches[name] = watch
	if !w.recursive {
		return nil
	}
	items, err := os.ReadDir(path)
	if err != nil && len(items) == 0 {
		return nil
	}
	for _, item := range items {
		inner := filepath.Join(name, item.Name())
		if emit != nil {
			w.reportFound(inner, item, emit)
		}
		if item.IsDir() {
			if err := w.add(inner, emit); err != nil {
				return err
			}
		}
	}
	w.looked = w.looked || emit != nil
	return nil
}

// reportFound emits what happened to a file before its directory was watched: it was created and, when it holds
// something, written.
func (w *Watcher) reportFound(name string, item os.DirEntry, emit emitter) {
	if _, twice := w.found[name]; twice {
		return
	}
	w.found[name] = struct{}{}
	emit(name, Create)
	if info, err := item.Info(); err == nil && info.Mode().IsRegular() && info.Size() > 0 {
		emit(name, Write)
	}
}

// ageFound voids the found names once that part of the queue was read which may repeat them: what was in it when the
// last directory had been read.
func (w *Watcher) ageFound(bytes int) {
	if w.looked {
		w.looked = false
		w.foundBytes = w.pending()
	} else {
		w.foundBytes -= bytes
	}
	if w.foundBytes <= 0 {
		clear(w.found)
	}
}

// forgetMoved drops the watches of a directory that went somewhere else.
func (w *Watcher) forgetMoved() {
	if w.moved == nil {
		return
	}
	gone := w.moved.name
	w.moved = nil
	for name, watch := range w.watches {
		if name == gone || strings.HasPrefix(name, gone+"/") {
			w.removeWatch(watch)
			w.forget(watch)
		}
	}
}

// relabel gives a renamed directory and all below it their new names.
func (w *Watcher) relabel(from, to string) {
	for name, watch := range w.watches {
		if name != from && !strings.HasPrefix(name, from+"/") {
			continue
		}
		delete(w.watches, name)
		renamed := to + strings.TrimPrefix(name, from)
		w.directories[watch] = renamed
	}
	for watch, name := range w.directories {
		w.watches[name] = watch
	}
}

func (w *Watcher) forget(watch int32) {
	if name, known := w.directories[watch]; known {
		delete(w.directories, watch)
		if w.watches[name] == watch {
			delete(w.watches, name)
		}
	}
}

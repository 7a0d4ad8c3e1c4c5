package watch

import (
	"encoding/binary"
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func raw(watch int32, mask, cookie uint32, name string) []byte {
	out := binary.NativeEndian.AppendUint32(nil, uint32(watch))
	out = binary.NativeEndian.AppendUint32(out, mask)
	out = binary.NativeEndian.AppendUint32(out, cookie)
	out = binary.NativeEndian.AppendUint32(out, uint32(len(name)))
	return append(out, name...)
}

func FuzzParse(f *testing.F) {
	f.Add(append(raw(1, unix.IN_CREATE, 0, "a\x00\x00\x00"), raw(1, unix.IN_IGNORED, 7, "")...))
	f.Add(raw(1, unix.IN_MODIFY, 0, "x")[:15])
	f.Add(raw(1, unix.IN_MOVED_FROM|unix.IN_ISDIR, 7, "d"))
	f.Fuzz(func(t *testing.T, buffer []byte) {
		total := 0
		err := parse(buffer, func(e rawEvent) error {
			total += rawHeaderBytes + len(e.name)
			return nil
		})
		if total > len(buffer) {
			t.Fatalf("%d of %d bytes", total, len(buffer))
		}
		_ = err
	})
}

func TestOverflowIsAnError(t *testing.T) {
	w, err := New(t.TempDir(), false, func([]Event) {})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := w.process(raw(-1, unix.IN_Q_OVERFLOW, 0, "")); !errors.Is(err, ErrOverflow) {
		t.Fatal(err)
	}
}

func TestCloseEndsRun(t *testing.T) {
	w, err := New(t.TempDir(), true, func([]Event) {})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- w.Run() }()
	w.Close()
	w.Close()
	if err := <-done; !errors.Is(err, os.ErrClosed) {
		t.Fatal(err)
	}
	if err := w.Drain(); err == nil {
		t.Fatal("a closed watcher drained")
	}
}

func TestMissingAndNetwork(t *testing.T) {
	if _, err := New(t.TempDir()+"/none", false, nil); !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	if network, err := IsNetworkMount(t.TempDir()); err != nil || network {
		t.Fatal(network, err)
	}
	if _, err := IsNetworkMount("/no/such/path"); err == nil {
		t.Fatal("no error")
	}
}

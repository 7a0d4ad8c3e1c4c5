package hostline

import (
	"bufio"
	"encoding/json"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// dial connects within this machine, where its kernel can.
func dial(t *testing.T, port uint32) *os.File {
	t.Helper()
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Skipf("needs AF_VSOCK of the kernel: %v", err)
	}
	if err := unix.Connect(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_LOCAL, Port: port}); err != nil {
		_ = unix.Close(fd)
		t.Skipf("needs a kernel with vsock_loopback: %v", err)
	}
	return os.NewFile(uintptr(fd), "peer")
}

func TestHostsAreServedOneAfterTheOther(t *testing.T) {
	const port = 0x61746f6c
	line, err := listenVsock(port, unix.VMADDR_CID_LOCAL)
	if err != nil {
		t.Skipf("needs AF_VSOCK of the kernel: %v", err)
	}
	m := &machine{}
	go func() { _ = line.Listen(m) }()
	for range 2 {
		peer := dial(t, port)
		if _, err := peer.WriteString(`{"id":5,"do":"rest"}` + "\n"); err != nil {
			t.Fatal(err)
		}
		text, err := bufio.NewReader(peer).ReadBytes('\n')
		if err != nil {
			t.Fatal(err)
		}
		var r reply
		if err := json.Unmarshal(text, &r); err != nil || !r.OK || r.ID != 5 {
			t.Fatalf("%+v %v", r, err)
		}
		_ = peer.Close()
	}
}

func TestWhoIsNotTheHostIsNotServed(t *testing.T) {
	const port = 0x61746f6d
	line, err := listenVsock(port, unix.VMADDR_CID_HOST)
	if err != nil {
		t.Skipf("needs AF_VSOCK of the kernel: %v", err)
	}
	m := &machine{}
	go func() { _ = line.Listen(m) }()
	peer := dial(t, port)
	_, _ = peer.WriteString(`{"id":5,"do":"rest"}` + "\n")
	if n, err := peer.Read(make([]byte, 16)); err == nil {
		t.Fatalf("it was answered %d bytes", n)
	}
	if len(m.did) != 0 {
		t.Fatal(m.did)
	}
}

package hostline

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// VsockPort is where the host of a machine that has a vsock, and no serial bus, comes.
const VsockPort = 1024

// Vsock is the open port. It outlasts a restore of the machine; connections do not.
type Vsock struct {
	fd int
	// from is whose connections are served: the host's. What runs inside may reach the port, too.
	from uint32
}

// OpenVsock listens on the port; os.ErrNotExist when the machine has no vsock.
func OpenVsock() (*Vsock, error) {
	if _, err := os.Stat("/dev/vsock"); err != nil {
		return nil, os.ErrNotExist
	}
	return listenVsock(VsockPort, unix.VMADDR_CID_HOST)
}

func listenVsock(port, from uint32) (*Vsock, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return nil, os.ErrNotExist
	}
	if err != nil {
		return nil, fmt.Errorf("a vsock: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: port}); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("vsock port %d: %w", port, err)
	}
	if err := unix.Listen(fd, 4); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("vsock port %d: %w", port, err)
	}
	return &Vsock{fd: fd, from: from}, nil
}

// Listen serves one host after the other. A connection that ends, however it does, makes room for the next.
func (v *Vsock) Listen(machine Machine) error {
	for {
		fd, peer, err := unix.Accept4(v.fd, unix.SOCK_CLOEXEC)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ECONNABORTED) {
			continue
		}
		if err != nil {
			return err
		}
		host, ok := peer.(*unix.SockaddrVM)
		if !ok || host.CID != v.from {
			_ = unix.Close(fd)
			continue
		}
		conn := os.NewFile(uintptr(fd), "vsock")
		_ = Serve(conn, machine)
		_ = conn.Close()
	}
}

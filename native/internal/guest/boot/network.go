package boot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// link is the machine's only interface besides the loopback.
const link = "eth0"

// network is the machine's address, the way out, and who answers for names.
type network struct {
	Address  string `json:"address"`
	Gateway  string `json:"gateway"`
	Resolver string `json:"resolver"`
}

func (n *network) check() error {
	if n.Address == "" {
		return nil
	}
	if prefix, err := netip.ParsePrefix(n.Address); err != nil || !prefix.Addr().Is4() {
		return errors.New("the machine's address is none")
	}
	if gateway, err := netip.ParseAddr(n.Gateway); err != nil || !gateway.Is4() {
		return errors.New("the machine's gateway is none")
	}
	return nil
}

// configure brings the loopback up, and the interface with its address and the default route, where there is one.
func (n *network) configure() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := setUp(fd, "lo"); err != nil {
		return err
	}
	if n.Address == "" {
		return nil
	}
	// No address of the other family: nobody routes it, and whoever asks for both would wait for it.
	_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+link+"/disable_ipv6", []byte("1"), 0)
	prefix := netip.MustParsePrefix(n.Address)
	mask := net.CIDRMask(prefix.Bits(), 32)
	if err := withAddress(fd, unix.SIOCSIFADDR, link, prefix.Addr().AsSlice()); err != nil {
		return err
	}
	if err := withAddress(fd, unix.SIOCSIFNETMASK, link, mask); err != nil {
		return err
	}
	if err := setUp(fd, link); err != nil {
		return err
	}
	gateway := netip.MustParseAddr(n.Gateway)
	return addDefaultRoute(fd, gateway.AsSlice())
}

func setUp(fd int, name string) error {
	request, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request); err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	return nil
}

func withAddress(fd int, what uint, name string, address []byte) error {
	request, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	if err := request.SetInet4Addr(address); err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, what, request); err != nil {
		return fmt.Errorf("address of %s: %w", name, err)
	}
	return nil
}

// rtentry is the kernel's struct rtentry on 64-bit machines.
type rtentry struct {
	_       uint64
	dst     sockaddr
	gateway sockaddr
	genmask sockaddr
	flags   uint16
	_       int16
	_       [4]byte
	_       uint64
	tos     uint8
	class   uint8
	_       [3]int16
	metric  int16
	_       [6]byte
	dev     uintptr
	mtu     uint64
	window  uint64
	irtt    uint16
	_       [6]byte
}

type sockaddr struct {
	family uint16
	port   uint16
	addr   [4]byte
	_      [8]byte
}

func inet(address []byte) (s sockaddr) {
	s.family = unix.AF_INET
	copy(s.addr[:], address)
	return s
}

func addDefaultRoute(fd int, gateway []byte) error {
	route := rtentry{dst: inet(nil), gateway: inet(gateway), genmask: inet(nil), flags: unix.RTF_UP | unix.RTF_GATEWAY}
	if _, _, number := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCADDRT, uintptr(unsafe.Pointer(&route))); number != 0 {
		return fmt.Errorf("default route by %d: %w", binary.BigEndian.Uint32(gateway), number)
	}
	return nil
}

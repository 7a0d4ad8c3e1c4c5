package connections

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// apart runs the rest of a test in a network namespace of its own, whose thread ends with it: `far` is somebody else's address there,
// behind a pair of interfaces.
func apart(t *testing.T) (inside, outside int) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, for namespaces: run it as root")
	}
	runtime.LockOSThread()
	outside = namespace(t)
	inside = namespace(t)
	ip := func(arguments ...string) {
		t.Helper()
		if said, err := exec.Command("ip", arguments...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", arguments, err, said)
		}
	}
	// The thread is in the second, and so is what it starts.
	ip("link", "set", "lo", "up")
	ip("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), outside))
	for _, address := range []string{"192.0.2.1/24", "2001:db8::1/64"} {
		ip("addr", "add", address, "dev", "near", "nodad")
	}
	ip("link", "set", "near", "up")
	enter(t, outside)
	for _, address := range []string{"192.0.2.2/24", "2001:db8::2/64"} {
		ip("addr", "add", address, "dev", "far", "nodad")
	}
	ip("link", "set", "far", "up")
	enter(t, inside)
	return inside, outside
}

// namespace has the thread go into a new one.
func namespace(t *testing.T) int {
	t.Helper()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

func enter(t *testing.T, fd int) {
	t.Helper()
	if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
}

// pair is a connection: who began it, and who accepted it.
func pair(t *testing.T, listener net.Listener, dial func() (net.Conn, error)) (client, server net.Conn) {
	t.Helper()
	client, err := dial()
	if err != nil {
		t.Fatal(err)
	}
	server, err = listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = client.Close(), server.Close() })
	return client, server
}

func listen(t *testing.T, network, address string) net.Listener {
	t.Helper()
	listener, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	return listener
}

// heard is how a read of this connection ends within a moment.
func heard(conn net.Conn) error {
	_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	_, err := conn.Read(make([]byte, 8))
	return err
}

func lives(t *testing.T, what string, client, server net.Conn) {
	t.Helper()
	if _, err := client.Write([]byte("x")); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	if err := heard(server); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func TestConnectionsWithOthersEndAndThoseWithItselfStay(t *testing.T) {
	inside, outside := apart(t)
	type ends struct{ client, server net.Conn }
	begun, accepted, kept := map[string]ends{}, map[string]ends{}, map[string]ends{}
	listeners := map[string]net.Listener{}
	for _, family := range []struct{ network, near, far, loop string }{
		{"tcp4", "192.0.2.1", "192.0.2.2", "127.0.0.1"}, {"tcp6", "[2001:db8::1]", "[2001:db8::2]", "[::1]"},
	} {
		enter(t, outside)
		far := listen(t, family.network, family.far+":0")
		enter(t, inside)
		near, loop := listen(t, family.network, family.near+":0"), listen(t, family.network, family.loop+":0")
		listeners[family.network] = near
		dial := func(listener net.Listener) func() (net.Conn, error) {
			return func() (net.Conn, error) { return net.Dial(family.network, listener.Addr().String()) }
		}
		c, s := pair(t, far, dial(far))
		begun[family.network] = ends{c, s}
		c, s = pair(t, loop, dial(loop))
		kept[family.network+" by the loopback"] = ends{c, s}
		c, s = pair(t, near, dial(near))
		kept[family.network+" by its own address"] = ends{c, s}
		enter(t, outside)
		c, s = pair(t, near, dial(near))
		accepted[family.network] = ends{c, s}
		enter(t, inside)
	}
	// A socket of the newer family that is connected by the older one.
	enter(t, outside)
	far := listen(t, "tcp4", "192.0.2.2:0")
	enter(t, inside)
	c, s := pair(t, far, func() (net.Conn, error) { return mapped(far.Addr().(*net.TCPAddr)) })
	begun["mapped"] = ends{c, s}

	count, err := Cut()
	if err != nil || count != 5 {
		t.Fatalf("%d, %v", count, err)
	}
	for name, e := range begun {
		if err := heard(e.client); !errors.Is(err, syscall.ECONNABORTED) {
			t.Fatalf("%s that the machine began: %v", name, err)
		}
	}
	for name, e := range accepted {
		if err := heard(e.server); !errors.Is(err, syscall.ECONNABORTED) {
			t.Fatalf("%s that the machine accepted: %v", name, err)
		}
	}
	for name, e := range kept {
		lives(t, name, e.client, e.server)
	}
	for network, listener := range listeners {
		enter(t, outside)
		c, s := pair(t, listener, func() (net.Conn, error) { return net.Dial(network, listener.Addr().String()) })
		lives(t, network+" anew", c, s)
		enter(t, inside)
	}
}

// mapped connects a socket of the newer family to an address of the older one.
func mapped(to *net.TCPAddr) (net.Conn, error) {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	address := &unix.SockaddrInet6{Port: to.Port, Addr: [16]byte(to.IP.To16())}
	if err := unix.Connect(fd, address); err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "mapped")
	defer file.Close()
	return net.FileConn(file)
}

func TestManyEndAtOnce(t *testing.T) {
	inside, outside := apart(t)
	enter(t, outside)
	far := listen(t, "tcp4", "192.0.2.2:0")
	enter(t, inside)
	var all []net.Conn
	for range 400 {
		c, _ := pair(t, far, func() (net.Conn, error) { return net.Dial("tcp4", far.Addr().String()) })
		all = append(all, c)
	}
	if count, err := Cut(); err != nil || count != len(all) {
		t.Fatalf("%d, %v", count, err)
	}
	for _, conn := range all {
		if err := heard(conn); !errors.Is(err, syscall.ECONNABORTED) {
			t.Fatal(err)
		}
	}
	if count, err := Cut(); err != nil || count != 0 {
		t.Fatalf("again: %d, %v", count, err)
	}
}

func TestWhatTheKernelSaysIsReadWithinItsBounds(t *testing.T) {
	d := &diagnosis{number: 7}
	for _, packet := range [][]byte{{}, make([]byte, 15), append([]byte{255, 0, 0, 0}, make([]byte, 20)...), append([]byte{3, 0, 0, 0}, make([]byte, 20)...)} {
		if done, _ := d.hear(packet, func([]byte) { t.Fatal("half a message was taken for one") }); done {
			t.Fatalf("%v was taken for the last", packet)
		}
	}
	if one, ok := parse(make([]byte, answerBytes-1)); ok {
		t.Fatalf("%v of half a socket", one)
	}
	if err := errorOf([]byte{0xfe, 0xff, 0xff, 0xff}); !errors.Is(err, syscall.ENOENT) {
		t.Fatal(err)
	}
}

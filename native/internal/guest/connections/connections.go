// Package connections ends a machine's TCP connections with others: after a restore in another place nobody at their far ends knows of
// them any more, and whoever only waits for an answer would wait for ever.
//
// The kernel lists its sockets and ends those that it is told to, with ECONNABORTED for whoever has them. What listens stays, and so
// does what a machine has with itself, by the loopback or by an address of its own.
// Source: linux/inet_diag.h, linux/sock_diag.h, sock_diag(7).
package connections

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	sockDiagByFamily = 20
	sockDestroy      = 21
	// TCP_TIME_WAIT and TCP_LISTEN of the kernel's states: nobody waits for the first, and the second is no connection.
	timeWait  = 6
	listening = 10
	connected = 0xfff &^ (1<<timeWait | 1<<listening)
	// A request is struct inet_diag_req_v2: four bytes, the states, and the socket's identity (struct inet_diag_sockid). An answer, struct
	// inet_diag_msg, has the identity at the same distance from four bytes.
	requestBytes  = 56
	identityBytes = 48
	answerBytes   = 4 + identityBytes
	// Within an identity: two ports, then the addresses.
	localAt, remoteAt = 4, 20
	patience          = 5 * time.Second
	// roundsMax bounds how often it is looked again: a connection may be accepted while others are listed.
	roundsMax = 3
)

// Cut ends every connection of this network namespace with somebody else; how many there were. What fails for one does not keep the
// others. The kernel answers EOPNOTSUPP, or ENOENT to the list, where it cannot.
func Cut() (int, error) {
	own, err := ownAddresses()
	if err != nil {
		return 0, err
	}
	line, err := open()
	if err != nil {
		return 0, fmt.Errorf("socket diagnosis: %w", err)
	}
	defer line.Close()
	count, failed := 0, error(nil)
	for range roundsMax {
		found, err := line.abroad(own)
		if err != nil {
			return count, err
		}
		if len(found) == 0 {
			return count, failed
		}
		failed = nil
		for _, one := range found {
			// ENOENT: it has ended meanwhile.
			if err := line.end(one); err == nil {
				count++
			} else if !errors.Is(err, unix.ENOENT) {
				failed = errors.Join(failed, fmt.Errorf("end a connection: %w", err))
			}
		}
		if failed != nil {
			return count, failed
		}
	}
	return count, nil
}

// ownAddresses are those by which a machine reaches itself.
func ownAddresses() (map[netip.Addr]bool, error) {
	found, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	own := make(map[netip.Addr]bool, len(found))
	for _, address := range found {
		if prefix, err := netip.ParsePrefix(address.String()); err == nil {
			own[prefix.Addr().WithZone("")] = true
		}
	}
	return own, nil
}

// socket is one that the kernel has listed.
type socket struct {
	family, state byte
	identity      [identityBytes]byte
}

// remote is whom it is connected to.
func (s *socket) remote() netip.Addr {
	at := s.identity[remoteAt:]
	if s.family == unix.AF_INET {
		return netip.AddrFrom4([4]byte(at[:4]))
	}
	// A socket of the newer family may be connected by the older one.
	return netip.AddrFrom16([16]byte(at[:16])).Unmap()
}

// diagnosis is an open line to the kernel.
type diagnosis struct {
	fd     int
	number uint32
}

func open() (*diagnosis, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, err
	}
	limit := unix.NsecToTimeval(patience.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &diagnosis{fd: fd}, nil
}

func (d *diagnosis) Close() { _ = unix.Close(d.fd) }

// abroad lists the connections with others. A kernel without the newer family has none of it.
func (d *diagnosis) abroad(own map[netip.Addr]bool) ([]socket, error) {
	var found []socket
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		err := d.ask(sockDiagByFamily, unix.NLM_F_DUMP, request(family, connected, nil), func(body []byte) {
			one, ok := parse(body)
			if to := one.remote(); ok && !to.IsLoopback() && !to.IsUnspecified() && !own[to.WithZone("")] {
				found = append(found, one)
			}
		})
		if err != nil && (family == unix.AF_INET || !errors.Is(err, unix.ENOENT)) {
			return nil, fmt.Errorf("list connections: %w", err)
		}
	}
	return found, nil
}

func (d *diagnosis) end(one socket) error {
	return d.ask(sockDestroy, unix.NLM_F_ACK, request(one.family, 1<<one.state, one.identity[:]), nil)
}

func request(family byte, states uint32, identity []byte) []byte {
	body := make([]byte, requestBytes)
	body[0], body[1] = family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(body[4:8], states)
	copy(body[8:], identity)
	return body
}

func parse(body []byte) (one socket, ok bool) {
	if len(body) < answerBytes {
		return one, false
	}
	one.family, one.state = body[0], body[1]
	copy(one.identity[:], body[4:])
	// A connection that is not accepted yet is one all the same, in a state of the kernel's own.
	return one, (one.family == unix.AF_INET || one.family == unix.AF_INET6) && one.state < 32
}

// ask sends one request and hears all of its answers.
func (d *diagnosis) ask(kind, flags uint16, body []byte, each func([]byte)) error {
	d.number++
	message := make([]byte, unix.NLMSG_HDRLEN, unix.NLMSG_HDRLEN+len(body))
	binary.NativeEndian.PutUint32(message[0:4], uint32(cap(message)))
	binary.NativeEndian.PutUint16(message[4:6], kind)
	binary.NativeEndian.PutUint16(message[6:8], unix.NLM_F_REQUEST|flags)
	binary.NativeEndian.PutUint32(message[8:12], d.number)
	if err := unix.Sendto(d.fd, append(message, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buffer := make([]byte, 32<<10)
	for {
		n, _, err := unix.Recvfrom(d.fd, buffer, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return os.NewSyscallError("recvfrom", err)
		}
		if done, err := d.hear(buffer[:n], each); done || err != nil {
			return err
		}
	}
}

// hear reads the messages of one packet; whether the last has come.
func (d *diagnosis) hear(packet []byte, each func([]byte)) (bool, error) {
	for len(packet) >= unix.NLMSG_HDRLEN {
		length := int(binary.NativeEndian.Uint32(packet[0:4]))
		if length < unix.NLMSG_HDRLEN || length > len(packet) {
			return false, errors.New("an answer of the kernel's is not whole")
		}
		kind, number := binary.NativeEndian.Uint16(packet[4:6]), binary.NativeEndian.Uint32(packet[8:12])
		body := packet[unix.NLMSG_HDRLEN:length]
		packet = packet[min(len(packet), (length+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1)):]
		if number != d.number {
			continue
		}
		switch {
		case kind == unix.NLMSG_DONE || kind == unix.NLMSG_ERROR:
			return true, errorOf(body)
		case each != nil:
			each(body)
		}
	}
	return false, nil
}

// errorOf is what the last message says: a number below nought is an error, none means that all went well.
func errorOf(body []byte) error {
	if len(body) < 4 {
		return nil
	}
	if number := int32(binary.NativeEndian.Uint32(body[:4])); number < 0 {
		return unix.Errno(-number)
	}
	return nil
}

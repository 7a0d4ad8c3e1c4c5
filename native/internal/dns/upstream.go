package dns

import (
	"context"
	crypto "crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

var errNoUpstream = errors.New("no resolver is configured")

const (
	rereadEvery    = 5 * time.Second
	answerBytesMax = 65535
	// Over UDP nobody asks for more than 4 KiB in earnest; a larger answer counts as none.
	packetBytesMax = 16 << 10
)

// upstreams are the resolvers that are asked: given ones, or those of a resolv.conf, which is read again as it changes.
type upstreams struct {
	file string              // "" when given
	skip map[netip.Addr]bool // our own addresses: asking them would go round in circles
	best atomic.Uint32       // the one that answered last is asked first

	mu     sync.Mutex
	list   []netip.AddrPort
	readAt time.Time
}

func (u *upstreams) current() []netip.AddrPort {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.file != "" && time.Since(u.readAt) >= rereadEvery {
		u.readAt = time.Now()
		if text, err := os.ReadFile(u.file); err == nil {
			u.list = parseResolvConf(string(text), u.skip)
		}
	}
	return u.list
}

// parseResolvConf takes the nameserver lines; others, and addresses to skip, are left out.
func parseResolvConf(text string, skip map[netip.Addr]bool) []netip.AddrPort {
	var list []netip.AddrPort
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if address, err := netip.ParseAddr(fields[1]); err == nil && !skip[address] && len(list) < 8 {
			list = append(list, netip.AddrPortFrom(address, 53))
		}
	}
	return list
}

// ask puts a question to one resolver after the other, each for a share of the time.
func (u *upstreams) ask(ctx context.Context, network string, q query, each time.Duration) ([]byte, error) {
	list := u.current()
	if len(list) == 0 {
		return nil, errNoUpstream
	}
	first := int(u.best.Load()) % len(list)
	var err error
	// A single resolver gets a second chance: packets are lost.
	for attempt := range max(2, len(list)) {
		index := (first + attempt) % len(list)
		var answer []byte
		if answer, err = askOne(ctx, network, list[index], q, each); err == nil {
			u.best.Store(uint32(index))
			return answer, nil
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, err
}

func askOne(ctx context.Context, network string, server netip.AddrPort, q query, each time.Duration) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, each)
	defer cancel()
	// A connected socket of its own: the kernel picks a random port and drops what comes from other addresses.
	conn, err := new(net.Dialer).DialContext(ctx, network, server.String())
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	var random [2]byte
	_, _ = crypto.Read(random[:])
	id := binary.BigEndian.Uint16(random[:])
	exchange := exchangeUDP
	if network == "tcp" {
		exchange = exchangeTCP
	}
	answer, err := exchange(conn, q, id)
	if err != nil {
		return nil, err
	}
	return withID(answer, q.header.ID), nil
}

func exchangeUDP(conn net.Conn, q query, id uint16) ([]byte, error) {
	if _, err := conn.Write(withID(q.text, id)); err != nil {
		return nil, err
	}
	buffer := packets.Get().(*[packetBytesMax]byte)
	defer packets.Put(buffer)
	for {
		n, err := conn.Read(buffer[:])
		if err != nil {
			return nil, err
		}
		// Anything else is a late answer or a forged one: the right one may still come.
		if n < len(buffer) && q.answers(buffer[:n], id) {
			return append([]byte(nil), buffer[:n]...), nil
		}
	}
}

func exchangeTCP(conn net.Conn, q query, id uint16) ([]byte, error) {
	if err := writeFrame(conn, withID(q.text, id)); err != nil {
		return nil, err
	}
	answer, err := readFrame(conn, answerBytesMax)
	if err != nil {
		return nil, err
	}
	if !q.answers(answer, id) {
		return nil, errors.New("the resolver answered another question")
	}
	return answer, nil
}

var packets = sync.Pool{New: func() any { return new([packetBytesMax]byte) }}

// readFrame reads a message as TCP carries it, after two bytes of length.
func readFrame(from io.Reader, limit int) ([]byte, error) {
	var size [2]byte
	if _, err := io.ReadFull(from, size[:]); err != nil {
		return nil, err
	}
	length := int(binary.BigEndian.Uint16(size[:]))
	if length < headerBytes || length > limit {
		return nil, fmt.Errorf("a message of %d bytes", length)
	}
	text := make([]byte, length)
	_, err := io.ReadFull(from, text)
	return text, err
}

func writeFrame(to io.Writer, text []byte) error {
	framed := binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(text)), uint16(len(text)))
	_, err := to.Write(append(framed, text...))
	return err
}

package dns

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// resolver is a real server on loopback, UDP and TCP, that answers every question with the same address.
type resolver struct {
	address string
	asked   atomic.Int64
	// spoil, if set, changes what is sent over UDP before the right answer goes out; nil results are not sent.
	spoil func(answer []byte) [][]byte
	hold  chan struct{} // if set, no answer before it is closed
}

func startResolver(t *testing.T, change ...func(*resolver)) *resolver {
	t.Helper()
	r := new(resolver)
	for _, apply := range change {
		apply(r)
	}
	conn, listener := listenBoth(t)
	r.address = conn.LocalAddr().String()
	go func() {
		buffer := make([]byte, 65535)
		for {
			n, from, err := conn.ReadFrom(buffer)
			if err != nil {
				return
			}
			question := append([]byte(nil), buffer[:n]...)
			go func() {
				answer := r.answer(question)
				if r.spoil != nil {
					for _, extra := range r.spoil(answer) {
						_, _ = conn.WriteTo(extra, from)
					}
				}
				_, _ = conn.WriteTo(answer, from)
			}()
		}
	}()
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = client.Close() }()
				for {
					question, err := readFrame(client, 65535)
					if err != nil || writeFrame(client, r.answer(question)) != nil {
						return
					}
				}
			}()
		}
	}()
	return r
}

// listenBoth takes a port that is free for UDP and for TCP.
func listenBoth(t *testing.T) (net.PacketConn, net.Listener) {
	t.Helper()
	for range 100 {
		conn, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		listener, err := net.Listen("tcp", conn.LocalAddr().String())
		if err != nil {
			_ = conn.Close()
			continue
		}
		t.Cleanup(func() { _ = conn.Close(); _ = listener.Close() })
		return conn, listener
	}
	t.Fatal("no port is free")
	return nil, nil
}

func (r *resolver) answer(text []byte) []byte {
	r.asked.Add(1)
	if r.hold != nil {
		<-r.hold
	}
	var message dnsmessage.Message
	if err := message.Unpack(text); err != nil {
		return nil
	}
	message.Response, message.RecursionAvailable = true, true
	message.Answers = []dnsmessage.Resource{{
		Header: dnsmessage.ResourceHeader{Name: message.Questions[0].Name, Class: dnsmessage.ClassINET, TTL: 60},
		Body:   &dnsmessage.AResource{A: [4]byte{203, 0, 113, 7}},
	}}
	packed, _ := message.Pack()
	return packed
}

func question(id uint16, name string) []byte {
	message := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: id, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}},
	}
	text, err := message.Pack()
	if err != nil {
		panic(err)
	}
	return text
}

func startForwarder(t *testing.T, config Config) *Forwarder {
	t.Helper()
	if config.Listen == nil {
		config.Listen = []string{"127.0.0.1:0"}
	}
	f, err := New(config, slog.New(slog.NewJSONHandler(io.Discard, nil)))
	for range 100 {
		if err == nil || !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
		// Port 0 was given one for UDP that is taken for TCP.
		f, err = New(config, slog.New(slog.NewJSONHandler(io.Discard, nil)))
	}
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			t.Error("the forwarder did not stop")
		}
	})
	return f
}

func dial(t *testing.T, network, address string) net.Conn {
	t.Helper()
	conn, err := net.Dial(network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	return conn
}

func askUDP(t *testing.T, conn net.Conn, text []byte) dnsmessage.Message {
	t.Helper()
	if _, err := conn.Write(text); err != nil {
		t.Fatal(err)
	}
	buffer := make([]byte, 65535)
	n, err := conn.Read(buffer)
	if err != nil {
		t.Fatal(err)
	}
	return unpack(t, buffer[:n])
}

func unpack(t *testing.T, text []byte) dnsmessage.Message {
	t.Helper()
	var message dnsmessage.Message
	if err := message.Unpack(text); err != nil {
		t.Fatal(err)
	}
	return message
}

func expectAddress(t *testing.T, message dnsmessage.Message, id uint16) {
	t.Helper()
	if message.ID != id || !message.Response || message.RCode != dnsmessage.RCodeSuccess || len(message.Answers) != 1 {
		t.Fatalf("not the answer: %+v", message)
	}
	if a, ok := message.Answers[0].Body.(*dnsmessage.AResource); !ok || a.A != [4]byte{203, 0, 113, 7} {
		t.Fatalf("not the address: %+v", message.Answers)
	}
}

func TestForwardsOverUDPAndTCP(t *testing.T) {
	r := startResolver(t)
	f := startForwarder(t, Config{Upstreams: []string{r.address}})
	expectAddress(t, askUDP(t, dial(t, "udp", f.Addresses()[0]), question(7, "example.com.")), 7)
	conn := dial(t, "tcp", f.Addresses()[0])
	for id := uint16(1); id < 4; id++ {
		if err := writeFrame(conn, question(id, "example.org.")); err != nil {
			t.Fatal(err)
		}
		text, err := readFrame(conn, 65535)
		if err != nil {
			t.Fatal(err)
		}
		expectAddress(t, unpack(t, text), id)
	}
	if got := f.Stats().Answered.Load(); got != 4 {
		t.Fatalf("%d answered", got)
	}
}

func TestForgedAnswersAreNotTaken(t *testing.T) {
	r := startResolver(t, func(r *resolver) {
		r.spoil = func(answer []byte) [][]byte {
			wrongID := withID(answer, binary.BigEndian.Uint16(answer)+1)
			otherName := withID(question(0, "evil.example."), binary.BigEndian.Uint16(answer))
			otherName[2] |= 0x80
			notAnAnswer := append([]byte(nil), answer...)
			notAnAnswer[2] &^= 0x80
			return [][]byte{wrongID, otherName, notAnAnswer, answer[:5], {}}
		}
	})
	f := startForwarder(t, Config{Upstreams: []string{r.address}})
	expectAddress(t, askUDP(t, dial(t, "udp", f.Addresses()[0]), question(9, "example.com.")), 9)
}

func TestAnswersServfailWithoutResolver(t *testing.T) {
	closed := dialable(t)
	for name, config := range map[string]Config{
		"refused": {Upstreams: []string{closed}},
		"silent":  {Upstreams: []string{silent(t)}, Limits: Limits{Each: 50 * time.Millisecond}},
		"none":    {ResolvConf: filepath.Join(t.TempDir(), "absent")},
	} {
		t.Run(name, func(t *testing.T) {
			f := startForwarder(t, config)
			message := askUDP(t, dial(t, "udp", f.Addresses()[0]), question(5, "example.com."))
			if message.ID != 5 || message.RCode != dnsmessage.RCodeServerFailure || len(message.Questions) != 1 || !message.RecursionDesired {
				t.Fatalf("%+v", message)
			}
		})
	}
}

// dialable returns an address that nothing listens on.
func dialable(t *testing.T) string {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	return conn.LocalAddr().String()
}

func silent(t *testing.T) string {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn.LocalAddr().String()
}

func TestTurnsToTheResolverThatAnswers(t *testing.T) {
	r := startResolver(t)
	f := startForwarder(t, Config{Upstreams: []string{silent(t), r.address}, Limits: Limits{Each: 200 * time.Millisecond}})
	conn := dial(t, "udp", f.Addresses()[0])
	expectAddress(t, askUDP(t, conn, question(1, "example.com.")), 1)
	began := time.Now()
	for id := uint16(2); id < 12; id++ {
		expectAddress(t, askUDP(t, conn, question(id, "example.com.")), id)
	}
	if took := time.Since(began); took > 2*time.Second {
		t.Fatalf("the silent one is still asked first: %v", took)
	}
}

func TestReadsResolvConfAgain(t *testing.T) {
	file := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(file, []byte("# c\nsearch x\nnameserver 192.0.2.1\nnameserver bad\nnameserver 2001:db8::1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	u := &upstreams{file: file, skip: map[netip.Addr]bool{}}
	if got := u.current(); len(got) != 2 || got[0].String() != "192.0.2.1:53" || got[1].String() != "[2001:db8::1]:53" {
		t.Fatalf("%v", got)
	}
	if err := os.WriteFile(file, []byte("nameserver 192.0.2.9\nnameserver 192.0.2.1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	u.readAt = time.Now().Add(-rereadEvery)
	u.skip[netip.MustParseAddr("192.0.2.1")] = true
	if got := u.current(); len(got) != 1 || got[0].String() != "192.0.2.9:53" {
		t.Fatalf("%v", got)
	}
}

func TestOneClientCannotTakeAll(t *testing.T) {
	hold := make(chan struct{})
	r := startResolver(t, func(r *resolver) { r.hold = hold })
	f := startForwarder(t, Config{Upstreams: []string{r.address}, Limits: Limits{PerClient: 5}})
	conn := dial(t, "udp", f.Addresses()[0])
	for id := range uint16(8) {
		if _, err := conn.Write(question(id, "example.com.")); err != nil {
			t.Fatal(err)
		}
	}
	codes := map[dnsmessage.RCode]int{}
	buffer := make([]byte, 4096)
	for range 3 {
		n, err := conn.Read(buffer)
		if err != nil {
			t.Fatal(err)
		}
		codes[unpack(t, buffer[:n]).RCode]++
	}
	if codes[dnsmessage.RCodeRefused] != 3 {
		t.Fatalf("%v", codes)
	}
	// Another client is not affected.
	other := &net.Dialer{LocalAddr: &net.UDPAddr{IP: net.IPv4(127, 0, 0, 9)}}
	second, err := other.Dial("udp", f.Addresses()[0])
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = second.Close() }()
	if _, err := second.Write(question(77, "example.com.")); err != nil {
		t.Fatal(err)
	}
	close(hold)
	_ = second.SetDeadline(time.Now().Add(5 * time.Second))
	n, err := second.Read(buffer)
	if err != nil {
		t.Fatal(err)
	}
	expectAddress(t, unpack(t, buffer[:n]), 77)
	for range 5 {
		if n, err = conn.Read(buffer); err != nil || unpack(t, buffer[:n]).RCode != dnsmessage.RCodeSuccess {
			t.Fatalf("%v", err)
		}
	}
	// And the places are free again.
	expectAddress(t, askUDP(t, conn, question(99, "example.com.")), 99)
}

func TestMalformedQuestions(t *testing.T) {
	r := startResolver(t)
	f := startForwarder(t, Config{Upstreams: []string{r.address}})
	conn := dial(t, "udp", f.Addresses()[0])
	two := question(1, "a.example.")
	binary.BigEndian.PutUint16(two[4:], 2)
	notify := question(2, "a.example.")
	notify[2] |= 4 << 3
	transfer := question(3, "a.example.")
	transfer[len(transfer)-3] = 252
	for _, c := range []struct {
		text []byte
		code dnsmessage.RCode
	}{
		{two, dnsmessage.RCodeFormatError},
		{notify, dnsmessage.RCodeNotImplemented},
		{transfer, dnsmessage.RCodeRefused},
		{question(4, "a.example.")[:20], dnsmessage.RCodeFormatError},
	} {
		if got := askUDP(t, conn, c.text); got.RCode != c.code || got.ID != binary.BigEndian.Uint16(c.text) {
			t.Errorf("%x: %v", c.text, got.RCode)
		}
	}
	// An answer, a scrap and a giant get none.
	answer := question(5, "a.example.")
	answer[2] |= 0x80
	for _, text := range [][]byte{answer, {1, 2, 3}, make([]byte, queryBytesMax+1)} {
		if _, err := conn.Write(text); err != nil {
			t.Fatal(err)
		}
	}
	expectAddress(t, askUDP(t, conn, question(6, "a.example.")), 6)
	if r.asked.Load() != 1 {
		t.Fatalf("the resolver saw %d questions", r.asked.Load())
	}
}

func TestTCPConnectionsAreLimited(t *testing.T) {
	r := startResolver(t)
	f := startForwarder(t, Config{Upstreams: []string{r.address}, Limits: Limits{ConnsOfClient: 2, TCPIdle: 300 * time.Millisecond}})
	var conns []net.Conn
	for range 2 {
		conn := dial(t, "tcp", f.Addresses()[0])
		_ = writeFrame(conn, question(1, "a.example."))
		if _, err := readFrame(conn, 65535); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	third := dial(t, "tcp", f.Addresses()[0])
	_ = writeFrame(third, question(1, "a.example."))
	if _, err := readFrame(third, 65535); err == nil {
		t.Fatal("a third connection was served")
	}
	// Idle ones are closed, which makes room.
	for _, conn := range conns {
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			t.Fatal("data on an idle connection")
		}
	}
	deadline := time.Now().Add(5 * time.Second)
	for {
		again := dial(t, "tcp", f.Addresses()[0])
		_ = writeFrame(again, question(2, "a.example."))
		if text, err := readFrame(again, 65535); err == nil {
			expectAddress(t, unpack(t, text), 2)
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("no room again")
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func TestManyClientsAtOnce(t *testing.T) {
	r := startResolver(t)
	f := startForwarder(t, Config{Upstreams: []string{r.address}})
	var wait sync.WaitGroup
	var good atomic.Int64
	for client := range 20 {
		wait.Go(func() {
			conn, err := net.Dial("udp", f.Addresses()[0])
			if err != nil {
				return
			}
			defer func() { _ = conn.Close() }()
			_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
			buffer := make([]byte, 4096)
			for n := range 25 {
				id := uint16(client*100 + n)
				_, _ = conn.Write(question(id, "example.com."))
				size, err := conn.Read(buffer)
				if err == nil && binary.BigEndian.Uint16(buffer[:size]) == id {
					good.Add(1)
				}
			}
		})
	}
	wait.Wait()
	if good.Load() != 500 {
		t.Fatalf("%d of 500 answered", good.Load())
	}
}

func TestListensOnAnAddressThatDoesNotExistYet(t *testing.T) {
	f := startForwarder(t, Config{Listen: []string{"198.51.100.53:0"}, Upstreams: []string{"192.0.2.1"}})
	if len(f.Addresses()) != 1 {
		t.Fatal(f.Addresses())
	}
}

func FuzzParseQuery(f *testing.F) {
	f.Add(question(1, "example.com."))
	f.Add([]byte{})
	f.Add(question(1, "example.com.")[:17])
	f.Fuzz(func(t *testing.T, text []byte) {
		q, code, err := parseQuery(text)
		if err == nil && code != nil {
			t.Fatal("a code without an error")
		}
		if err == nil || code != nil {
			answer := q.failure(dnsmessage.RCodeServerFailure)
			if len(answer) < headerBytes || binary.BigEndian.Uint16(answer) != binary.BigEndian.Uint16(text) {
				t.Fatalf("failure %x of %x", answer, text)
			}
			if q.answers(text, q.header.ID) {
				t.Fatal("a question answers itself")
			}
		}
	})
}

func FuzzParseResolvConf(f *testing.F) {
	f.Add("nameserver 1.2.3.4\n")
	f.Fuzz(func(t *testing.T, text string) {
		if len(parseResolvConf(text, nil)) > 8 {
			t.Fatal("too many")
		}
	})
}

package node

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// machine is a guest on a loopback address of its own. Its inner servers listen where the edge can't dial: the guest's
// tunnel alone reaches them.
type machine struct {
	ip        string
	guestPort int
	token     string
	inner     map[int]string // port -> address of the inner server
	tunnels   atomic.Int64
	banner    string // sent in the same packet as the handshake's answer
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{ip: fmt.Sprintf("127.%d.%d.%d", 170+rand.IntN(60), rand.IntN(250), 2+rand.IntN(250)), token: "right", inner: map[int]string{}}
	listener, err := net.Listen("tcp", m.ip+":0")
	if err != nil {
		t.Fatal(err)
	}
	m.guestPort = listener.Addr().(*net.TCPAddr).Port
	server := &http.Server{Handler: m}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	return m
}

func (m *machine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	text, isTunnel := strings.CutPrefix(r.URL.Path, "/atoll/connect/")
	if !isTunnel {
		_, _ = io.WriteString(w, "guest")
		return
	}
	if r.Header.Get("Authorization") != "Bearer "+m.token {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	m.tunnels.Add(1)
	var port int
	_, _ = fmt.Sscan(text, &port)
	inner, err := net.Dial("tcp", m.inner[port])
	if err != nil {
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	defer func() { _ = inner.Close() }()
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer func() { _ = conn.Close() }()
	_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"+m.banner)
	go func() { _, _ = io.Copy(inner, buffered); _ = inner.(*net.TCPConn).CloseWrite() }()
	_, _ = io.Copy(conn, inner)
}

func (m *machine) address() Address {
	return Address{SandboxID: "i1", PlacementID: "plc_1", Generation: 1, IP: m.ip, GuestPort: m.guestPort, ConnectToken: m.token}
}

// echo runs a server that returns what it is sent, on an address.
func echo(t *testing.T, address string) int {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(conn, conn); _ = conn.Close() }()
		}
	}()
	return listener.Addr().(*net.TCPAddr).Port
}

func talk(t *testing.T, conn net.Conn, text string) string {
	t.Helper()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.WriteString(conn, text+"\n"); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSuffix(line, "\n")
}

func TestDialGoesStraightWhereItCan(t *testing.T) {
	m := newMachine(t)
	p := NewPlacement(m.address(), DefaultOptions())
	defer p.End()
	port := echo(t, m.ip+":0")
	conn, err := p.Dial(t.Context(), port)
	if err != nil {
		t.Fatal(err)
	}
	if got := talk(t, conn, "hello"); got != "hello" || m.tunnels.Load() != 0 {
		t.Fatalf("%q over %d tunnels", got, m.tunnels.Load())
	}
}

func TestDialTunnelsToLoopbackServers(t *testing.T) {
	m := newMachine(t)
	options := DefaultOptions()
	options.WayMemory = 200 * time.Millisecond
	p := NewPlacement(m.address(), options)
	defer p.End()
	const port = 9 // nothing listens there on the machine's address
	m.inner[port] = fmt.Sprintf("127.0.0.1:%d", echo(t, "127.0.0.1:0"))
	for n := range int64(3) {
		conn, err := p.Dial(t.Context(), port)
		if err != nil {
			t.Fatal(err)
		}
		if got := talk(t, conn, "through"); got != "through" || m.tunnels.Load() != n+1 {
			t.Fatalf("%q over %d tunnels", got, m.tunnels.Load())
		}
	}
	if !p.prefersTunnel(port) {
		t.Fatal("the way is not remembered")
	}
	time.Sleep(250 * time.Millisecond)
	if p.prefersTunnel(port) {
		t.Fatal("the way is remembered for ever")
	}
}

func TestRememberedTunnelGivesWayToADirectServer(t *testing.T) {
	m := newMachine(t)
	p := NewPlacement(m.address(), DefaultOptions())
	defer p.End()
	port := echo(t, m.ip+":0")
	p.rememberTunnel(port) // the server used to listen on loopback, and the tunnel finds nothing there any more
	conn, err := p.Dial(t.Context(), port)
	if err != nil {
		t.Fatal(err)
	}
	if got := talk(t, conn, "direct"); got != "direct" || p.prefersTunnel(port) {
		t.Fatalf("%q, tunnel preferred: %v", got, p.prefersTunnel(port))
	}
}

func TestTunnelKeepsBytesThatComeWithTheHandshake(t *testing.T) {
	m := newMachine(t)
	m.banner = "220 ready\n"
	p := NewPlacement(m.address(), DefaultOptions())
	defer p.End()
	m.inner[9] = fmt.Sprintf("127.0.0.1:%d", echo(t, "127.0.0.1:0"))
	conn, err := p.Dial(t.Context(), 9)
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	reader := bufio.NewReaderSize(iotestOneByte{conn}, 16)
	if line, err := reader.ReadString('\n'); err != nil || line != "220 ready\n" {
		t.Fatalf("%q %v", line, err)
	}
	_, _ = io.WriteString(conn, "more\n")
	if line, err := reader.ReadString('\n'); err != nil || line != "more\n" {
		t.Fatalf("%q %v", line, err)
	}
}

type iotestOneByte struct{ io.Reader }

func (r iotestOneByte) Read(p []byte) (int, error) { return r.Reader.Read(p[:1]) }

func TestClosedPort(t *testing.T) {
	m := newMachine(t)
	p := NewPlacement(m.address(), DefaultOptions())
	defer p.End()
	_, err := p.Dial(t.Context(), 9)
	var dial *DialError
	if !errors.As(err, &dial) || !dial.Refused || dial.Port != 9 {
		t.Fatalf("%v", err)
	}
	if m.tunnels.Load() != 1 {
		t.Fatal("the guest was not asked")
	}
	// The guest's own port is never looked for behind the guest.
	gone := NewPlacement(Address{IP: m.ip, GuestPort: 9, ConnectToken: "x"}, DefaultOptions())
	if _, err := gone.Dial(t.Context(), 9); !errors.As(err, &dial) || !dial.Refused {
		t.Fatalf("%v", err)
	}
}

func TestSilentGuestDoesNotHoldATunnelForEver(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0") // accepts, says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	options := DefaultOptions()
	options.TunnelTimeout = 100 * time.Millisecond
	p := NewPlacement(Address{IP: "127.0.0.1", GuestPort: listener.Addr().(*net.TCPAddr).Port, ConnectToken: "x"}, options)
	defer p.End()
	began := time.Now()
	if _, err := p.Dial(t.Context(), 9); err == nil || time.Since(began) > 5*time.Second {
		t.Fatalf("%v after %v", err, time.Since(began))
	}
	if len(p.conns) != 0 {
		t.Fatal("a connection is left behind")
	}
}

func TestDoubtProvesTheGuest(t *testing.T) {
	m := newMachine(t)
	options := DefaultOptions()
	var doubt atomic.Bool
	options.Doubt = doubt.Load
	port := echo(t, m.ip+":0")
	right := NewPlacement(m.address(), options)
	defer right.End()
	strange := m.address()
	strange.ConnectToken = "of another sandbox that had this address"
	wrong := NewPlacement(strange, options)
	defer wrong.End()

	if _, err := wrong.Dial(t.Context(), port); err != nil {
		t.Fatalf("checked without doubt: %v", err)
	}
	doubt.Store(true)
	for range 3 {
		if _, err := right.Dial(t.Context(), port); err != nil {
			t.Fatal(err)
		}
	}
	if m.tunnels.Load() != 1 {
		t.Fatalf("proved %d times", m.tunnels.Load())
	}
	var dial *DialError
	if _, err := wrong.Dial(t.Context(), port); !errors.As(err, &dial) || dial.Refused {
		t.Fatalf("a stranger was reached: %v", err)
	}
}

func TestEndClosesConnectionsAndRefusesNewOnes(t *testing.T) {
	m := newMachine(t)
	p := NewPlacement(m.address(), DefaultOptions())
	port := echo(t, m.ip+":0")
	conn, err := p.Dial(t.Context(), port)
	if err != nil {
		t.Fatal(err)
	}
	ctx, lease, err := p.Enter(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var aborted atomic.Int64
	lease.OnEnd(func() { aborted.Add(1) })
	p.End()
	p.End()
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Fatalf("%v", err)
	}
	if !errors.Is(context.Cause(ctx), ErrEnded) || aborted.Load() != 1 {
		t.Fatalf("cause %v, aborted %d times", context.Cause(ctx), aborted.Load())
	}
	if _, err := p.Dial(t.Context(), port); !errors.Is(err, ErrEnded) {
		t.Fatalf("%v", err)
	}
	if _, _, err := p.Enter(t.Context()); !errors.Is(err, ErrEnded) {
		t.Fatalf("%v", err)
	}
	request, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
	if _, err := p.RoundTrip(request, port, HTTP1); !errors.Is(err, ErrEnded) {
		t.Fatalf("%v", err)
	}
	lease.Leave()
	if p.Open() != 0 {
		t.Fatal("still open")
	}
}

func TestLeases(t *testing.T) {
	options := DefaultOptions()
	options.MaxOpen = 2
	p := NewPlacement(Address{}, options)
	_, first, _ := p.Enter(t.Context())
	_, _, _ = p.Enter(t.Context())
	if _, _, err := p.Enter(t.Context()); !errors.Is(err, ErrFull) {
		t.Fatalf("%v", err)
	}
	first.OnEnd(func() { t.Error("called after Leave") })
	first.Leave()
	if _, _, err := p.Enter(t.Context()); err != nil {
		t.Fatal(err)
	}
	late, _, err := p.Enter(t.Context())
	if err == nil {
		t.Fatal(late)
	}
	p.End()
}

func TestOnEndAfterTheEnd(t *testing.T) {
	p := NewPlacement(Address{}, DefaultOptions())
	_, lease, err := p.Enter(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	p.End()
	called := false
	lease.OnEnd(func() { called = true })
	if !called {
		t.Fatal("an end that came first is not seen")
	}
}

func TestEndRacesWithEverything(t *testing.T) {
	m := newMachine(t)
	port := echo(t, m.ip+":0")
	for range 30 {
		p := NewPlacement(m.address(), DefaultOptions())
		var wait sync.WaitGroup
		for range 8 {
			wait.Go(func() {
				for {
					ctx, lease, err := p.Enter(context.Background())
					if err != nil {
						return
					}
					lease.OnEnd(func() {})
					conn, err := p.Dial(ctx, port)
					if err == nil {
						_, _ = conn.Write([]byte("x"))
						_ = conn.Close()
					}
					lease.Leave()
				}
			})
		}
		time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
		p.End()
		wait.Wait()
		if len(p.conns) != 0 || p.Open() != 0 {
			t.Fatalf("%d connections and %d leases are left", len(p.conns), p.Open())
		}
	}
}

func TestPoolIsOfOnePlacement(t *testing.T) {
	m := newMachine(t)
	ask := func(p *Placement) string {
		t.Helper()
		request, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		response, err := p.RoundTrip(request, m.guestPort, HTTP1)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = response.Body.Close() }()
		text, _ := io.ReadAll(response.Body)
		return string(text)
	}
	first, second := NewPlacement(m.address(), DefaultOptions()), NewPlacement(m.address(), DefaultOptions())
	for range 3 {
		if ask(first) != "guest" || ask(second) != "guest" {
			t.Fatal("no answer")
		}
	}
	if len(first.conns) != 1 || len(second.conns) != 1 {
		t.Fatalf("%d and %d connections, not one each", len(first.conns), len(second.conns))
	}
	first.End()
	if len(first.conns) != 0 || ask(second) != "guest" {
		t.Fatal("an end reaches too far, or not far enough")
	}
	second.End()
}

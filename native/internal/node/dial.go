package node

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"syscall"
	"time"
)

// How long a proof of identity is good while the edge is in doubt.
const proofTTL = time.Second

// DialError says that no connection to a port could be made, so that nothing was sent.
type DialError struct {
	Port    int
	Refused bool // something answered at the address and said no; otherwise nothing answered in time
	Cause   error
}

func (e *DialError) Error() string { return fmt.Sprintf("port %d: %v", e.Port, e.Cause) }

// Unwrap returns what the network said.
func (e *DialError) Unwrap() error { return e.Cause }

// errStranger says that another placement's guest answers at the address.
var errStranger = errors.New("another guest answers at the address")

// Dial opens a connection to a port inside the placement: straight, or through the guest where a server listens on
// loopback only. Which way worked is remembered for a few seconds.
//
// Errors: ErrEnded; *DialError.
func (p *Placement) Dial(ctx context.Context, port int) (*Conn, error) {
	if p.Ended() {
		return nil, ErrEnded
	}
	if err := p.prove(ctx); err != nil {
		return nil, p.failed(port, err)
	}
	guest := port == p.address.GuestPort
	if !guest && p.prefersTunnel(port) {
		if conn, err := p.tunnel(ctx, port); err == nil {
			return conn, nil
		}
		p.forgetTunnel(port)
	}
	conn, err := p.direct(ctx, port)
	if err == nil {
		return conn, nil
	}
	if !guest && errors.Is(err, syscall.ECONNREFUSED) {
		if conn, tunnelErr := p.tunnel(ctx, port); tunnelErr == nil {
			p.rememberTunnel(port)
			return conn, nil
		}
	}
	return nil, p.failed(port, err)
}

func (p *Placement) failed(port int, err error) error {
	if p.Ended() {
		return ErrEnded
	}
	return &DialError{Port: port, Refused: errors.Is(err, syscall.ECONNREFUSED), Cause: err}
}

func (p *Placement) direct(ctx context.Context, port int) (*Conn, error) {
	dialer := net.Dialer{Timeout: p.options.DialTimeout, KeepAlive: 30 * time.Second}
	conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(p.address.IP, strconv.Itoa(port)))
	if err != nil {
		return nil, err
	}
	return p.adopt(conn.(*net.TCPConn))
}

// tunnel asks the guest to connect to a port on its own loopback.
func (p *Placement) tunnel(ctx context.Context, port int) (*Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, p.options.TunnelTimeout)
	defer cancel()
	conn, err := p.direct(ctx, p.address.GuestPort)
	if err != nil {
		return nil, err
	}
	if err := p.handshake(ctx, conn, port); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

func (p *Placement) handshake(ctx context.Context, conn *Conn, port int) error {
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	host := net.JoinHostPort(p.address.IP, strconv.Itoa(p.address.GuestPort))
	_, err := fmt.Fprintf(conn, "POST /atoll/connect/%d HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n"+
		"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n", port, host, *p.token.Load())
	if err != nil {
		return err
	}
	// The limit holds for the head only: after a 101 nothing more is read through it than what came with the head.
	reader := bufio.NewReaderSize(io.LimitReader(conn, 16<<10), 4<<10)
	response, err := http.ReadResponse(reader, nil)
	if err != nil {
		return err
	}
	_ = response.Body.Close()
	switch response.StatusCode {
	case http.StatusSwitchingProtocols:
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusMisdirectedRequest:
		return errStranger
	default:
		return &refusal{status: response.StatusCode}
	}
	if n := reader.Buffered(); n > 0 {
		early, _ := reader.Peek(n)
		conn.early = append([]byte(nil), early...)
	}
	if !stop() {
		return ctx.Err()
	}
	return conn.SetDeadline(time.Time{})
}

// refusal is the guest's word that it could not connect. It proves who the guest is as well as a 101 does.
type refusal struct{ status int }

func (r *refusal) Error() string { return fmt.Sprintf("the guest's tunnel answered %d", r.status) }

// prove makes sure, when the edge is in doubt, that the address still belongs to this placement. A guest that knows
// nothing of tunnels proves nothing and is let through: only a guest that says it is another one is refused.
func (p *Placement) prove(ctx context.Context) error {
	if p.options.Doubt == nil || !p.options.Doubt() || *p.token.Load() == "" {
		return nil
	}
	p.mu.Lock()
	fresh := time.Since(p.verifiedAt) < proofTTL
	p.mu.Unlock()
	if fresh {
		return nil
	}
	conn, err := p.tunnel(ctx, p.address.GuestPort)
	if errors.Is(err, errStranger) {
		return err
	}
	if err == nil {
		_ = conn.Close()
	} else if refused := (*refusal)(nil); !errors.As(err, &refused) {
		return nil // nothing answered: the dial itself says so
	}
	p.mu.Lock()
	p.verifiedAt = time.Now()
	p.mu.Unlock()
	return nil
}

func (p *Placement) prefersTunnel(port int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	until, ok := p.tunnelled[port]
	if ok && time.Now().After(until) {
		delete(p.tunnelled, port)
		ok = false
	}
	return ok
}

func (p *Placement) rememberTunnel(port int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	// Ports are what a client says: the map is emptied rather than let grow.
	if p.tunnelled == nil || len(p.tunnelled) >= 64 {
		p.tunnelled = make(map[int]time.Time)
	}
	p.tunnelled[port] = time.Now().Add(p.options.WayMemory)
}

func (p *Placement) forgetTunnel(port int) {
	p.mu.Lock()
	delete(p.tunnelled, port)
	p.mu.Unlock()
}

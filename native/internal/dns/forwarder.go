package dns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// Config says where to listen and whom to ask.
type Config struct {
	Listen     []string // addresses with ports; they need not exist yet
	Upstreams  []string // addresses, 53 where they have no port; none: those of ResolvConf
	ResolvConf string   // "" means /etc/resolv.conf
	Limits     Limits
}

// Limits bound what guests can make the forwarder hold. Zero means the default.
type Limits struct {
	PerClient     int           // questions of one address that are open at once
	Total         int           // the same for all
	ConnsOfClient int           // TCP connections of one address
	Each          time.Duration // for one resolver to answer
	All           time.Duration // for a question to be answered at all
	TCPIdle       time.Duration // between two questions of a connection
}

func (l *Limits) fill() {
	if l.PerClient <= 0 {
		l.PerClient = 64
	}
	if l.Total <= 0 {
		l.Total = 1024
	}
	if l.ConnsOfClient <= 0 {
		l.ConnsOfClient = 8
	}
	if l.Each <= 0 {
		l.Each = 2 * time.Second
	}
	if l.All <= 0 {
		l.All = 5 * time.Second
	}
	if l.TCPIdle <= 0 {
		l.TCPIdle = 10 * time.Second
	}
}

// Forwarder answers on its addresses with what the resolvers say.
type Forwarder struct {
	limits    Limits
	upstreams *upstreams
	log       *slog.Logger
	udp       []*net.UDPConn
	tcp       []*net.TCPListener
	open      *counts // questions by client
	conns     *counts // TCP connections by client
	wait      sync.WaitGroup
	failing   atomic.Bool // the last question found no resolver: said once, and once more when it is over
	stats     Stats
}

// Stats count what happened since the start.
type Stats struct{ Answered, Failed, Refused, Malformed atomic.Int64 }

// New binds all addresses. Close ends it.
func New(config Config, log *slog.Logger) (*Forwarder, error) {
	config.Limits.fill()
	f := &Forwarder{
		limits: config.Limits, log: log, upstreams: &upstreams{skip: make(map[netip.Addr]bool)},
		open: newCounts(config.Limits.PerClient, config.Limits.Total), conns: newCounts(config.Limits.ConnsOfClient, config.Limits.Total),
	}
	if len(config.Listen) == 0 {
		return nil, errors.New("no address to listen on")
	}
	for _, text := range config.Listen {
		if err := f.bind(text); err != nil {
			f.Close()
			return nil, err
		}
	}
	for _, text := range config.Upstreams {
		server, err := parseServer(text)
		if err != nil {
			f.Close()
			return nil, err
		}
		f.upstreams.list = append(f.upstreams.list, server)
	}
	if len(config.Upstreams) == 0 {
		f.upstreams.file = config.ResolvConf
		if f.upstreams.file == "" {
			f.upstreams.file = "/etc/resolv.conf"
		}
	}
	if len(f.upstreams.current()) == 0 {
		log.Warn("dns.upstream.none", "file", f.upstreams.file)
	}
	return f, nil
}

func parseServer(text string) (netip.AddrPort, error) {
	if server, err := netip.ParseAddrPort(text); err == nil {
		return server, nil
	}
	address, err := netip.ParseAddr(text)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("upstream %q is no address", text)
	}
	return netip.AddrPortFrom(address, 53), nil
}

func (f *Forwarder) bind(text string) error {
	server, err := parseServer(text)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	config := net.ListenConfig{Control: freeBind}
	packet, err := config.ListenPacket(context.Background(), "udp", server.String())
	if err != nil {
		return err
	}
	udp := packet.(*net.UDPConn)
	f.udp = append(f.udp, udp)
	// Bursts wait in the kernel rather than be lost; what it grants is enough.
	_ = udp.SetReadBuffer(1 << 20)
	if server.Port() == 0 {
		server = netip.AddrPortFrom(server.Addr(), udp.LocalAddr().(*net.UDPAddr).AddrPort().Port())
	}
	listener, err := config.Listen(context.Background(), "tcp", server.String())
	if err != nil {
		return err
	}
	f.tcp = append(f.tcp, listener.(*net.TCPListener))
	if server.Port() == 53 {
		f.upstreams.skip[server.Addr()] = true
	}
	return nil
}

// Addresses are those that it listens on.
func (f *Forwarder) Addresses() []string {
	var list []string
	for _, conn := range f.udp {
		list = append(list, conn.LocalAddr().String())
	}
	return list
}

// Stats returns the counters.
func (f *Forwarder) Stats() *Stats { return &f.stats }

// Close lets go of the addresses.
func (f *Forwarder) Close() {
	for _, conn := range f.udp {
		_ = conn.Close()
	}
	for _, listener := range f.tcp {
		_ = listener.Close()
	}
}

// Run serves until ctx ends.
func (f *Forwarder) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	failed := make(chan error, len(f.udp)+len(f.tcp))
	for _, conn := range f.udp {
		f.wait.Go(func() { failed <- f.serveUDP(ctx, conn) })
	}
	for _, listener := range f.tcp {
		f.wait.Go(func() { failed <- f.serveTCP(ctx, listener) })
	}
	f.log.Info("dns.started", "listen", f.Addresses(), "upstreams", len(f.upstreams.current()))
	var err error
	select {
	case err = <-failed:
	case <-ctx.Done():
	}
	cancel()
	f.Close()
	f.wait.Wait()
	f.log.Info("dns.stopped")
	return err
}

func (f *Forwarder) serveUDP(ctx context.Context, conn *net.UDPConn) error {
	buffer := make([]byte, queryBytesMax+1)
	for {
		n, client, err := conn.ReadFromUDPAddrPort(buffer)
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return err
			}
			// An ICMP error about an earlier answer surfaces here; a real fault would come again and again.
			select {
			case <-time.After(time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		if n > queryBytesMax {
			f.stats.Malformed.Add(1)
			continue
		}
		q, code, err := parseQuery(append([]byte(nil), buffer[:n]...))
		if err != nil {
			f.stats.Malformed.Add(1)
			if code != nil {
				_, _ = conn.WriteToUDPAddrPort(q.failure(*code), client)
			}
			continue
		}
		address := client.Addr().Unmap()
		if !f.open.enter(address) {
			f.stats.Refused.Add(1)
			_, _ = conn.WriteToUDPAddrPort(q.failure(dnsmessage.RCodeRefused), client)
			continue
		}
		f.wait.Go(func() {
			defer f.open.leave(address)
			_, _ = conn.WriteToUDPAddrPort(f.answer(ctx, "udp", q), client)
		})
	}
}

func (f *Forwarder) serveTCP(ctx context.Context, listener *net.TCPListener) error {
	for {
		conn, err := listener.AcceptTCP()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return err
			}
			select {
			case <-time.After(10 * time.Millisecond): // out of descriptors, most likely
			case <-ctx.Done():
			}
			continue
		}
		address := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
		if !f.conns.enter(address) {
			f.stats.Refused.Add(1)
			_ = conn.Close()
			continue
		}
		f.wait.Go(func() {
			defer f.conns.leave(address)
			defer func() { _ = conn.Close() }()
			stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
			defer stop()
			f.converse(ctx, conn, address)
		})
	}
}

// converse answers the questions of one connection, one after the other.
func (f *Forwarder) converse(ctx context.Context, conn *net.TCPConn, client netip.Addr) {
	for {
		_ = conn.SetDeadline(time.Now().Add(f.limits.TCPIdle))
		text, err := readFrame(conn, queryBytesMax)
		if err != nil {
			return
		}
		q, code, err := parseQuery(text)
		var answer []byte
		switch {
		case err != nil && code == nil:
			f.stats.Malformed.Add(1)
			return
		case err != nil:
			f.stats.Malformed.Add(1)
			answer = q.failure(*code)
		case !f.open.enter(client):
			f.stats.Refused.Add(1)
			answer = q.failure(dnsmessage.RCodeRefused)
		default:
			answer = f.answer(ctx, "tcp", q)
			f.open.leave(client)
		}
		_ = conn.SetDeadline(time.Now().Add(f.limits.TCPIdle))
		if writeFrame(conn, answer) != nil {
			return
		}
	}
}

// answer is what a resolver says, or SERVFAIL.
func (f *Forwarder) answer(ctx context.Context, network string, q query) []byte {
	ctx, cancel := context.WithTimeout(ctx, f.limits.All)
	defer cancel()
	answer, err := f.upstreams.ask(ctx, network, q, f.limits.Each)
	if err != nil {
		f.stats.Failed.Add(1)
		if !f.failing.Swap(true) {
			f.log.Warn("dns.upstream.lost", "error", err.Error())
		}
		return q.failure(dnsmessage.RCodeServerFailure)
	}
	f.stats.Answered.Add(1)
	if f.failing.Swap(false) {
		f.log.Info("dns.upstream.back")
	}
	return answer
}

package node

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// ErrEnded says that the placement is gone: nothing was sent, or what was open has been cut.
var ErrEnded = errors.New("placement ended")

// ErrFull says that the placement has as many open requests as it may have.
var ErrFull = errors.New("too many open requests to the placement")

// Address says where a placement's guest is and how to prove to it that we mean this one.
type Address struct {
	SandboxID    string
	PlacementID  string
	Generation   int64
	IP           string
	GuestPort    int
	ConnectToken string
}

// SamePlace is true when a connection opened for one of the two is good for the other.
func (a Address) SamePlace(b Address) bool {
	a.ConnectToken, b.ConnectToken = "", ""
	return a == b
}

// Options are the same for all placements of a process.
type Options struct {
	MaxOpen       int           // open requests and upgraded streams per placement
	DialTimeout   time.Duration // one TCP connect
	TunnelTimeout time.Duration // connect and handshake of a tunnel through the guest
	GuestIdle     time.Duration // an unused connection to the guest is kept so long
	UserIdle      time.Duration // the same for other ports; below the 5 s after which common servers close theirs
	WayMemory     time.Duration // how long it is remembered that only the tunnel reaches a port

	// Doubt, when set and true, makes a new connection prove first that the guest at the address is this placement's.
	Doubt func() bool
}

// DefaultOptions are what a node proxy uses unless told otherwise.
func DefaultOptions() Options {
	return Options{
		MaxOpen:       1024,
		DialTimeout:   3 * time.Second,
		TunnelTimeout: 5 * time.Second,
		GuestIdle:     50 * time.Second,
		UserIdle:      4 * time.Second,
		WayMemory:     5 * time.Second,
	}
}

// Placement is one generation of a sandbox on a host, as far as traffic is concerned.
type Placement struct {
	address Address
	options Options
	token   atomic.Pointer[string]
	ended   atomic.Bool

	mu         sync.Mutex
	leases     map[*Lease]struct{}
	conns      map[*Conn]struct{}
	tunnelled  map[int]time.Time // port -> until when the tunnel is tried first
	verifiedAt time.Time
	pools      pools
}

// NewPlacement makes a placement; it opens nothing until it is used.
func NewPlacement(address Address, options Options) *Placement {
	p := &Placement{address: address, options: options}
	p.SetToken(address.ConnectToken)
	return p
}

// Address returns what the placement was made with.
func (p *Placement) Address() Address { return p.address }

// SetToken replaces the token for tunnels; open ones go on.
func (p *Placement) SetToken(token string) { p.token.Store(&token) }

// Ended is true from the first moment of End on, before anything is cut.
func (p *Placement) Ended() bool { return p.ended.Load() }

// Lease is one open request or upgraded stream.
type Lease struct {
	placement *Placement
	cancel    context.CancelCauseFunc

	mu    sync.Mutex
	left  bool
	abort func()
}

// Enter counts a request in. Its context ends, with cause ErrEnded, when the placement does.
//
// Errors: ErrEnded, ErrFull.
func (p *Placement) Enter(ctx context.Context) (context.Context, *Lease, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended.Load() {
		return nil, nil, ErrEnded
	}
	if p.options.MaxOpen > 0 && len(p.leases) >= p.options.MaxOpen {
		return nil, nil, ErrFull
	}
	ctx, cancel := context.WithCancelCause(ctx)
	lease := &Lease{placement: p, cancel: cancel}
	if p.leases == nil {
		p.leases = make(map[*Lease]struct{})
	}
	p.leases[lease] = struct{}{}
	return ctx, lease, nil
}

// OnEnd sets what frees a client that is stuck in a read or a write. It is called at most once, never after Leave.
func (l *Lease) OnEnd(abort func()) {
	l.mu.Lock()
	l.abort = abort
	l.mu.Unlock()
	if l.placement.Ended() {
		l.end()
	}
}

// Leave counts the request out.
func (l *Lease) Leave() {
	l.mu.Lock()
	l.left = true
	l.abort = nil
	l.mu.Unlock()
	l.cancel(context.Canceled)
	p := l.placement
	p.mu.Lock()
	delete(p.leases, l)
	p.mu.Unlock()
}

func (l *Lease) end() {
	l.cancel(ErrEnded)
	l.mu.Lock()
	defer l.mu.Unlock()
	// Under the lock: a response writer must not be touched once its handler has returned.
	if !l.left && l.abort != nil {
		abort := l.abort
		l.abort = nil
		abort()
	}
}

// Open returns how many requests and streams are open.
func (p *Placement) Open() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.leases)
}

// End cuts everything of the placement at once: connections to the guest first, then clients.
//
// Idempotency: a second call does nothing. When the first returns, nothing new can be opened.
func (p *Placement) End() {
	p.mu.Lock()
	if p.ended.Swap(true) {
		p.mu.Unlock()
		return
	}
	leases := make([]*Lease, 0, len(p.leases))
	for lease := range p.leases {
		leases = append(leases, lease)
	}
	conns := make([]*Conn, 0, len(p.conns))
	for conn := range p.conns {
		conns = append(conns, conn)
	}
	pools := p.pools
	p.mu.Unlock()

	for _, conn := range conns {
		_ = conn.Close()
	}
	for _, lease := range leases {
		lease.cancel(ErrEnded)
	}
	for _, lease := range leases {
		lease.end()
	}
	pools.drop()
}

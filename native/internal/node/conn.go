package node

import (
	"net"
	"sync"
	"sync/atomic"
)

// Conn is a connection into a placement. It keeps what *net.TCPConn can do (half close, ReadFrom).
type Conn struct {
	*net.TCPConn
	placement *Placement
	once      sync.Once
	early     []byte // bytes that came together with a tunnel's handshake
	watcher   atomic.Pointer[func()]
	diversion atomic.Pointer[diverted]
	closed    atomic.Bool
}

// Watch has a function called once when the connection is closed, from whichever side; at once, if it is already. The
// transport cannot tell a request that its connection broke while it waits for more of the request's body.
func (c *Conn) Watch(broken *func()) {
	c.watcher.Store(broken)
	if c.closed.Load() {
		c.tell()
	}
}

// Unwatch takes back a Watch. It leaves alone what a later user of the connection has set.
func (c *Conn) Unwatch(broken *func()) { c.watcher.CompareAndSwap(broken, nil) }

func (c *Conn) tell() {
	if broken := c.watcher.Swap(nil); broken != nil {
		(*broken)()
	}
}

// adopt takes a fresh connection into the placement's care, or closes it when the placement has ended meanwhile.
func (p *Placement) adopt(tcp *net.TCPConn) (*Conn, error) {
	conn := &Conn{TCPConn: tcp, placement: p}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended.Load() {
		_ = tcp.Close()
		return nil, ErrEnded
	}
	if p.conns == nil {
		p.conns = make(map[*Conn]struct{})
	}
	p.conns[conn] = struct{}{}
	return conn, nil
}

// Read gives the bytes of the handshake's packet first.
func (c *Conn) Read(b []byte) (int, error) {
	if len(c.early) > 0 {
		n := copy(b, c.early)
		c.early = c.early[n:]
		if len(c.early) == 0 {
			c.early = nil
		}
		return n, nil
	}
	if n, err, done := c.divert(b); done {
		return n, err
	}
	return c.TCPConn.Read(b)
}

// Close closes the connection and forgets it.
func (c *Conn) Close() error {
	c.once.Do(func() {
		p := c.placement
		p.mu.Lock()
		delete(p.conns, c)
		p.mu.Unlock()
	})
	err := c.TCPConn.Close()
	c.closed.Store(true)
	c.tell()
	return err
}

package edge

import (
	"context"
	"io"
	"net"
	"sync"
	"sync/atomic"
)

// Connections above the limit are still accepted to be told so, up to this many; the rest are closed unheard.
const overLimit = 128

// Of a connection that is left, so much is thrown away at most.
const lingeringMax = 256 << 10

// gate counts client connections, upgraded ones too, which the server forgets.
type gate struct {
	net.Listener
	limit   int64
	metrics *metrics

	mu   sync.Mutex
	open map[*clientConn]struct{}
}

type clientConn struct {
	*net.TCPConn
	gate *gate
	over bool // above the limit: it gets one answer, a 429
	once sync.Once

	leaving atomic.Bool // whatever still comes is nobody's

	mu     sync.Mutex
	corked bool
	pieces net.Buffers
	copies []byte
}

func newGate(listener net.Listener, limit int, m *metrics) *gate {
	return &gate{Listener: listener, limit: int64(limit), metrics: m, open: make(map[*clientConn]struct{})}
}

// Accept returns the next connection that there is room for.
func (g *gate) Accept() (net.Conn, error) {
	for {
		raw, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		tcp := raw.(*net.TCPConn)
		count := g.metrics.connections.Add(1)
		if count > g.limit {
			g.metrics.connectionsRefused.Add(1)
		}
		if count > g.limit+overLimit {
			g.metrics.connections.Add(-1)
			_ = tcp.Close()
			continue
		}
		conn := &clientConn{TCPConn: tcp, gate: g, over: count > g.limit}
		g.mu.Lock()
		g.open[conn] = struct{}{}
		g.mu.Unlock()
		return conn, nil
	}
}

// Close closes the connection and counts it out.
func (c *clientConn) Close() error {
	c.once.Do(func() {
		c.gate.metrics.connections.Add(-1)
		c.gate.mu.Lock()
		delete(c.gate.open, c)
		c.gate.mu.Unlock()
	})
	return c.TCPConn.Close()
}

// leave has the connection end once its answer has gone out. What the client still sends until then, or until the deadline, is read and thrown
// away: closed with something unread, the answer might be lost with the connection.
func (c *clientConn) leave() { c.leaving.Store(true) }

// Read reads, or ends a connection that was left.
func (c *clientConn) Read(p []byte) (int, error) {
	for passed := 0; c.leaving.Load(); {
		n, err := c.TCPConn.Read(p)
		if passed += n; err != nil || passed > lingeringMax {
			return 0, io.EOF
		}
	}
	return c.TCPConn.Read(p)
}

// closeAll closes what is left when the drain is over.
func (g *gate) closeAll() {
	g.mu.Lock()
	conns := make([]*clientConn, 0, len(g.open))
	for conn := range g.open {
		conns = append(conns, conn)
	}
	g.mu.Unlock()
	for _, conn := range conns {
		_ = conn.Close()
	}
}

type connKey struct{}

// withConn lets a request find its connection.
func withConn(ctx context.Context, conn net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, conn)
}

func connOf(ctx context.Context) *clientConn {
	conn, _ := ctx.Value(connKey{}).(*clientConn)
	return conn
}

// gather collects what `write` writes and sends it at once. The server writes a large chunk in three pieces (what fits
// its buffer together with the chunk's length, the rest, the chunk's end), and calls of the kernel are what a stream costs.
//
// A piece larger than the server's buffer is the caller's own and must not change until gather returns.
func (c *clientConn) gather(write func() error) error {
	c.mu.Lock()
	c.corked = true
	c.mu.Unlock()
	err := write()
	c.mu.Lock()
	pieces := c.pieces
	c.corked, c.pieces = false, c.pieces[:0]
	c.mu.Unlock()
	if err == nil && len(pieces) > 0 {
		_, err = pieces.WriteTo(c.TCPConn)
	}
	c.copies = c.copies[:0]
	return err
}

// The server's buffer (net/http, newBufioWriterSize); up to it, what is written may be overwritten afterwards.
const serverBuffer = 4 << 10

// Write writes, or keeps a piece for gather.
func (c *clientConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	if !c.corked {
		c.mu.Unlock()
		return c.TCPConn.Write(p)
	}
	defer c.mu.Unlock()
	kept := p
	if len(p) <= serverBuffer {
		if cap(c.copies)-len(c.copies) < len(p) {
			c.copies = make([]byte, 0, 2*serverBuffer) // earlier pieces keep the former one
		}
		start := len(c.copies)
		c.copies = append(c.copies, p...)
		kept = c.copies[start:]
	}
	c.pieces = append(c.pieces, kept)
	return len(p), nil
}

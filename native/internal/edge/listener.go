package edge

import (
	"context"
	"net"
	"sync"
)

// Connections above the limit are still accepted to be told so, up to this many; the rest are closed unheard.
const overLimit = 128

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

type overKey struct{}

func markOver(ctx context.Context, conn net.Conn) context.Context {
	if client, ok := conn.(*clientConn); ok && client.over {
		return context.WithValue(ctx, overKey{}, true)
	}
	return ctx
}

func isOver(ctx context.Context) bool { return ctx.Value(overKey{}) != nil }

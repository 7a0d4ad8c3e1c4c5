package guest

import (
	"io"
	"net"
	"sync"
)

// boundedConn gives its slot back when it is closed. It passes on what makes large transfers cheap (sendfile, splice)
// and half-closing.
type boundedConn struct {
	net.Conn
	slots chan struct{}
	once  sync.Once
}

func (c *boundedConn) Close() error {
	c.once.Do(func() { <-c.slots })
	return c.Conn.Close()
}

// ReadFrom lets the kernel move a file to the socket.
func (c *boundedConn) ReadFrom(from io.Reader) (int64, error) {
	if direct, ok := c.Conn.(io.ReaderFrom); ok {
		return direct.ReadFrom(from)
	}
	return io.Copy(struct{ io.Writer }{c.Conn}, from)
}

// CloseWrite ends one direction.
func (c *boundedConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}

package edge

import (
	"io"
	"net/http"
	"sync"
	"sync/atomic"

	"atoll.local/native/internal/node"
)

// An answer of known length from here on is moved by the kernel from one connection to the other. Below, the head and a
// short body leave in one packet.
const divertFrom = 256 << 10

// Address space more than memory: what the kernel moves touches no page of it.
var diversions = sync.Pool{New: func() any { return new([1 << 20]byte) }}

// diversion is the rest of an answer's body and the connection over which it comes. As an ordinary reader it reads; the
// client's connection, asked by the server to read from it, has the kernel move the bytes.
type diversion struct {
	io.Reader
	from  *node.Conn
	moved *atomic.Int64
}

// divert sends the whole body, of known length, to the client.
func (x *exchange) divert(to io.ReaderFrom, body io.Reader, from *node.Conn) error {
	// Else the server would wait for some of the body before it sends the head.
	if err := http.NewResponseController(x.writer).Flush(); err != nil {
		return err
	}
	_, err := to.ReadFrom(&diversion{Reader: body, from: from, moved: x.moved})
	return err
}

// ReadFrom is what the server calls for the body of an answer of known length, when its head has gone out.
func (c *clientConn) ReadFrom(r io.Reader) (int64, error) {
	rest, ok := r.(*diversion)
	if !ok {
		return c.TCPConn.ReadFrom(r)
	}
	buffer := diversions.Get().(*[1 << 20]byte)
	defer diversions.Put(buffer)
	var sent int64
	for {
		n, moved, err := rest.from.Divert(rest.Reader, c.TCPConn, buffer[:])
		if n > 0 {
			if _, err := c.TCPConn.Write(buffer[:n]); err != nil {
				return sent, err
			}
		}
		sent += int64(n + moved)
		rest.moved.Add(int64(n + moved))
		if err == io.EOF {
			return sent, nil
		}
		if err != nil {
			return sent, err
		}
	}
}

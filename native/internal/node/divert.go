package node

import (
	"io"
	"net"
)

// diverted says where what is read into one buffer goes instead.
type diverted struct {
	to     *net.TCPConn
	buffer *byte
	moved  int
}

// divertMin is above every buffer through which a transport reads ahead: what it reads for itself is never diverted.
const divertMin = 64 << 10

// Divert reads from body, whose bytes come over c, up to once the length of buffer. What has not been read ahead is moved
// by the kernel from c to the other connection, and never seen here; it returns how many bytes were moved so. The others
// are in the buffer, n of them, as of any read, and the caller's to send. Of n and moved one is zero.
//
// One call at a time. The buffer is at least 64 KiB; most of its pages are never touched.
func (c *Conn) Divert(body io.Reader, to *net.TCPConn, buffer []byte) (n, moved int, err error) {
	way := &diverted{to: to, buffer: &buffer[0]}
	c.diversion.Store(way)
	n, err = body.Read(buffer)
	// The connection may be another request's by now; its reads go into buffers of its own.
	c.diversion.CompareAndSwap(way, nil)
	if way.moved > 0 {
		return 0, way.moved, err
	}
	return n, 0, err
}

// divert moves up to len(b) bytes as a read would have read them. False when this read is to be an ordinary one.
func (c *Conn) divert(b []byte) (n int, err error, done bool) {
	way := c.diversion.Load()
	if way == nil || len(b) < divertMin || way.buffer != &b[0] {
		return 0, nil, false
	}
	moved, err := way.to.ReadFrom(&io.LimitedReader{R: c.TCPConn, N: int64(len(b))})
	way.moved = int(moved)
	if moved == 0 && err == nil {
		err = io.EOF
	}
	return int(moved), err, true
}

package node

import (
	"bytes"
	"io"
	"net"
	"testing"
)

// pair gives two ends of a TCP connection on loopback.
func pair(t *testing.T) (near, far *net.TCPConn) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	dialled, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	accepted, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dialled.Close(); _ = accepted.Close() })
	return dialled.(*net.TCPConn), accepted.(*net.TCPConn)
}

func TestDivertMovesOnlyWhatItsOwnBufferAsksFor(t *testing.T) {
	from, guest := pair(t)
	to, client := pair(t)
	conn := &Conn{TCPConn: from, placement: &Placement{}}
	content := bytes.Repeat([]byte("0123456789abcdef"), 1<<14)
	go func() { _, _ = guest.Write(content); _ = guest.CloseWrite() }()
	got := make(chan []byte, 1)
	go func() { all, _ := io.ReadAll(client); got <- all }()

	// A transport's own small read is an ordinary one, also while something is diverted.
	head := make([]byte, 16)
	way := &diverted{to: to, buffer: &head[0]}
	conn.diversion.Store(way)
	if n, err := io.ReadFull(conn, head); n != 16 || err != nil || string(head) != "0123456789abcdef" {
		t.Fatalf("%d %v %q", n, err, head)
	}
	if other := make([]byte, divertMin); true {
		if n, moved, done := conn.divert(other); done {
			t.Fatalf("another's buffer was diverted: %d %v", n, moved)
		}
	}

	buffer := make([]byte, 1<<20)
	total := 0
	for {
		n, moved, err := conn.Divert(conn, to, buffer)
		if n != 0 {
			t.Fatalf("%d bytes were read that the kernel should have moved", n)
		}
		total += moved
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	_ = to.CloseWrite()
	if all := <-got; total != len(content)-16 || !bytes.Equal(all, content[16:]) {
		t.Fatalf("moved %d, came %d of %d", total, len(all), len(content)-16)
	}
	if conn.diversion.Load() != nil {
		t.Error("the diversion outlives its call")
	}
}

package guest

import (
	"bytes"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// lockedBuffer is a log that two goroutines may look at.
type lockedBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (b *lockedBuffer) Write(text []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.Write(text)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.String()
}

func TestABugCutsTheConnectionAndIsLogged(t *testing.T) {
	var log lockedBuffer
	g := &Guest{options: Options{Log: slog.New(slog.NewJSONHandler(&log, nil))}}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer g.reportPanic(r)
		_, _ = w.Write([]byte("half"))
		panic("a bug")
	}))
	defer server.Close()
	if response, err := http.Get(server.URL + "/path"); err == nil {
		body := make([]byte, 10)
		n, err := response.Body.Read(body)
		_ = response.Body.Close()
		t.Fatalf("%q %v", body[:n], err)
	}
	if !strings.Contains(log.String(), `"cause":"a bug"`) || !strings.Contains(log.String(), "guest_test.go") || !strings.Contains(log.String(), `"path":"/path"`) {
		t.Fatal(log.String())
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer inner.Close()
	listener := &boundedListener{Listener: inner, slots: make(chan struct{}, 2)}
	accepted := make(chan net.Conn, 10)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			accepted <- conn
		}
	}()
	address := inner.Addr().String()
	dial(t, address)
	dial(t, address)
	first := <-accepted
	<-accepted
	// The third is closed at once, it does not wait.
	if _, err := dial(t, address).Read(make([]byte, 1)); err == nil {
		t.Fatal("a connection too many was served")
	}
	must(t, first.Close())
	_ = first.Close() // a second close gives no second slot
	dial(t, address)
	<-accepted
	if _, err := dial(t, address).Read(make([]byte, 1)); err == nil {
		t.Fatal("a connection too many was served")
	}
}

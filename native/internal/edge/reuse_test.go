package edge

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// talk sends requests over one connection, the next when the answer to the last has come, and returns the status of each
// and whether the connection was announced to close with it.
func talk(t *testing.T, te *testEdge, requests ...string) (statuses []int, closes []bool) {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(te.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	reader := bufio.NewReader(conn)
	for number, request := range requests {
		if _, err := io.WriteString(conn, request); err != nil {
			t.Fatalf("request %d: %v", number, err)
		}
		response, err := http.ReadResponse(reader, nil)
		if err != nil {
			t.Fatalf("answer %d of %v: %v", number, statuses, err)
		}
		_, _ = io.Copy(io.Discard, response.Body)
		statuses = append(statuses, response.StatusCode)
		closes = append(closes, response.Close)
		if response.Close {
			return statuses, closes
		}
	}
	return statuses, closes
}

func post(path, headers, body string) string {
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s", path, headers, len(body), body)
}

// An answer of the edge's own to a request with a body leaves the connection usable, or says that it doesn't: clients
// send their next request over it, and that may be one that must not be sent twice.
func TestAConnectionAfterARefusalIsUsableOrSaysSo(t *testing.T) {
	te, g, control := oneGuest(t, say("guest"), func(c *Config) { c.Limits.ControlPatienceMS = -1 })
	closed := g.serve(0, say("soon gone")) + 1
	to := fmt.Sprintf("E2b-Sandbox-Id: %s\r\nE2b-Sandbox-Port: %d\r\n", g.id, closed)
	get := "GET / HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: " + g.id + "\r\nE2b-Sandbox-Port: 49983\r\n\r\n"
	endless := "POST / HTTP/1.1\r\nHost: x\r\n" + to + "Transfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n"
	large := strings.Replace(post("/", to, ""), "Length: 0", "Length: 1000000", 1) + "first"

	control.setAPI(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	for name, first := range map[string]string{
		"a closed port": post("/", to, "{}"), "control away": post("/sandboxes", "", "{}"), "no body": post("/", to, ""),
	} {
		for range 20 {
			statuses, closes := talk(t, te, first, get, first, get)
			if len(statuses) != 4 || statuses[0] != 502 || statuses[1] != 200 || statuses[2] != 502 || statuses[3] != 200 {
				t.Fatalf("%s: %v %v", name, statuses, closes)
			}
		}
	}
	for name, first := range map[string]string{"a body that goes on": endless, "a large body": large} {
		began := time.Now()
		statuses, closes := talk(t, te, first, get)
		if len(statuses) != 1 || statuses[0] != 502 || !closes[0] || time.Since(began) > 3*time.Second {
			t.Fatalf("%s: %v %v after %v", name, statuses, closes, time.Since(began))
		}
	}
}

// The same for an answer of the guest's that comes before it has read the request.
func TestAConnectionAfterAnEarlyAnswerIsUsable(t *testing.T) {
	te, g, _ := oneGuest(t, say("guest"))
	early := g.rawServer(func(conn net.Conn) {
		_, _ = conn.Read(make([]byte, 1000))
		_, _ = io.WriteString(conn, "HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno")
		time.Sleep(time.Second)
	})
	to := fmt.Sprintf("E2b-Sandbox-Id: %s\r\nE2b-Sandbox-Port: %d\r\n", g.id, early)
	get := "GET / HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: " + g.id + "\r\nE2b-Sandbox-Port: 49983\r\n\r\n"
	statuses, closes := talk(t, te, post("/", to, "{}"), get)
	if len(statuses) != 2 || statuses[0] != 403 || statuses[1] != 200 {
		t.Fatalf("%v %v", statuses, closes)
	}
	// Whoever is still sending has its answer at once, too; the connection is of no more use to it.
	endless := "POST / HTTP/1.1\r\nHost: x\r\n" + to + "Transfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n"
	began := time.Now()
	if statuses, closes = talk(t, te, endless); statuses[0] != 403 || time.Since(began) > time.Second {
		t.Fatalf("%v %v after %v", statuses, closes, time.Since(began))
	}
}

// What is left of a small request may come after its answer: it is read, and the connection goes on.
func TestAConnectionIsUsableWhoseRequestEndsAfterItsAnswer(t *testing.T) {
	te, g, _ := oneGuest(t, say("guest"))
	early := g.rawServer(func(conn net.Conn) {
		_, _ = conn.Read(make([]byte, 1000))
		_, _ = io.WriteString(conn, "HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno")
	})
	head := fmt.Sprintf("Host: x\r\nE2b-Sandbox-Id: %s\r\nE2b-Sandbox-Port: %d\r\n", g.id, early)
	get := "GET / HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: " + g.id + "\r\nE2b-Sandbox-Port: 49983\r\n\r\n"
	for range 5 {
		statuses, closes := talk(t, te, "POST / HTTP/1.1\r\n"+head+"Content-Length: 2\r\n\r\n", "{}"+get, get)
		if len(statuses) != 3 || statuses[0] != 403 || statuses[1] != 200 || statuses[2] != 200 {
			t.Fatalf("%v %v", statuses, closes)
		}
	}
	// Of a large one, or one without a known length, nobody knows when it ends: the answer says that it is the last.
	for _, body := range []string{"Content-Length: 1000000\r\n\r\nfirst", "Transfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n"} {
		statuses, closes := talk(t, te, "POST / HTTP/1.1\r\n"+head+body, get)
		if len(statuses) != 1 || statuses[0] != 403 || !closes[0] {
			t.Fatalf("%v %v", statuses, closes)
		}
	}
}

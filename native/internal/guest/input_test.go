package guest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

// streamInput sends messages one by one over a chunked request and returns the answer.
func (b *box) streamInput(messages <-chan any) (messagesBack []json.RawMessage, failure *rpcError) {
	b.t.Helper()
	reader, writer := io.Pipe()
	go func() {
		for message := range messages {
			text, err := json.Marshal(message)
			if err == nil {
				_, err = writer.Write(envelope(0, text))
			}
			if err != nil {
				_ = writer.CloseWithError(err)
				for range messages {
				}
				return
			}
		}
		_ = writer.Close()
	}()
	r := b.request("POST", "/process.Process/StreamInput", reader)
	r.Header.Set("Content-Type", "application/connect+json")
	response, err := b.client.Do(r)
	must(b.t, err)
	defer response.Body.Close()
	if response.StatusCode != 200 {
		b.t.Fatal(response.StatusCode)
	}
	s := &stream{t: b.t, body: response.Body}
	for {
		message, ended, failure := s.next()
		if ended {
			return messagesBack, failure
		}
		messagesBack = append(messagesBack, message)
	}
}

func messages(all ...any) <-chan any {
	c := make(chan any, len(all))
	for _, one := range all {
		c <- one
	}
	close(c)
	return c
}

func stdin(text string) m { return m{"data": m{"input": m{"stdin": []byte(text)}}} }

func TestStreamInputKeepsTheOrder(t *testing.T) {
	b := newBox(t)
	s := b.start(sh("cat"))
	pid := s.started()
	var all []any
	want := ""
	all = append(all, m{"start": m{"process": m{"pid": pid}}}, m{"keepalive": m{}})
	for i := range 500 {
		text := fmt.Sprintf("line %d\n", i)
		all, want = append(all, stdin(text)), want+text
	}
	back, failure := b.streamInput(messages(all...))
	if failure != nil || len(back) != 1 || string(back[0]) != "{}" {
		t.Fatalf("%s %v", back, failure)
	}
	if e := b.unary("process.Process/CloseStdin", m{"process": m{"pid": pid}}, nil); e != nil {
		t.Fatal(e)
	}
	if r := s.rest(); r.out != want {
		t.Fatalf("%d of %d bytes", len(r.out), len(want))
	}
}

func TestStreamInputIsDeliveredAtOnce(t *testing.T) {
	b := newBox(t)
	s := b.start(sh("read a; echo 1 $a; read b; echo 2 $b"))
	pid := s.started()
	feed := make(chan any)
	done := make(chan *rpcError, 1)
	go func() {
		_, failure := b.streamInput(feed)
		done <- failure
	}()
	feed <- m{"start": m{"process": m{"pid": pid}}}
	feed <- stdin("x\n")
	r := &run{}
	s.until(r, func(r *run) bool { return r.out == "1 x\n" })
	feed <- stdin("y\n")
	s.until(r, func(*run) bool { return false })
	close(feed)
	if failure := <-done; failure != nil || r.out != "1 x\n2 y\n" {
		t.Fatalf("%q %v", r.out, failure)
	}
}

func TestStreamInputRefusals(t *testing.T) {
	b := newBox(t)
	s := b.start(sh("sleep 1000"))
	pid := s.started()
	start := m{"start": m{"process": m{"pid": pid}}}
	for name, c := range map[string]struct {
		messages []any
		code     string
	}{
		"unknown process": {[]any{m{"start": m{"process": m{"pid": 1 << 30}}}}, "not_found"},
		"data first":      {[]any{stdin("x")}, "invalid_argument"},
		"terminal":        {[]any{start, m{"data": m{"input": m{"pty": []byte("x")}}}}, "internal"},
		"no input":        {[]any{start, m{"data": m{}}}, "unimplemented"},
		"nothing":         {[]any{start, m{}}, "unimplemented"},
		"no selector":     {[]any{m{"start": m{}}}, "invalid_argument"},
		"not a message":   {[]any{"text"}, "invalid_argument"},
	} {
		if _, failure := b.streamInput(messages(c.messages...)); failure == nil || failure.Code != c.code {
			t.Errorf("%s: %v", name, failure)
		}
	}
	_ = b.unary("process.Process/SendSignal", m{"process": m{"pid": pid}, "signal": "SIGNAL_SIGKILL"}, nil)
}

// A process that does not read its input holds up only the caller, and only as long as the caller waits.
func TestInputToAProcessThatDoesNotRead(t *testing.T) {
	b := newBox(t)
	s := b.start(sh("sleep 1000"))
	pid := s.started()
	send := func(size int, timeout string) *rpcError {
		text, _ := json.Marshal(m{"process": m{"pid": pid}, "input": m{"stdin": bytes.Repeat([]byte("x"), size)}})
		r := b.request("POST", "/process.Process/SendInput", bytes.NewReader(text))
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Connect-Timeout-Ms", timeout)
		status, body := b.do(r)
		if status == http.StatusOK {
			return nil
		}
		e := &rpcError{Status: status}
		decode(t, []byte(body), e)
		return e
	}
	for range 2 {
		if e := send(1<<20, "200"); e == nil || e.Code != "internal" || !strings.Contains(e.Message, "deadline exceeded") {
			t.Fatal(e)
		}
	}
	if e := b.unary("process.Process/CloseStdin", m{"process": m{"pid": pid}}, nil); e != nil {
		t.Fatal(e)
	}
	if e := b.unary("process.Process/SendSignal", m{"process": m{"pid": pid}, "signal": "SIGNAL_SIGKILL"}, nil); e != nil {
		t.Fatal(e)
	}
	if r := s.rest(); r.end == nil {
		t.Fatalf("%+v", r)
	}
}

func TestInputAfterTheReaderHasGone(t *testing.T) {
	b := newBox(t)
	s := b.start(sh("exec <&-; echo closed; sleep 1000"))
	r := &run{}
	s.until(r, func(r *run) bool { return r.out == "closed\n" })
	e := b.unary("process.Process/SendInput", m{"process": m{"pid": r.pid}, "input": m{"stdin": []byte("x")}}, nil)
	if e == nil || e.Code != "internal" || !strings.Contains(e.Message, "broken pipe") {
		t.Fatal(e)
	}
	_ = b.unary("process.Process/SendSignal", m{"process": m{"pid": r.pid}, "signal": "SIGNAL_SIGKILL"}, nil)
}

func TestProtocolErrors(t *testing.T) {
	b := newBox(t)
	post := func(method, contentType string, body []byte) (int, string, http.Header) {
		r := b.request("POST", "/"+method, bytes.NewReader(body))
		r.Header.Set("Content-Type", contentType)
		response, err := b.client.Do(r)
		must(t, err)
		defer response.Body.Close()
		text, _ := io.ReadAll(response.Body)
		return response.StatusCode, string(text), response.Header
	}
	if status, _, h := post("process.Process/List", "application/proto", nil); status != 415 || h.Get("Accept-Post") != "application/json" {
		t.Fatalf("%d %v", status, h)
	}
	if status, _, h := post("process.Process/Start", "application/json", nil); status != 415 || h.Get("Accept-Post") != "application/connect+json" {
		t.Fatalf("%d %v", status, h)
	}
	if status, body, _ := post("process.Process/List", "application/json; charset=utf-8", nil); status != 200 || body != `{"processes":[]}` {
		t.Fatalf("%d %s", status, body)
	}
	if status, body, _ := post("process.Process/List", "application/json", []byte("{")); status != 400 || !strings.Contains(body, `"code":"invalid_argument"`) {
		t.Fatalf("%d %s", status, body)
	}
	if status, body, _ := post("process.Process/List", "application/json", bytes.Repeat([]byte(" "), 5<<20)); status != 429 || !strings.Contains(body, `"code":"resource_exhausted"`) {
		t.Fatalf("%d %s", status, body)
	}
	good := envelope(0, []byte(`{"process":{"cmd":"/bin/true"}}`))
	for name, c := range map[string]struct {
		body []byte
		code string
	}{
		"nothing":    {nil, "invalid_argument"},
		"cut header": {good[:3], "invalid_argument"},
		"cut body":   {good[:20], "invalid_argument"},
		"twice":      {append(append([]byte{}, good...), good...), "invalid_argument"},
		"compressed": {envelope(1, []byte("x")), "internal"},
		"flags":      {envelope(0x80, []byte("{}")), "internal"},
		"not JSON":   {envelope(0, []byte("x")), "invalid_argument"},
		"huge":       {[]byte{0, 0xff, 0xff, 0xff, 0xff, 1}, "resource_exhausted"},
	} {
		status, body, h := post("process.Process/Start", "application/connect+json", c.body)
		if status != 200 || h.Get("Content-Type") != "application/connect+json" || body[0] != 2 || !strings.Contains(body, `"code":"`+c.code+`"`) {
			t.Errorf("%s: %d %q", name, status, body)
		}
	}
}

// One subscriber that takes nothing neither stops the process nor the others for good.
func TestStuckSubscriberIsCutOff(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for the 20 s after which a subscriber counts as stuck; run without -short")
	}
	b := newBox(t)
	stuck := b.start(sh("read go; head -c 60000000 /dev/zero; echo; echo end"))
	pid := stuck.started()
	good := b.open("process.Process/Connect", m{"process": m{"pid": pid}})
	if e := b.unary("process.Process/SendInput", m{"process": m{"pid": pid}, "input": m{"stdin": []byte("\n")}}, nil); e != nil {
		t.Fatal(e)
	}
	began := time.Now()
	got := 0
	for {
		e, ended, failure := good.event()
		if ended {
			t.Fatalf("%d bytes, then %v", got, failure)
		}
		if e.Event.Data != nil {
			got += len(e.Event.Data.Stdout)
		}
		if e.Event.End != nil {
			break
		}
	}
	if got != 60000005 {
		t.Fatalf("%d bytes", got)
	}
	t.Logf("the other subscriber was held up for %s", time.Since(began))
	for {
		_, ended, failure, err := stuck.read()
		if err != nil {
			return // the connection was cut, as it must be when it takes nothing
		}
		if ended {
			t.Fatalf("the stuck stream ended well: %v", failure)
		}
	}
}

func TestStreamInputEndsAtItsDeadline(t *testing.T) {
	b := newBox(t)
	s := b.start(sh("cat"))
	pid := s.started()
	b.headers.Set("Connect-Timeout-Ms", "400")
	feed := make(chan any)
	defer close(feed)
	go func() { feed <- m{"start": m{"process": m{"pid": pid}}} }()
	if _, failure := b.streamInput(feed); failure == nil || failure.Code != "deadline_exceeded" {
		t.Fatal(failure)
	}
	b.headers.Del("Connect-Timeout-Ms")
	// The process is not touched by it.
	if e := b.unary("process.Process/CloseStdin", m{"process": m{"pid": pid}}, nil); e != nil {
		t.Fatal(e)
	}
	if r := s.rest(); r.end == nil || r.end.ExitCode != 0 {
		t.Fatalf("%+v", r)
	}
}

// Writers take turns: what one caller sends arrives in one piece, and a caller that gave up spoils nothing.
func TestManyWriters(t *testing.T) {
	b := newBox(t)
	s := b.start(sh("until test -e go; do sleep 0.05; done; cat"))
	pid := s.started()
	text, _ := json.Marshal(m{"process": m{"pid": pid}, "input": m{"stdin": bytes.Repeat([]byte("-"), 1<<20)}})
	r := b.request("POST", "/process.Process/SendInput", bytes.NewReader(text))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Connect-Timeout-Ms", "100")
	if status, _ := b.do(r); status == http.StatusOK {
		t.Fatal("a megabyte went into a pipe that nobody reads")
	}
	must(t, os.WriteFile(b.home+"/go", nil, 0o644))
	failures := make(chan *rpcError, 20)
	for i := range 20 {
		go func() {
			line := strings.Repeat(string(rune('a'+i)), 100_000) + "\n"
			failures <- b.unary("process.Process/SendInput", m{"process": m{"pid": pid}, "input": m{"stdin": []byte(line)}}, nil)
		}()
	}
	for range 20 {
		if e := <-failures; e != nil {
			t.Error(e)
		}
	}
	if e := b.unary("process.Process/CloseStdin", m{"process": m{"pid": pid}}, nil); e != nil {
		t.Fatal(e)
	}
	for line := range strings.Lines(strings.TrimLeft(s.rest().out, "-")) {
		if strings.Trim(line, line[:1]) != "\n" || len(line) != 100_001 {
			t.Fatalf("%d bytes of several writers", len(line))
		}
	}
}

package guest

import (
	"strings"
	"testing"
	"time"
)

func (b *box) terminal(script string, cols, rows int) *stream {
	b.t.Helper()
	request := sh(script)
	request["pty"] = m{"size": m{"cols": cols, "rows": rows}}
	return b.start(request)
}

func TestTerminal(t *testing.T) {
	b := newBox(t)
	s := b.terminal("stty -echo; stty size; tty; read line; stty size; echo got $line; test -t 0 && test -t 2 && echo yes", 90, 30)
	pid := s.started()
	who := m{"pid": pid}
	r := &run{}
	s.until(r, func(r *run) bool { return strings.Contains(r.pty, "/dev/pts/") })
	if !strings.HasPrefix(r.pty, "30 90\r\n") {
		t.Fatalf("%q", r.pty)
	}
	if e := b.unary("process.Process/Update", m{"process": who, "pty": m{"size": m{"cols": 132, "rows": 43}}}, nil); e != nil {
		t.Fatal(e)
	}
	if e := b.unary("process.Process/SendInput", m{"process": who, "input": m{"stdin": []byte("x")}}, nil); e == nil || e.Code != "internal" {
		t.Fatal(e)
	}
	if e := b.unary("process.Process/CloseStdin", m{"process": who}, nil); e == nil || !strings.Contains(e.Message, "Ctrl+D") {
		t.Fatal(e)
	}
	if e := b.unary("process.Process/SendInput", m{"process": who, "input": m{"pty": []byte("hello\n")}}, nil); e != nil {
		t.Fatal(e)
	}
	s.until(r, func(*run) bool { return false })
	if !strings.HasSuffix(r.pty, "43 132\r\ngot hello\r\nyes\r\n") || r.end == nil || r.end.ExitCode != 0 {
		t.Fatalf("%q %+v", r.pty, r.end)
	}
	if r.out != "" || r.err != "" {
		t.Fatalf("%+v", r)
	}
}

func TestControlDEndsATerminal(t *testing.T) {
	b := newBox(t)
	s := b.terminal("cat", 80, 24)
	pid := s.started()
	for _, text := range []string{"line\n", "\x04"} {
		if e := b.unary("process.Process/SendInput", m{"process": m{"pid": pid}, "input": m{"pty": []byte(text)}}, nil); e != nil {
			t.Fatal(e)
		}
	}
	if r := s.rest(); r.pty != "line\r\nline\r\n" || r.end.ExitCode != 0 {
		t.Fatalf("%q %+v", r.pty, r.end)
	}
}

func TestControlCInterruptsTheForeground(t *testing.T) {
	b := newBox(t)
	s := b.terminal("sleep 1000; echo interrupted $?", 80, 24)
	pid := s.started()
	time.Sleep(300 * time.Millisecond) // the shell must have started sleep
	if e := b.unary("process.Process/SendInput", m{"process": m{"pid": pid}, "input": m{"pty": []byte("\x03")}}, nil); e != nil {
		t.Fatal(e)
	}
	if r := s.rest(); r.end == nil || (r.end.Status != "signal: interrupt" && !strings.Contains(r.pty, "interrupted 130")) {
		t.Fatalf("%q %+v", r.pty, r.end)
	}
}

func TestKillingATerminal(t *testing.T) {
	b := newBox(t)
	s := b.terminal("sleep 1000 & sleep 1000", 80, 24)
	pid := s.started()
	if e := b.unary("process.Process/SendSignal", m{"process": m{"pid": pid}, "signal": "SIGNAL_SIGKILL"}, nil); e != nil {
		t.Fatal(e)
	}
	if r := s.rest(); r.end == nil || r.end.Status != "signal: killed" {
		t.Fatalf("%+v", r.end)
	}
}

func TestUpdateWithoutATerminal(t *testing.T) {
	b := newBox(t)
	s := b.start(sh("sleep 1000"))
	pid := s.started()
	e := b.unary("process.Process/Update", m{"process": m{"pid": pid}, "pty": m{"size": m{"cols": 1, "rows": 1}}}, nil)
	if e == nil || e.Code != "internal" || e.Message != "error resizing tty: tty not assigned to process" {
		t.Fatal(e)
	}
	_ = b.unary("process.Process/SendSignal", m{"process": m{"pid": pid}, "signal": "SIGNAL_SIGKILL"}, nil)
}

// A program often closes its files a moment before it exits (cat does): nobody hangs up on it in that moment.
func TestATerminalIsKeptUntilItsProgramHasExited(t *testing.T) {
	b := newBox(t)
	s := b.terminal("exec 0<&- 1>&- 2>&-; sleep 0.3; exit 7", 80, 24)
	s.started()
	if r := s.rest(); r.end == nil || r.end.ExitCode != 7 {
		t.Fatalf("%+v", r.end)
	}
}

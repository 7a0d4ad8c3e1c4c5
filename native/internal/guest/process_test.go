package guest

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

type m = map[string]any

type processEvent struct {
	Event struct {
		Start *struct {
			PID int `json:"pid"`
		} `json:"start"`
		Data *struct {
			Stdout []byte `json:"stdout"`
			Stderr []byte `json:"stderr"`
			Pty    []byte `json:"pty"`
		} `json:"data"`
		End       *processEnd `json:"end"`
		Keepalive *struct{}   `json:"keepalive"`
	} `json:"event"`
}

type processEnd struct {
	ExitCode int     `json:"exitCode"`
	Exited   bool    `json:"exited"`
	Status   string  `json:"status"`
	Error    *string `json:"error"`
}

// run is what came out of one process stream.
type run struct {
	pid        int
	out        string
	err        string
	pty        string
	keepalives int
	end        *processEnd
	failure    *rpcError
}

func (s *stream) event() (e processEvent, ended bool, failure *rpcError) {
	s.t.Helper()
	message, ended, failure := s.next()
	if !ended {
		must(s.t, json.Unmarshal(message, &e))
	}
	return e, ended, failure
}

// started reads the start event, which is always first.
func (s *stream) started() int {
	s.t.Helper()
	e, ended, failure := s.event()
	if ended || e.Event.Start == nil {
		s.t.Fatalf("no start event but %+v %v", e.Event, failure)
	}
	return e.Event.Start.PID
}

// until reads on until enough says so or the stream ends.
func (s *stream) until(r *run, enough func(*run) bool) {
	s.t.Helper()
	for !enough(r) {
		e, ended, failure := s.event()
		if ended {
			r.failure = failure
			return
		}
		if r.end != nil {
			s.t.Fatalf("an event after the end: %+v", e.Event)
		}
		switch {
		case e.Event.Start != nil:
			r.pid = e.Event.Start.PID
		case e.Event.Data != nil:
			r.out += string(e.Event.Data.Stdout)
			r.err += string(e.Event.Data.Stderr)
			r.pty += string(e.Event.Data.Pty)
		case e.Event.Keepalive != nil:
			r.keepalives++
		case e.Event.End != nil:
			r.end = e.Event.End
		}
	}
}

func (s *stream) rest() *run {
	s.t.Helper()
	r := &run{}
	s.until(r, func(*run) bool { return false })
	return r
}

func sh(script string) m {
	return m{"process": m{"cmd": "/bin/sh", "args": []string{"-c", script}}}
}

func (b *box) start(request m, headers ...string) *stream {
	b.t.Helper()
	return b.open("process.Process/Start", request, headers...)
}

func (b *box) sh(script string) *run {
	b.t.Helper()
	return b.start(sh(script)).rest()
}

func TestStartGivesOutputThenEnd(t *testing.T) {
	b := newBox(t)
	r := b.sh("echo out; echo err >&2; exit 7")
	if r.out != "out\n" || r.err != "err\n" || r.pid == 0 || r.failure != nil {
		t.Fatalf("%+v", r)
	}
	if r.end == nil || r.end.ExitCode != 7 || !r.end.Exited || r.end.Status != "exit status 7" || *r.end.Error != "exit status 7" {
		t.Fatalf("%+v", r.end)
	}
	r = b.sh("exit 0")
	if r.end.ExitCode != 0 || r.end.Status != "exit status 0" || r.end.Error != nil {
		t.Fatalf("%+v", r.end)
	}
}

func TestProcessRunsAsTheUserWithGroupsAndEnvironment(t *testing.T) {
	b := newBox(t)
	t.Setenv("PATH", "/usr/bin:/bin")
	request := m{"process": m{"cmd": "sh", "args": []string{"-c", "id -u; id -g; id -G; pwd; env; umask; cat /proc/self/oom_score_adj"},
		"envs": m{"BOTH": "request", "ONLY": "a=b"}}}
	r := b.start(request).rest()
	lines := strings.Split(r.out, "\n")
	if lines[0] != fmt.Sprint(userUID) || lines[1] != fmt.Sprint(userGID) || lines[2] != fmt.Sprintf("%d %d %d", userGID, extra1, extra2) {
		t.Fatalf("ids: %q", lines[:3])
	}
	if lines[3] != b.home {
		t.Fatalf("cwd %q", lines[3])
	}
	for _, want := range []string{"PATH=/usr/bin:/bin", "HOME=" + b.home, "USER=user", "LOGNAME=user", "FROM_INIT=yes", "BOTH=request", "ONLY=a=b"} {
		if !strings.Contains(r.out, "\n"+want+"\n") {
			t.Errorf("%s is missing in %s", want, r.out)
		}
	}
	if strings.Contains(r.out, "BOTH=init") || strings.Contains(r.out, "ATOLL") {
		t.Errorf("environment: %s", r.out)
	}
	r = b.start(sh("id -u; echo $HOME"), "Authorization", basic("root")).rest()
	if r.out != "0\n"+filepath.Join(b.root, "root")+"\n" {
		t.Fatalf("%+v", r)
	}
}

func TestStartRefusals(t *testing.T) {
	b := newBox(t)
	must(t, os.WriteFile(b.home+"/plain", nil, 0o644))
	for name, c := range map[string]struct {
		request m
		user    string
		code    string
		message string
	}{
		"cwd":      {m{"process": m{"cmd": "/bin/true", "cwd": "/no/such"}}, "", "invalid_argument", "cwd '/no/such' does not exist"},
		"cwd file": {m{"process": m{"cmd": "/bin/true", "cwd": "plain"}}, "", "invalid_argument", "cwd '" + b.home + "/plain' is not a directory"},
		"user":     {sh("true"), "ghost", "unauthenticated", "invalid username: 'ghost'"},
		"binary":   {m{"process": m{"cmd": "no-such-binary"}}, "", "invalid_argument", "executable file not found in $PATH"},
		"path":     {m{"process": m{"cmd": "/no/binary"}}, "", "invalid_argument", "no such file or directory"},
		"no exec":  {m{"process": m{"cmd": "/etc/passwd"}}, "", "invalid_argument", "permission denied"},
		"nothing":  {m{}, "", "invalid_argument", "no command"},
		"tag":      {m{"process": m{"cmd": "/bin/true"}, "tag": "_system"}, "", "invalid_argument", "tag '_system' is reserved"},
		"env":      {m{"process": m{"cmd": "/bin/true", "envs": m{"A=B": "c"}}}, "", "invalid_argument", "invalid environment variable"},
	} {
		var headers []string
		if c.user != "" {
			headers = []string{"Authorization", basic(c.user)}
		}
		_, ended, failure := b.start(c.request, headers...).next()
		if !ended || failure == nil || failure.Code != c.code || !strings.Contains(failure.Message, c.message) {
			t.Errorf("%s: ended %v, %v", name, ended, failure)
		}
	}
	_, ended, failure := b.start(sh("true"), "Connect-Timeout-Ms", "soon").next()
	if !ended || failure.Code != "invalid_argument" {
		t.Errorf("timeout: %v", failure)
	}
}

func TestStdinUntilItIsClosed(t *testing.T) {
	b := newBox(t)
	s := b.start(sh("cat; echo bye"))
	pid := s.started()
	who := m{"pid": pid}
	for _, text := range []string{"one\n", "two\n"} {
		if e := b.unary("process.Process/SendInput", m{"process": who, "input": m{"stdin": []byte(text)}}, nil); e != nil {
			t.Fatal(e)
		}
	}
	if e := b.unary("process.Process/SendInput", m{"process": who, "input": m{"pty": []byte("x")}}, nil); e == nil || e.Code != "internal" {
		t.Fatalf("pty input to a pipe: %v", e)
	}
	r := &run{}
	s.until(r, func(r *run) bool { return r.out == "one\ntwo\n" })
	if e := b.unary("process.Process/CloseStdin", m{"process": who}, nil); e != nil {
		t.Fatal(e)
	}
	// From here on it may have ended, and be known no more.
	if e := b.unary("process.Process/CloseStdin", m{"process": who}, nil); e != nil && e.Code != "not_found" {
		t.Fatal(e)
	}
	e := b.unary("process.Process/SendInput", m{"process": who, "input": m{"stdin": []byte("late")}}, nil)
	if e == nil || (e.Code != "internal" && e.Code != "not_found") {
		t.Fatalf("closed stdin: %v", e)
	}
	s.until(r, func(*run) bool { return false })
	if r.out != "one\ntwo\nbye\n" || r.end.ExitCode != 0 {
		t.Fatalf("%+v", r)
	}
}

func TestStdinFalseIsNull(t *testing.T) {
	b := newBox(t)
	request := sh("readlink /proc/self/fd/0; cat")
	request["stdin"] = false
	s := b.start(request)
	r := s.rest()
	if r.out != "/dev/null\n" || r.end.ExitCode != 0 {
		t.Fatalf("%+v", r)
	}
}

func TestSignals(t *testing.T) {
	b := newBox(t)
	for signal, status := range map[string]string{"SIGNAL_SIGKILL": "signal: killed", "SIGNAL_SIGTERM": "signal: terminated"} {
		s := b.start(m{"process": m{"cmd": "/bin/sleep", "args": []string{"1000"}}})
		pid := s.started()
		if e := b.unary("process.Process/SendSignal", m{"process": m{"pid": pid}, "signal": signal}, nil); e != nil {
			t.Fatal(e)
		}
		r := s.rest()
		if r.end.Status != status || r.end.ExitCode != -1 || r.end.Exited || *r.end.Error != status {
			t.Fatalf("%+v", r.end)
		}
		e := b.unary("process.Process/SendSignal", m{"process": m{"pid": pid}, "signal": signal}, nil)
		if e == nil || e.Code != "not_found" || e.Message != fmt.Sprintf("process with pid %d not found", pid) || e.Status != 404 {
			t.Fatalf("second signal: %v", e)
		}
	}
	s := b.start(sh("sleep 1000"))
	pid := s.started()
	for _, signal := range []any{"SIGNAL_UNSPECIFIED", "SIGNAL_SIGHUP", 0, nil} {
		if e := b.unary("process.Process/SendSignal", m{"process": m{"pid": pid}, "signal": signal}, nil); e == nil || e.Code != "unimplemented" {
			t.Errorf("%v: %v", signal, e)
		}
	}
	if e := b.unary("process.Process/SendSignal", m{"process": m{"pid": pid}, "signal": 9}, nil); e != nil {
		t.Fatal(e)
	}
}

func TestDeadlineKillsTheWholeGroup(t *testing.T) {
	b := newBox(t)
	s := b.start(sh("sleep 987654 & echo $!; sleep 987655"), "Connect-Timeout-Ms", "400")
	r := s.rest()
	if r.failure == nil || r.failure.Code != "deadline_exceeded" || r.end != nil {
		t.Fatalf("%+v %v", r, r.failure)
	}
	var child int
	if _, err := fmt.Sscan(r.out, &child); err != nil {
		t.Fatal(err)
	}
	for _, pid := range []int{r.pid, child} {
		eventually(t, "the group is dead", func() bool { return !alive(pid) })
	}
}

// alive says whether pid runs; a zombie does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

func TestClientLeavingDoesNotKill(t *testing.T) {
	b := newBox(t)
	s := b.start(sh("sleep 0.3; echo done > "+b.home+"/done"), "Connect-Timeout-Ms", "20000")
	s.started()
	s.close()
	eventually(t, "the process went on", func() bool {
		_, err := os.Stat(b.home + "/done")
		return err == nil
	})
}

func TestSeveralSubscribersAndTheEndAfterTheEnd(t *testing.T) {
	b := newBox(t)
	request := sh("read line; echo $line; exit 3")
	request["tag"] = "mine"
	first := b.start(request)
	pid := first.started()
	second := b.open("process.Process/Connect", m{"process": m{"tag": "mine"}})
	third := b.open("process.Process/Connect", m{"process": m{"pid": pid}})
	if second.started() != pid || third.started() != pid {
		t.Fatal("another pid")
	}
	if e := b.unary("process.Process/SendInput", m{"process": m{"tag": "mine"}, "input": m{"stdin": []byte("hello\n")}}, nil); e != nil {
		t.Fatal(e)
	}
	for _, s := range []*stream{first, second, third} {
		if r := s.rest(); r.out != "hello\n" || r.end.ExitCode != 3 || r.failure != nil {
			t.Fatalf("%+v", r)
		}
	}
	for _, which := range []m{{"tag": "mine"}, {"pid": pid}} {
		r := b.open("process.Process/Connect", m{"process": which}).rest()
		if r.pid != pid || r.out != "" || r.end == nil || r.end.ExitCode != 3 {
			t.Fatalf("after the end: %+v", r)
		}
	}
	var list struct{ Processes []m }
	if e := b.unary("process.Process/List", m{}, &list); e != nil || len(list.Processes) != 0 {
		t.Fatalf("list: %v %v", list, e)
	}
}

func TestList(t *testing.T) {
	b := newBox(t)
	var list struct {
		Processes []struct {
			Config struct {
				Cmd  string
				Args []string
				Envs map[string]string
				Cwd  string
			}
			PID int
			Tag string
		}
	}
	s := b.start(m{"process": m{"cmd": "sleep", "args": []string{"100"}, "cwd": "/", "envs": m{"A": "1"}}, "tag": "t"})
	pid := s.started()
	if e := b.unary("process.Process/List", m{}, &list); e != nil {
		t.Fatal(e)
	}
	if len(list.Processes) != 1 {
		t.Fatalf("%+v", list)
	}
	p := list.Processes[0]
	if p.PID != pid || p.Tag != "t" || p.Config.Cmd != "sleep" || p.Config.Args[0] != "100" || p.Config.Cwd != "/" || p.Config.Envs["A"] != "1" {
		t.Fatalf("%+v", p)
	}
	must(t, syscall.Kill(pid, syscall.SIGKILL))
	s.rest()
}

func TestOutputWithoutSubscriberDoesNotBlock(t *testing.T) {
	b := newBox(t)
	s := b.start(sh("head -c 20000000 /dev/zero; touch " + b.home + "/wrote; sleep 1000"))
	pid := s.started()
	s.close()
	eventually(t, "the output was dropped", func() bool {
		_, err := os.Stat(b.home + "/wrote")
		return err == nil
	})
	_ = b.unary("process.Process/SendSignal", m{"process": m{"pid": pid}, "signal": "SIGNAL_SIGKILL"}, nil)
}

func TestOutputIsWhole(t *testing.T) {
	b := newBox(t)
	r := b.sh("seq 1 300000; seq 1 1000 >&2")
	if len(r.out) != 1988895 || !strings.HasSuffix(r.out, "\n300000\n") || len(r.err) != 3893 || r.end.ExitCode != 0 {
		t.Fatalf("%d bytes, %d bytes, %+v", len(r.out), len(r.err), r.end)
	}
}

func TestDescendantHoldingTheOutput(t *testing.T) {
	b := newBox(t)
	began := time.Now()
	// It writes after the end was told: it must not die of that.
	r := b.sh("(sleep 4; echo late; echo alive > " + b.home + "/alive) & echo now")
	if r.out != "now\n" || r.end == nil || r.end.ExitCode != 0 {
		t.Fatalf("%+v", r)
	}
	if took := time.Since(began); took > 3900*time.Millisecond {
		t.Fatalf("the end came after %s", took)
	}
	eventually(t, "the descendant lives on", func() bool {
		_, err := os.Stat(b.home + "/alive")
		return err == nil
	})
}

func TestKeepalive(t *testing.T) {
	b := newBox(t)
	s := b.start(sh("sleep 1000"), "Keepalive-Ping-Interval", "1")
	r := &run{}
	s.until(r, func(r *run) bool { return r.keepalives == 2 })
	_ = b.unary("process.Process/SendSignal", m{"process": m{"pid": r.pid}, "signal": "SIGNAL_SIGKILL"}, nil)
	s.until(r, func(*run) bool { return false })
	if r.end == nil {
		t.Fatalf("%+v", r)
	}
}

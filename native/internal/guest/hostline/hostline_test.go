package hostline

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

type machine struct {
	did     []string
	entropy []byte
	who     []byte
	now     int64
	fails   error
}

func (m *machine) Rest(sync bool) error {
	m.did = append(m.did, map[bool]string{true: "rest and sync", false: "rest"}[sync])
	return m.fails
}

func (m *machine) Wake(to Awakening) error {
	m.did, m.now, m.entropy, m.who = append(m.did, map[bool]string{true: "cut and wake", false: "wake"}[to.Cut]), to.UnixNano, to.Entropy, to.Placement
	return m.fails
}

func (m *machine) End() error {
	m.did = append(m.did, "end")
	return m.fails
}

// talk has the questions answered, one reply for each.
func talk(t *testing.T, m Machine, questions string) []reply {
	t.Helper()
	var out bytes.Buffer
	line := struct {
		io.Reader
		io.Writer
	}{strings.NewReader(questions), &out}
	if err := Serve(line, m); err != nil {
		t.Fatal(err)
	}
	var replies []reply
	for text := range strings.Lines(out.String()) {
		var r reply
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			t.Fatal(err)
		}
		replies = append(replies, r)
	}
	return replies
}

func TestEachQuestionHasItsAnswer(t *testing.T) {
	m := &machine{}
	replies := talk(t, m, `{"id":1,"do":"rest"}
{"id":2,"do":"rest","sync":true}

{"id":3,"do":"wake","time_unix_ns":"1700000000000000000","entropy":"c2VlZA==","placement":{"nonce":"n"},"cut":true}
{"id":4,"do":"end"}
`)
	if len(replies) != 4 {
		t.Fatalf("%+v", replies)
	}
	for i, r := range replies {
		if r.ID != int64(i+1) || !r.OK || r.Error != "" {
			t.Errorf("%+v", r)
		}
	}
	if got := strings.Join(m.did, ", "); got != "rest, rest and sync, cut and wake, end" {
		t.Error(got)
	}
	if m.now != 1700000000000000000 || string(m.entropy) != "seed" || string(m.who) != `{"nonce":"n"}` {
		t.Errorf("%d %q %q", m.now, m.entropy, m.who)
	}
}

func TestWhatIsRefusedIsTold(t *testing.T) {
	replies := talk(t, &machine{fails: errors.New("stuck")}, `{"id":7,"do":"rest"}`+"\n")
	if len(replies) != 1 || replies[0].OK || replies[0].ID != 7 || replies[0].Error != "stuck" {
		t.Fatalf("%+v", replies)
	}
}

func TestNonsenseDoesNothing(t *testing.T) {
	m := &machine{}
	replies := talk(t, m, "nonsense\n"+`{"id":1,"do":"format"}`+"\n"+`{"id":2,"do":"wake","entropy":"?"}`+"\n"+
		`{"id":3,"do":"wake","time_unix_ns":"noon"}`+"\n")
	if len(replies) != 4 || len(m.did) != 0 {
		t.Fatalf("%+v %v", replies, m.did)
	}
	for _, r := range replies {
		if r.OK || r.Error == "" {
			t.Errorf("%+v", r)
		}
	}
}

func TestALineThatNeverEndsIsGivenUp(t *testing.T) {
	line := struct {
		io.Reader
		io.Writer
	}{strings.NewReader(strings.Repeat("x", 2*lineMax)), io.Discard}
	if err := Serve(line, &machine{}); err == nil {
		t.Fatal("it was read to its end")
	}
}

func TestTheLineIsFoundByItsName(t *testing.T) {
	sys, dev := t.TempDir(), t.TempDir()
	for port, name := range map[string]string{"vport0p1": "other", "vport0p2": PortName} {
		dir := filepath.Join(sys, "class/virtio-ports", port)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for path, content := range map[string]string{filepath.Join(dir, "name"): name + "\n", filepath.Join(dev, port): name} {
			if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	line, err := Open(sys, dev)
	if err != nil {
		t.Fatal(err)
	}
	defer line.Close()
	if content, err := io.ReadAll(line); err != nil || string(content) != PortName {
		t.Fatalf("%q %v", content, err)
	}
	if _, err := Open(t.TempDir(), dev); !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
}

func FuzzAsk(f *testing.F) {
	f.Add([]byte(`{"id":1,"do":"rest"}`))
	f.Add([]byte(`{"id":1,"do":"wake","entropy":"!"}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		if r := ask(text, &machine{}); r.OK == (r.Error != "") {
			t.Fatalf("%+v", r)
		}
	})
}

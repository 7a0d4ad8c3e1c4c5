package rpc

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

func FuzzReader(f *testing.F) {
	f.Add(AppendFrame(AppendFrame(nil, 0, []byte(`{"a":1}`)), 0, nil))
	f.Add(AppendFrame(nil, 2, []byte("{}")))
	f.Add([]byte{0, 0xff, 0xff, 0xff, 0xff})
	f.Add([]byte{1, 0, 0})
	f.Fuzz(func(t *testing.T, stream []byte) {
		reader := NewReader(bytes.NewReader(stream), 1<<10)
		read := 0
		for {
			body, err := reader.Next()
			if err == io.EOF {
				return
			}
			if err != nil {
				var coded *Error
				if !errors.As(err, &coded) {
					t.Fatalf("an error without a code: %v", err)
				}
				return
			}
			read += headerBytes + len(body)
			if len(body) > 1<<10 || read > len(stream) || !bytes.Equal(body, stream[read-len(body):read]) {
				t.Fatalf("%q of %q", body, stream)
			}
		}
	})
}

func FuzzValues(f *testing.F) {
	f.Add([]byte(`{"b":"aGk=","u":"7","s":1.0}`))
	f.Add([]byte(`{"b":"_-8","u":4294967295}`))
	f.Add([]byte(`{"b":null,"u":null}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var message struct {
			B Bytes
			U Uint32
		}
		if Decode(text, &message) != nil {
			return
		}
		again, err := Encode(message)
		if err != nil {
			t.Fatal(err)
		}
		back := message
		if err := Decode(again, &back); err != nil || !bytes.Equal(back.B, message.B) || back.U != message.U {
			t.Fatalf("%s: %v", again, err)
		}
	})
}

func TestValues(t *testing.T) {
	for text, want := range map[string]string{`"aGk="`: "hi", `"aGk"`: "hi", `"_-8="`: "\xff\xef", `"/+8"`: "\xff\xef", `""`: "", `null`: ""} {
		var b Bytes
		if err := json.Unmarshal([]byte(text), &b); err != nil || string(b) != want {
			t.Errorf("%s: %q %v", text, b, err)
		}
	}
	for text, want := range map[string]Uint32{`7`: 7, `"7"`: 7, `7.0`: 7, `1e3`: 1000, `4294967295`: 1<<32 - 1} {
		var u Uint32
		if err := json.Unmarshal([]byte(text), &u); err != nil || u != want {
			t.Errorf("%s: %d %v", text, u, err)
		}
	}
	for _, text := range []string{`-1`, `1.5`, `4294967296`, `"x"`, `{}`} {
		var u Uint32
		if err := json.Unmarshal([]byte(text), &u); err == nil {
			t.Errorf("%s: %d", text, u)
		}
	}
	if text, _ := Encode(struct{ I Int64 }{1 << 60}); string(text) != `{"I":"1152921504606846976"}` {
		t.Fatalf("%s", text)
	}
	if text, _ := Encode("<&>"); string(text) != `"<&>"` {
		t.Fatalf("%s", text)
	}
}

func TestHeaders(t *testing.T) {
	for text, want := range map[string]time.Duration{"": 0, "0": 0, "1500": 1500 * time.Millisecond, "9999999999": 9999999999 * time.Millisecond} {
		if got, err := Timeout(http.Header{"Connect-Timeout-Ms": {text}}); err != nil || got != want {
			t.Errorf("%q: %s %v", text, got, err)
		}
	}
	for _, text := range []string{"-1", "1s", "99999999999", "1.5"} {
		if _, err := Timeout(http.Header{"Connect-Timeout-Ms": {text}}); AsError(err).Code != InvalidArgument {
			t.Errorf("%q: %v", text, err)
		}
	}
	for text, want := range map[string]time.Duration{"": 90, "50": 50, "0": 90, "-5": 90, "x": 90, "999999": 90} {
		if got := Keepalive(http.Header{"Keepalive-Ping-Interval": {text}}); got != want*time.Second {
			t.Errorf("%q: %s", text, got)
		}
	}
}

func TestEveryCodeHasAStatus(t *testing.T) {
	for code, status := range statuses {
		if status < 400 || strings.ToLower(string(code)) != string(code) {
			t.Errorf("%s: %d", code, status)
		}
	}
	if e := AsError(io.ErrUnexpectedEOF); e.Code != Unknown || e.Message == "" {
		t.Fatal(e)
	}
}

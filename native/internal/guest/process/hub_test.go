package process

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestTheEndOfTheOutputIsKept(t *testing.T) {
	h := newHub()
	h.publish("stdout", []byte("nobody keeps this"))
	if last := h.lastWords(0); last != "" {
		t.Fatalf("kept: %q", last)
	}
	h.keeps = true
	for range 100 {
		h.publish("stdout", []byte("0123456789\n"))
	}
	h.publish("stderr", append([]byte{0xff}, " the end\n"...))
	h.finish()
	last := h.lastWords(time.Hour)
	if len(last) > lastBytes+2 || !strings.HasSuffix(last, "789\n\ufffd the end") {
		t.Fatalf("%d bytes: %q", len(last), last)
	}
	h.publish("stdout", bytes.Repeat([]byte("x"), 10*lastBytes))
	if last := h.lastWords(0); last != strings.Repeat("x", lastBytes) {
		t.Fatalf("a large chunk: %d", len(last))
	}
}

func TestFramesAreEnvelopes(t *testing.T) {
	chunk := []byte("a\xff\x00b\"\\")
	f := dataFrame("stderr", chunk)
	if f.bytes[0] != 0 || int(binary.BigEndian.Uint32(f.bytes[1:])) != len(f.bytes)-5 {
		t.Fatalf("%q", f.bytes)
	}
	var message struct {
		Event struct{ Data map[string][]byte }
	}
	if err := json.Unmarshal(f.bytes[5:], &message); err != nil || !bytes.Equal(message.Event.Data["stderr"], chunk) {
		t.Fatalf("%v %q", err, f.bytes)
	}
}

// payloads decodes what a subscriber took.
func payloads(t *testing.T, batch []*frame) (text string) {
	t.Helper()
	for _, f := range batch {
		var message struct {
			Event struct{ Data struct{ Stdout string } }
		}
		if err := json.Unmarshal(f.bytes[5:], &message); err != nil {
			t.Fatal(err)
		}
		raw, err := base64.StdEncoding.DecodeString(message.Event.Data.Stdout)
		if err != nil {
			t.Fatal(err)
		}
		text += string(raw)
		f.release()
	}
	return text
}

func TestHubDropsWithoutSubscribers(t *testing.T) {
	h := newHub()
	for range 1000 {
		h.publish("stdout", make([]byte, pipeChunk))
	}
	s := h.subscribe()
	h.publish("stdout", []byte("x"))
	h.finish()
	batch, last := s.take()
	if got := payloads(t, batch); got != "x" || !last {
		t.Fatalf("%q %v", got, last)
	}
	late := h.subscribe()
	if batch, last := late.take(); len(batch) != 0 || !last {
		t.Fatal("a late subscriber must find the end")
	}
}

func TestHubLosesNothingToASlowSubscriber(t *testing.T) {
	h := newHub()
	slow, fast := h.subscribe(), h.subscribe()
	var want bytes.Buffer
	var wait sync.WaitGroup
	read := func(s *subscriber, pause time.Duration) *bytes.Buffer {
		var got bytes.Buffer
		wait.Go(func() {
			for {
				batch, last := s.take()
				got.WriteString(payloads(t, batch))
				if last {
					return
				}
				<-s.wake
				time.Sleep(pause)
			}
		})
		return &got
	}
	slowly, quickly := read(slow, 20*time.Millisecond), read(fast, 0)
	for i := range 200 {
		chunk := bytes.Repeat([]byte{byte(i)}, pipeChunk)
		want.Write(chunk)
		h.publish("stdout", chunk)
	}
	h.finish()
	wait.Wait()
	if !bytes.Equal(slowly.Bytes(), want.Bytes()) || !bytes.Equal(quickly.Bytes(), want.Bytes()) {
		t.Fatalf("%d and %d of %d bytes", slowly.Len(), quickly.Len(), want.Len())
	}
}

func TestHubCutsOffWhoTakesNothing(t *testing.T) {
	h := newHub()
	h.tick = 25 * time.Millisecond
	stuck, good := h.subscribe(), h.subscribe()
	var got int
	var wait sync.WaitGroup
	wait.Go(func() {
		for {
			batch, last := good.take()
			got += len(payloads(t, batch))
			if last {
				return
			}
			<-good.wake
		}
	})
	const chunks = 100
	for range chunks {
		h.publish("stdout", make([]byte, pipeChunk))
	}
	select {
	case <-stuck.gone:
	default:
		t.Fatal("the stuck subscriber is still there")
	}
	if stuck.reason() == nil || stuck.queue != nil {
		t.Fatalf("%v, %d frames kept", stuck.reason(), len(stuck.queue))
	}
	h.finish()
	wait.Wait()
	if got != chunks*pipeChunk {
		t.Fatalf("%d bytes", got)
	}
}

func TestUnsubscribingFreesAWaitingPublisher(t *testing.T) {
	h := newHub()
	h.tick = time.Hour
	s := h.subscribe()
	done := make(chan struct{})
	go func() {
		for range 100 {
			h.publish("stdout", make([]byte, pipeChunk))
		}
		close(done)
	}()
	time.Sleep(10 * time.Millisecond)
	h.unsubscribe(s)
	<-done
}

func TestDeadlineCountsInSteps(t *testing.T) {
	reached := make(chan time.Time, 2)
	d := newDeadline(30*time.Millisecond, 4*time.Millisecond, func() { reached <- time.Now() })
	began := time.Now()
	// A timer that fires too early, as after a restore, costs one step and no more.
	d.pass(func() { t.Error("reached after one step") })
	if at := <-reached; at.Sub(began) < 20*time.Millisecond {
		t.Fatalf("reached after %s", at.Sub(began))
	}
	d.pass(func() { t.Error("reached twice") })
	stopped := newDeadline(5*time.Millisecond, time.Millisecond, func() { t.Error("reached although stopped") })
	stopped.stop()
	stopped.pass(func() { t.Error("reached although stopped") })
	time.Sleep(10 * time.Millisecond)
}

package unpack

import "io"

const (
	aheadBytes = 256 << 10
	aheadParts = 4
)

// ahead reads in a goroutine of its own, so that a layer is expanded and digested while what came before is written.
type ahead struct {
	full   chan []byte
	spare  chan []byte
	stop   chan struct{}
	rest   []byte
	holds  []byte
	failed error
}

// readAhead begins to read; done is called in that goroutine when it reads no more, which may be after Close.
func readAhead(from io.Reader, done func()) *ahead {
	a := &ahead{full: make(chan []byte, aheadParts), spare: make(chan []byte, aheadParts), stop: make(chan struct{})}
	for range aheadParts {
		a.spare <- make([]byte, aheadBytes)
	}
	go func() {
		defer done()
		defer close(a.full)
		a.failed = a.pump(from)
	}()
	return a
}

func (a *ahead) pump(from io.Reader) error {
	for {
		var part []byte
		select {
		case part = <-a.spare:
		case <-a.stop:
			return io.ErrClosedPipe
		}
		n, err := from.Read(part)
		if n > 0 {
			select {
			case a.full <- part[:n]:
			case <-a.stop:
				return io.ErrClosedPipe
			}
		} else {
			a.spare <- part
		}
		if err != nil {
			return err
		}
	}
}

func (a *ahead) Read(p []byte) (int, error) {
	for len(a.rest) == 0 {
		if a.holds != nil {
			a.spare <- a.holds[:aheadBytes]
			a.holds = nil
		}
		part, more := <-a.full
		if !more {
			return 0, a.failed
		}
		a.rest, a.holds = part, part
	}
	n := copy(p, a.rest)
	a.rest = a.rest[n:]
	return n, nil
}

// Close ends the reading, at once where it does not wait for its source.
func (a *ahead) Close() { close(a.stop) }

package edge

import (
	"io"
	"sync"
)

// Small buffers serve streams that say little now and then; the first full read fetches a large one.
const (
	smallBuffer = 4 << 10
	largeBuffer = 64 << 10
	smallRuns   = 16
)

var (
	smallBuffers = sync.Pool{New: func() any { return new([smallBuffer]byte) }}
	largeBuffers = sync.Pool{New: func() any { return new([largeBuffer]byte) }}
)

// pump sends what it reads, piece by piece, until from ends.
func pump(from io.Reader, send func(piece []byte) error) error {
	small := smallBuffers.Get().(*[smallBuffer]byte)
	defer smallBuffers.Put(small)
	var large *[largeBuffer]byte
	release := func() {
		if large != nil {
			largeBuffers.Put(large)
			large = nil
		}
	}
	defer release()
	buffer, quiet := small[:], 0
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			if err := send(buffer[:n]); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		switch {
		case n == len(buffer) && large == nil:
			large = largeBuffers.Get().(*[largeBuffer]byte)
			buffer, quiet = large[:], 0
		case n > smallBuffer:
			quiet = 0
		case large != nil:
			if quiet++; quiet > smallRuns {
				release()
				buffer = small[:]
			}
		}
	}
}

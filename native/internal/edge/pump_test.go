package edge

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
)

func TestPump(t *testing.T) {
	for _, size := range []int{0, 1, smallBuffer, smallBuffer + 1, largeBuffer * 3} {
		total, pieces := 0, 0
		err := pump(&endless{left: int64(size)}, func(piece []byte) error { total += len(piece); pieces++; return nil })
		if err != nil || total != size || size == largeBuffer*3 && pieces > 6 {
			t.Errorf("%d bytes: %d in %d pieces, %v", size, total, pieces, err)
		}
	}
	broken := errors.New("broken")
	fine := func([]byte) error { return nil }
	if err := pump(io.MultiReader(strings.NewReader("x"), failing{broken}), fine); !errors.Is(err, broken) {
		t.Fatal(err)
	}
	if err := pump(strings.NewReader("x"), func([]byte) error { return broken }); !errors.Is(err, broken) {
		t.Fatal(err)
	}
}

// Pieces of every size, so that all ways through the server's buffer and ours are taken.
func TestChunkedAnswersArriveAsTheyWere(t *testing.T) {
	var pieces [][]byte
	for _, base := range []int{1, 2000, 2048, 4090, 4096, 8192, 30000, 65536, 70000} {
		for _, size := range []int{base, base + 1, base + 7} {
			pieces = append(pieces, bytes.Repeat([]byte{byte(len(pieces))}, size))
		}
	}
	whole := bytes.Join(pieces, nil)
	te, g, _ := oneGuest(t, func(w http.ResponseWriter, _ *http.Request) {
		for _, piece := range pieces {
			_, _ = w.Write(piece)
			w.(http.Flusher).Flush()
		}
		_, _ = w.Write(whole)
	})
	bothWires(t, func(t *testing.T, transport *http.Transport) {
		for range 5 {
			response, err := transport.RoundTrip(te.request(t, http.MethodGet, "/", g.id, 0, nil))
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(response.Body)
			_ = response.Body.Close()
			if err != nil || !bytes.Equal(got, append(append([]byte(nil), whole...), whole...)) {
				t.Fatalf("%d bytes, not %d, %v", len(got), 2*len(whole), err)
			}
		}
	})
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

package moments

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// notes say how far an upload has come, so that one that was cut off goes on there: a line for each pack that is in the store. A line that
// was torn is the last one, and forgotten. They are of these very files, whose identity is the first line.
type notes struct {
	lock    sync.Mutex
	path    string
	first   []byte
	file    *os.File
	entries []noted
	done    *finished
}

type noted struct {
	Pack   string       `json:"pack"`
	Size   int64        `json:"size"`
	Chunks []notedAt    `json:"chunks"`
	Done   *notedMoment `json:"done,omitempty"`
}

type notedAt struct {
	SHA256 string `json:"s"`
	Offset int64  `json:"o"`
	Length int64  `json:"l"`
}

type notedMoment struct {
	Sent  Sent     `json:"sent"`
	Bases []string `json:"bases"`
	// Manifest is kept byte for byte: as JSON within JSON it would be written anew.
	Manifest []byte `json:"manifest"`
}

type finished struct {
	sent     Sent
	bases    []string
	manifest []byte
}

const noteBytesMax = 2 * ManifestBytesMax

func openNotes(directory, of, identity string) (*notes, error) {
	if !nameForm.MatchString(of) {
		return nil, failure(CodeInvalid, nil, "%.100q is no id", of)
	}
	if err := os.MkdirAll(directory, 0o700); err != nil {
		return nil, diskFailure(err, "what is sent cannot be noted")
	}
	first, _ := json.Marshal(map[string]string{"identity": identity})
	n := &notes{path: filepath.Join(directory, of+".sent"), first: first}
	if !n.read() {
		if err := n.clear(); err != nil {
			return nil, err
		}
		return n, nil
	}
	file, err := os.OpenFile(n.path, os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, diskFailure(err, "what is sent cannot be noted")
	}
	n.file = file
	return n, nil
}

// read says whether there are notes about these very files; what is torn at their end is cut off.
func (n *notes) read() bool {
	file, err := os.OpenFile(n.path, os.O_RDWR, 0o600)
	if err != nil {
		return false
	}
	defer file.Close()
	lines := bufio.NewReaderSize(file, 1<<20)
	line, err := readLine(lines)
	if err != nil || !bytes.Equal(line, n.first) {
		return false
	}
	whole := int64(len(line) + 1)
	for {
		line, err := readLine(lines)
		var entry noted
		if err != nil || json.Unmarshal(line, &entry) != nil {
			break
		}
		whole += int64(len(line) + 1)
		if entry.Done != nil {
			n.done = &finished{entry.Done.Sent, entry.Done.Bases, entry.Done.Manifest}
			continue
		}
		n.entries = append(n.entries, entry)
	}
	return file.Truncate(whole) == nil
}

func readLine(from *bufio.Reader) ([]byte, error) {
	line, err := from.ReadBytes('\n')
	if err != nil {
		return nil, err
	}
	if len(line) > noteBytesMax {
		return nil, errors.New("a line is too long")
	}
	return line[:len(line)-1], nil
}

// clear begins anew.
func (n *notes) clear() error {
	n.close()
	n.entries, n.done = nil, nil
	file, err := os.OpenFile(n.path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err == nil {
		_, err = file.Write(append(bytes.Clone(n.first), '\n'))
	}
	if err != nil {
		return diskFailure(err, "what is sent cannot be noted")
	}
	n.file = file
	return nil
}

func (n *notes) close() {
	if n.file != nil {
		n.file.Close()
		n.file = nil
	}
}

// keep notes a pack that is in the store.
func (n *notes) keep(pack finishedPack) error {
	entry := noted{Pack: pack.SHA256, Size: pack.Size}
	for _, sum := range pack.chunks {
		at := pack.places[sum]
		entry.Chunks = append(entry.Chunks, notedAt{sum, at.offset, at.length})
	}
	return n.write(entry)
}

// finish notes that all of it is in the store.
func (n *notes) finish(done finished) error {
	return n.write(noted{Done: &notedMoment{done.sent, done.bases, done.manifest}})
}

// write need not be on the disk: what is forgotten is sent again.
func (n *notes) write(entry noted) error {
	line, err := json.Marshal(entry)
	if err != nil {
		return err
	}
	n.lock.Lock()
	defer n.lock.Unlock()
	if _, err := n.file.Write(append(line, '\n')); err != nil {
		return diskFailure(err, "what is sent cannot be noted")
	}
	return nil
}

// recall adds what an earlier run has sent, as far as the store still has it.
func (n *notes) recall(ctx context.Context, to Remote, of string, known map[string]place) error {
	var packs []string
	for _, entry := range n.entries {
		if hexForm.MatchString(entry.Pack) {
			packs = append(packs, entry.Pack)
		}
	}
	if len(packs) == 0 {
		return nil
	}
	missing, err := to.Missing(ctx, of, packs)
	if err != nil {
		return err
	}
	gone := map[string]bool{}
	for _, pack := range missing {
		gone[pack] = true
	}
	for _, entry := range n.entries {
		if gone[entry.Pack] || !hexForm.MatchString(entry.Pack) {
			continue
		}
		for _, chunk := range entry.Chunks {
			known[chunk.SHA256] = place{Pack{entry.Pack, entry.Size}, chunk.Offset, chunk.Length}
		}
	}
	return nil
}

// diskFailure is a failure of this machine's disk.
func diskFailure(err error, text string) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return failure(CodeFull, err, "%s", text)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return failure(CodeGone, err, "%s", text)
	}
	return failure(CodeInternal, err, "%s", text)
}

// pace limits how much is sent in a second.
type pace struct {
	lock           sync.Mutex
	bytesPerSecond int64
	next           time.Time
}

func (p *pace) wait(ctx context.Context, bytes int64) error {
	if p.bytesPerSecond <= 0 {
		return nil
	}
	p.lock.Lock()
	now := time.Now()
	if p.next.Before(now) {
		p.next = now
	}
	pause := p.next.Sub(now)
	p.next = p.next.Add(time.Duration(float64(bytes) / float64(p.bytesPerSecond) * float64(time.Second)))
	p.lock.Unlock()
	select {
	case <-time.After(pause):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

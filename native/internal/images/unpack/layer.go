package unpack

import (
	"archive/tar"
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"math"
	"path"
	"strings"
	"sync"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh."
	whiteoutOpaque = ".wh..wh..opq"

	nameBytesMax      = 4096
	componentBytesMax = 255
	depthMax          = 256
	idMax             = math.MaxUint32 - 1
)

// Layer is one layer's bytes and what they have to be.
type Layer struct {
	Content     io.Reader
	Compression Compression
	// Digest and Size are of the compressed form; Size < 0: whatever it is. DiffID is of the tar.
	Digest string
	Size   int64
	DiffID string
}

// Meter counts over all layers of one image, several of which may be read at a time.
type Meter struct {
	Limits Limits
	// Stats are to be read when nothing is being unpacked any more.
	Stats Stats
	mu    sync.Mutex
}

// leaveOut counts an attribute that was left out.
func (m *Meter) leaveOut() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.Stats.Attributes++
}

// Check reads a layer as Apply does, and writes nothing. What only a tree can tell (a hard link to nothing) it lets pass.
//
// Errors: IMAGE_REFUSED, IMAGE_CORRUPT.
func Check(ctx context.Context, layer Layer, meter *Meter) error {
	return each(ctx, layer, meter, func(e *entry, content io.Reader) error {
		_, err := io.Copy(io.Discard, content)
		return err
	})
}

// entry is one header, read and found harmless in itself.
type entry struct {
	*tar.Header
	// directory and base of the name; the root itself has an empty base.
	directory, base string
	// link is the name of a hard link's target.
	link string
}

// each hands every entry over, then compares the digests.
func each(ctx context.Context, layer Layer, meter *Meter, take func(*entry, io.Reader) error) error {
	squeezed := &counter{from: layer.Content, sum: sha256.New(), ctx: ctx}
	plain, done, err := expand(squeezed, layer.Compression)
	if err != nil {
		return err
	}
	expanded := &counter{from: plain, sum: sha256.New(), ctx: ctx, bound: func(n int64) error {
		if n > meter.Limits.GrowthFrom && n/meter.Limits.Growth > squeezed.n {
			return refuse("layer %s grows more than %d times: it looks like a decompression bomb", layer.Digest, meter.Limits.Growth)
		}
		return nil
	}}
	rest := readAhead(expanded, done)
	defer rest.Close()
	reader := tar.NewReader(rest)
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return corrupt(err, "layer %s is no whole tar", layer.Digest)
		}
		found, err := meter.admit(header)
		if err != nil {
			return err
		}
		if found == nil {
			continue
		}
		content := &noticing{from: reader}
		err = take(found, content)
		if content.failed != nil {
			return corrupt(content.failed, "layer %s breaks off", layer.Digest)
		}
		if err != nil {
			return failed(err, header.Name)
		}
	}
	return finish(layer, rest, squeezed, expanded)
}

// noticing remembers that reading failed, which tells a broken layer from a file system's refusal.
type noticing struct {
	from   io.Reader
	failed error
}

func (n *noticing) Read(p []byte) (int, error) {
	got, err := n.from.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		n.failed = err
	}
	return got, err
}

// finish reads what follows the archive's end, for it belongs to the digests, and compares.
func finish(layer Layer, rest io.Reader, squeezed, expanded *counter) error {
	// At its end nobody else uses the counters any more.
	if _, err := io.Copy(io.Discard, rest); err != nil {
		return corrupt(err, "layer %s is not whole", layer.Digest)
	}
	if _, err := io.Copy(io.Discard, squeezed); err != nil {
		return corrupt(err, "layer %s is not whole", layer.Digest)
	}
	if layer.Size >= 0 && squeezed.n != layer.Size {
		return corrupt(nil, "layer %s has %d bytes, its manifest says %d", layer.Digest, squeezed.n, layer.Size)
	}
	if found := squeezed.digest(); found != layer.Digest {
		return corrupt(nil, "layer %s is in truth %s", layer.Digest, found)
	}
	if found := expanded.digest(); found != layer.DiffID {
		return corrupt(nil, "layer %s unpacks to %s, its image says %s", layer.Digest, found, layer.DiffID)
	}
	return nil
}

func expand(from io.Reader, compression Compression) (io.Reader, func(), error) {
	switch compression {
	case Gzip:
		buffered := bufio.NewReaderSize(from, 64<<10)
		if isTar(buffered) {
			return buffered, func() {}, nil
		}
		reader, err := gzip.NewReader(buffered)
		if err != nil {
			return nil, nil, corrupt(err, "a layer is no gzip stream")
		}
		return reader, func() { reader.Close() }, nil
	case Zstd:
		// Frames may ask for windows of gigabytes; what encoders make has 8 MiB, 128 at most.
		reader, err := zstd.NewReader(from, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(128<<20))
		if err != nil {
			return nil, nil, corrupt(err, "a layer is no zstd stream")
		}
		return reader, reader.Close, nil
	}
	return from, func() {}, nil
}

// isTar says whether a layer that is called gzip is a plain archive: Docker calls all so that it pushes, also those that it has pulled
// as they are and that the registry has already. The digests decide in any case.
func isTar(from *bufio.Reader) bool {
	header, err := from.Peek(512)
	return err == nil && string(header[257:262]) == "ustar" && (header[0] != 0x1f || header[1] != 0x8b)
}

// admit checks a header and counts it; nil for one that stands for nothing.
func (m *Meter) admit(header *tar.Header) (*entry, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.Stats.Entries++
	if m.Stats.Entries > m.Limits.Entries {
		return nil, refuse("the image has more than %d entries", m.Limits.Entries)
	}
	if header.Size < 0 || header.Size > m.Limits.Bytes-m.Stats.Bytes {
		return nil, refuse("the image has more than %d bytes of files", m.Limits.Bytes)
	}
	m.Stats.Bytes += header.Size
	if header.Typeflag == tar.TypeXGlobalHeader {
		return nil, nil
	}
	name, err := cleaned(header.Name)
	if err != nil {
		return nil, err
	}
	if header.Uid < 0 || header.Gid < 0 || header.Uid > idMax || header.Gid > idMax {
		return nil, refuse("%.200q belongs to %d:%d, which is no account", header.Name, header.Uid, header.Gid)
	}
	found := &entry{Header: header}
	found.directory, found.base = split(name)
	return found, m.admitType(found)
}

func (m *Meter) admitType(e *entry) error {
	switch e.Typeflag {
	case tar.TypeReg, tar.TypeDir, tar.TypeFifo, tar.TypeGNUSparse:
	case tar.TypeSymlink:
		if e.Linkname == "" || len(e.Linkname) >= nameBytesMax || strings.ContainsRune(e.Linkname, 0) {
			return refuse("%.200q is a link to nothing that can be named", e.Name)
		}
	case tar.TypeLink:
		target, err := cleaned(e.Linkname)
		if err != nil {
			return err
		}
		if target == "" {
			return refuse("%.200q is a hard link to the root", e.Name)
		}
		e.link = target
	case tar.TypeChar, tar.TypeBlock:
		m.Stats.Devices++
	default:
		return refuse("%.200q has the unknown type %q", e.Name, e.Typeflag)
	}
	if e.base == "" && e.Typeflag != tar.TypeDir {
		return refuse("the root is to be something else than a directory")
	}
	return checkWhiteout(e)
}

// checkWhiteout keeps `.wh...` from meaning the parent directory.
func checkWhiteout(e *entry) error {
	for part := range strings.SplitSeq(e.directory, "/") {
		if strings.HasPrefix(part, whiteoutPrefix) {
			return refuse("%.200q is below a whiteout", e.Name)
		}
	}
	if hidden, found := strings.CutPrefix(e.base, whiteoutPrefix); found && (hidden == "" || hidden == "." || hidden == "..") {
		return refuse("%.200q is a whiteout of nothing", e.Name)
	}
	return nil
}

// cleaned is a name relative to the root, without `.` parts; the root is "". What leads out is refused, not mended.
func cleaned(name string) (string, error) {
	if strings.HasPrefix(name, "/") {
		return "", refuse("%.200q is an absolute name", name)
	}
	if strings.ContainsRune(name, 0) || len(name) > nameBytesMax {
		return "", refuse("%.200q is no name of a file", name)
	}
	depth := 0
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", refuse("%.200q leads out of its directory", name)
		}
		if len(part) > componentBytesMax {
			return "", refuse("%.200q has a part of more than %d bytes", name, componentBytesMax)
		}
		depth++
	}
	if depth > depthMax {
		return "", refuse("%.200q is more than %d directories deep", name, depthMax)
	}
	if name = path.Clean("./" + name); name == "." {
		return "", nil
	}
	return name, nil
}

func split(name string) (directory, base string) {
	directory, base = path.Split(name)
	return strings.TrimSuffix(directory, "/"), base
}

// counter counts and digests what passes.
type counter struct {
	from  io.Reader
	sum   hash.Hash
	ctx   context.Context
	bound func(int64) error
	n     int64
}

func (c *counter) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := c.from.Read(p)
	c.sum.Write(p[:n])
	c.n += int64(n)
	if c.bound != nil {
		if over := c.bound(c.n); over != nil {
			return n, over
		}
	}
	return n, err
}

func (c *counter) digest() string { return "sha256:" + hex.EncodeToString(c.sum.Sum(nil)) }

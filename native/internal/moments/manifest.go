package moments

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
)

// Sizes and limits. A manifest beyond them is refused.
const (
	// Version is what is written. Of the version before, all chunks but a file's last have ChunkBytes, and so have those of nothing.
	Version    = 2
	versionOld = 1
	// PageBytes are what chunks consist of: guests' memory is saved in pages, in an order in which one more moves all that follow.
	PageBytes = 4 << 10
	// ChunkBytes are the most that a chunk has.
	ChunkBytes       = 64 << 10
	PackBytesMax     = 16 << 20
	ManifestBytesMax = 64 << 20
	filesMax         = 64
	packsMax         = 1 << 17
	fileBytesMax     = 1 << 40
	textMax          = 4096
	listMax          = 256
	// A chunk that does not become smaller takes some bytes more.
	storedMax = ChunkBytes + 1024
)

// Facts are what is to be known of a moment besides its bytes; only drivers understand them.
type Facts struct {
	Arch      string      `json:"arch"`
	CPU       []string    `json:"cpu"`
	Driver    string      `json:"driver"`
	Image     string      `json:"image"`
	Isolation string      `json:"isolation"`
	Mode      string      `json:"mode"`
	Notes     [][2]string `json:"notes"`
	Runtime   string      `json:"runtime"`
}

// Manifest of a moment. Its JSON has one form only: fields in this order, no space.
type Manifest struct {
	ChunkBytes int    `json:"chunk_bytes"`
	Facts      Facts  `json:"facts"`
	Files      []File `json:"files"`
	Packs      []Pack `json:"packs"`
	Version    int    `json:"version"`
}

// File is one of its files.
type File struct {
	Chunks []Chunk `json:"chunks"`
	Mode   uint32  `json:"mode"`
	Name   string  `json:"name"`
	Size   int64   `json:"size"`
}

// Pack is an object of the store: its SHA-256 and how long it is.
type Pack struct {
	SHA256 string `json:"sha256"`
	Size   int64  `json:"size"`
}

// Chunk is where a part of a file is: in JSON `["SHA256",pack,offset,length,pages]`. With Zeros, so many pages of nothing: a number.
// A file's last page may be shorter. In the version before there were no pages.
type Chunk struct {
	Zeros          int64
	SHA256         string
	Pack           int
	Offset, Length int64
	Pages          int64
}

// MarshalJSON has the form above.
func (c Chunk) MarshalJSON() ([]byte, error) {
	if c.Zeros > 0 {
		return strconv.AppendInt(nil, c.Zeros, 10), nil
	}
	if c.Pages == 0 {
		return fmt.Appendf(nil, `["%s",%d,%d,%d]`, c.SHA256, c.Pack, c.Offset, c.Length), nil
	}
	return fmt.Appendf(nil, `["%s",%d,%d,%d,%d]`, c.SHA256, c.Pack, c.Offset, c.Length, c.Pages), nil
}

var errForm = errors.New("a chunk is a number, or a digest with its pack, offset, length and pages")

// UnmarshalJSON reads the form above.
func (c *Chunk) UnmarshalJSON(content []byte) error {
	if len(content) > 0 && content[0] != '[' {
		zeros, err := strconv.ParseInt(string(content), 10, 64)
		if err != nil || zeros <= 0 {
			return errForm
		}
		*c = Chunk{Zeros: zeros}
		return nil
	}
	parts := bytes.Split(bytes.TrimSuffix(bytes.TrimPrefix(content, []byte("[")), []byte("]")), []byte(","))
	if len(parts) < 4 || len(parts) > 5 || len(parts[0]) != 66 {
		return errForm
	}
	var numbers [4]int64
	for i, part := range parts[1:] {
		number, err := strconv.ParseInt(string(part), 10, 64)
		if err != nil || number < 0 {
			return errForm
		}
		numbers[i] = number
	}
	*c = Chunk{SHA256: string(parts[0][1:65]), Pack: int(numbers[0]), Offset: numbers[1], Length: numbers[2], Pages: numbers[3]}
	return nil
}

var (
	hexForm    = regexp.MustCompile(`^[0-9a-f]{64}$`)
	digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	nameForm   = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$`)
)

// encode gives the one form of a manifest, and its digest.
func (m *Manifest) encode() (content []byte, digest string, err error) {
	var to bytes.Buffer
	encoder := json.NewEncoder(&to)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(m); err != nil {
		return nil, "", err
	}
	content = bytes.TrimSuffix(to.Bytes(), []byte("\n"))
	return content, digestOf(content), nil
}

func digestOf(content []byte) string {
	sum := sha256.Sum256(content)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// Parse reads a manifest that is known by this digest, and refuses what could lead anywhere but to its files: CodeCorrupt.
func Parse(digest string, content []byte) (*Manifest, error) {
	if !digestForm.MatchString(digest) {
		return nil, failure(CodeInvalid, nil, "%.80q is no SHA-256 digest", digest)
	}
	if len(content) > ManifestBytesMax {
		return nil, failure(CodeCorrupt, nil, "manifest %s has more than %d bytes", digest, ManifestBytesMax)
	}
	if found := digestOf(content); found != digest {
		return nil, failure(CodeCorrupt, nil, "manifest %s was asked for, what came is %s", digest, found)
	}
	m, err := read(content)
	if err != nil {
		return nil, failure(CodeCorrupt, err, "manifest %s is none", digest)
	}
	return m, nil
}

// read parses and checks; the digest is the caller's.
func read(content []byte) (*Manifest, error) {
	m := &Manifest{}
	decoder := json.NewDecoder(bytes.NewReader(content))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(m); err != nil {
		return nil, err
	}
	if err := m.check(); err != nil {
		return nil, err
	}
	// Also what JSON would let pass: fields said twice, or left out, spaces, what comes after the end.
	again, _, err := m.encode()
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(again, content) {
		return nil, errors.New("it is not in the form that manifests have")
	}
	return m, nil
}

func (m *Manifest) check() error {
	switch {
	case m.Version != Version && m.Version != versionOld:
		return fmt.Errorf("its version is %d, and this program reads up to %d", m.Version, Version)
	case m.ChunkBytes != ChunkBytes:
		return fmt.Errorf("its chunks have %d bytes", m.ChunkBytes)
	case len(m.Files) > filesMax:
		return fmt.Errorf("it has %d files", len(m.Files))
	case len(m.Packs) > packsMax:
		return fmt.Errorf("it has %d packs", len(m.Packs))
	}
	if err := m.Facts.check(); err != nil {
		return err
	}
	seen := map[string]bool{}
	for _, pack := range m.Packs {
		if !hexForm.MatchString(pack.SHA256) || seen[pack.SHA256] || pack.Size <= 0 || pack.Size > PackBytesMax {
			return fmt.Errorf("pack %.64q of %d bytes is none", pack.SHA256, pack.Size)
		}
		seen[pack.SHA256] = true
	}
	used, names := make([]bool, len(m.Packs)), map[string]bool{}
	for _, file := range m.Files {
		if !nameForm.MatchString(file.Name) || names[file.Name] {
			return fmt.Errorf("%.100q is no name of a file, or another's", file.Name)
		}
		names[file.Name] = true
		if err := m.checkFile(file, used); err != nil {
			return fmt.Errorf("file %s: %w", file.Name, err)
		}
	}
	for i, is := range used {
		if !is {
			return fmt.Errorf("nothing is in pack %s", m.Packs[i].SHA256)
		}
	}
	return nil
}

func (m *Manifest) checkFile(file File, used []bool) error {
	if file.Mode > 0o777 || file.Size < 0 || file.Size > fileBytesMax {
		return fmt.Errorf("it has mode %o and %d bytes", file.Mode, file.Size)
	}
	left := parts(file.Size, m.unit())
	for _, chunk := range file.Chunks {
		if !m.hasForm(chunk) {
			return errors.New("a chunk has more pages than chunks have, or none")
		}
		if m.units(chunk) > left {
			return errors.New("it has more chunks than bytes")
		}
		left -= m.units(chunk)
		if chunk.Zeros > 0 {
			continue
		}
		if !hexForm.MatchString(chunk.SHA256) || chunk.Pack < 0 || chunk.Pack >= len(m.Packs) {
			return errors.New("a chunk is in no pack")
		}
		size := m.Packs[chunk.Pack].Size
		if chunk.Length <= 0 || chunk.Length > storedMax || chunk.Offset < 0 || chunk.Offset > size-chunk.Length {
			return errors.New("a chunk is not within its pack")
		}
		used[chunk.Pack] = true
	}
	if left != 0 {
		return fmt.Errorf("%d bytes of it are missing", left*m.unit())
	}
	return nil
}

func (f Facts) check() error {
	total := 0
	for _, text := range []string{f.Arch, f.Driver, f.Image, f.Isolation, f.Mode, f.Runtime} {
		total += len(text)
	}
	for _, flag := range f.CPU {
		total += len(flag)
	}
	for _, note := range f.Notes {
		total += len(note[0]) + len(note[1])
	}
	if total > textMax || len(f.CPU) > listMax || len(f.Notes) > listMax {
		return errors.New("it says too much of itself")
	}
	return nil
}

// parts is of how many parts of so many bytes a file of this size consists.
func parts(size, of int64) int64 { return (size + of - 1) / of }

// unit is what chunks are counted in. In bytes.
func (m *Manifest) unit() int64 {
	if m.Version == versionOld {
		return ChunkBytes
	}
	return PageBytes
}

// units is how many of them a chunk has.
func (m *Manifest) units(chunk Chunk) int64 {
	switch {
	case chunk.Zeros > 0:
		return chunk.Zeros
	case m.Version == versionOld:
		return 1
	default:
		return chunk.Pages
	}
}

func (m *Manifest) hasForm(chunk Chunk) bool {
	if chunk.Zeros > 0 || m.Version == versionOld {
		return chunk.Pages == 0
	}
	return chunk.Pages > 0 && chunk.Pages <= ChunkBytes/PageBytes
}

// stored is what the chunks take of the store, each once.
func (m *Manifest) stored() int64 {
	type place struct {
		pack   int
		offset int64
	}
	seen, total := map[place]bool{}, int64(0)
	for _, file := range m.Files {
		for _, chunk := range file.Chunks {
			if at := (place{chunk.Pack, chunk.Offset}); chunk.Zeros == 0 && !seen[at] {
				seen[at] = true
				total += chunk.Length
			}
		}
	}
	return total
}

// Package capture makes a layer of what has changed in a sandbox's files.
//
// Theory of operation. What a sandbox writes lies above its image: as an overlay's upper directory on the host, or inside
// gVisor's sentry, which hands it out as a tar in the same terms. Both say that a name is gone by a character device 0:0, and
// that a directory hides what is below it by an attribute. Here these become a layer's whiteouts. What belongs to the running
// sandbox and not to its files (mount points, the resolver's address, the names of its host) is left out. Names and contents
// are made by whoever ran inside: they are copied, never followed. Source: OCI image-spec, layer.md; the kernel's overlayfs.rst.
package capture

import (
	"archive/tar"
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path"
	"strings"

	"atoll.local/native/internal/images/unpack"
)

const (
	whiteoutPrefix = ".wh."
	whiteoutOpaque = ".wh..wh..opq"
	attributeKey   = "SCHILY.xattr."
	opaque         = "trusted.overlay.opaque"
	bufferBytes    = 1 << 20
)

// Packed describes a layer that is written.
type Packed struct {
	Digest string `json:"digest"`
	Size   int64  `json:"size"`
	// Entries counts names, the root's own aside.
	Entries int64 `json:"entries"`
}

// leftOut are names that a runtime or a driver makes for one sandbox; with all that is below them.
var leftOut = map[string]bool{
	".atoll": true, "proc": true, "sys": true, "dev": true, "run": true,
	"etc/resolv.conf": true, "etc/hosts": true, "etc/hostname": true, "tmp/.atoll-keeps": true,
}

func refuse(format string, values ...any) error {
	return &unpack.Error{Code: unpack.CodeRefused, Text: fmt.Sprintf(format, values...)}
}

// packer writes entries to a layer's file.
type packer struct {
	ctx     context.Context
	file    *os.File
	buffer  *bufio.Writer
	sum     hash.Hash
	tar     *tar.Writer
	size    int64
	max     int64
	entries int64
	// gone are the names, in this layer, of files that are there no more.
	gone map[string]bool
}

func newPacker(ctx context.Context, target string, bytesMax int64) (*packer, error) {
	file, err := os.OpenFile(target, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	p := &packer{ctx: ctx, file: file, sum: sha256.New(), max: bytesMax, gone: make(map[string]bool)}
	p.buffer = bufio.NewWriterSize(io.MultiWriter(file, p.sum), bufferBytes)
	p.tar = tar.NewWriter(p)
	return p, nil
}

// Write counts on the way to the file.
func (p *packer) Write(data []byte) (int, error) {
	if err := p.ctx.Err(); err != nil {
		return 0, err
	}
	p.size += int64(len(data))
	if p.size > p.max {
		return 0, refuse("the change of files is larger than %d bytes, which a layer may have", p.max)
	}
	return p.buffer.Write(data)
}

// finish answers what was written; after an error the file is gone.
func (p *packer) finish(err error) (*Packed, error) {
	if err == nil {
		err = errors.Join(p.tar.Close(), p.buffer.Flush(), p.file.Close())
	} else {
		_ = p.file.Close()
	}
	if err != nil {
		return nil, errors.Join(err, os.Remove(p.file.Name()))
	}
	return &Packed{Digest: "sha256:" + hex.EncodeToString(p.sum.Sum(nil)), Size: p.size, Entries: p.entries}, nil
}

// isLeftOut says whether a name, relative to the root, is no part of a layer.
func isLeftOut(name string) bool {
	for ; name != "." && name != ""; name = path.Dir(name) {
		if leftOut[name] {
			return true
		}
	}
	return false
}

// add writes one entry, in a layer's terms.
func (p *packer) add(header *tar.Header, content io.Reader) error {
	name := path.Clean(strings.TrimPrefix(header.Name, "./"))
	if isLeftOut(name) {
		return nil
	}
	if strings.HasPrefix(path.Base(name), whiteoutPrefix) {
		return refuse("%.200q cannot be in a layer: such names say that a file is gone", name)
	}
	attributes, hides := attributesOf(header)
	out := &tar.Header{
		Typeflag: header.Typeflag, Name: name, Linkname: header.Linkname, Size: header.Size, Mode: header.Mode & 0o7777,
		Uid: header.Uid, Gid: header.Gid, ModTime: header.ModTime, PAXRecords: attributes, Format: tar.FormatPAX,
	}
	switch header.Typeflag {
	case tar.TypeChar:
		if header.Devmajor != 0 || header.Devminor != 0 {
			return nil
		}
		return p.remove(name)
	case tar.TypeDir:
		if name != "." {
			out.Name += "/"
		} else {
			out.Name = "./"
		}
		if err := p.emit(out, nil); err != nil || !hides {
			return err
		}
		return p.emit(&tar.Header{Typeflag: tar.TypeReg, Name: path.Join(name, whiteoutOpaque), Mode: 0o644, Format: tar.FormatPAX}, nil)
	case tar.TypeLink:
		out.Linkname, out.Size = path.Clean(strings.TrimPrefix(header.Linkname, "./")), 0
		if isLeftOut(out.Linkname) {
			return nil
		}
		// One device stands for all that is gone: gVisor, like the kernel, makes the others as further names of it.
		if p.gone[out.Linkname] {
			return p.remove(name)
		}
		return p.emit(out, nil)
	case tar.TypeReg, tar.TypeSymlink, tar.TypeFifo:
		return p.emit(out, content)
	}
	return nil // sockets and devices are not files that a sandbox could begin with
}

// remove says that a name is gone.
func (p *packer) remove(name string) error {
	p.gone[name] = true
	return p.emit(&tar.Header{
		Typeflag: tar.TypeReg, Name: path.Join(path.Dir(name), whiteoutPrefix+path.Base(name)), Mode: 0o644, Format: tar.FormatPAX,
	}, nil)
}

func (p *packer) emit(header *tar.Header, content io.Reader) error {
	if header.Name != "./" {
		p.entries++
	}
	if err := p.tar.WriteHeader(header); err != nil {
		return err
	}
	if header.Typeflag != tar.TypeReg || header.Size == 0 {
		return nil
	}
	_, err := io.CopyN(p.tar, content, header.Size)
	return err
}

// attributesOf keeps what a layer carries of an entry's attributes, and says whether the directory hides what is below it.
func attributesOf(header *tar.Header) (kept map[string]string, hides bool) {
	for key, value := range header.PAXRecords {
		name, found := strings.CutPrefix(key, attributeKey)
		switch {
		case !found:
		case name == opaque:
			hides = value == "y"
		case name == "security.capability" || (strings.HasPrefix(name, "user.") && !strings.HasPrefix(name, "user.overlay.")):
			if kept == nil {
				kept = make(map[string]string)
			}
			kept[key] = value
		}
	}
	return kept, hides
}

// FromTar makes a layer of what gVisor hands out.
func FromTar(ctx context.Context, source io.Reader, target string, bytesMax int64) (*Packed, error) {
	p, err := newPacker(ctx, target, bytesMax)
	if err != nil {
		return nil, err
	}
	reader := tar.NewReader(bufio.NewReaderSize(source, bufferBytes))
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return p.finish(nil)
		}
		if err == nil {
			err = p.add(header, reader)
		}
		if err != nil {
			return p.finish(err)
		}
	}
}

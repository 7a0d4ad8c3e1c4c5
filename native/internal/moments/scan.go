package moments

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// zeroChunk is compared with, so that what is written as nothing is stored as nothing.
var zeroChunk [ChunkBytes]byte

// visit is given a file's chunks in order: holes as a number of chunks, others by their content, which is the visitor's until it returns.
type visit func(zeros int64, content []byte) error

// scan reads a file of this size, and only where it has data. Errors: CodeGone when it is another than it was.
func scan(ctx context.Context, file *os.File, size int64, told visit) error {
	buffer := make([]byte, ChunkBytes)
	for at, end := int64(0), int64(0); at < size; {
		if err := ctx.Err(); err != nil {
			return err
		}
		if at >= end {
			from, to, err := extent(file, at, size)
			if err != nil {
				return failure(CodeGone, err, "%s cannot be read", file.Name())
			}
			if skipped := (from - at) / ChunkBytes; skipped > 0 {
				if err := told(skipped, nil); err != nil {
					return err
				}
				at += skipped * ChunkBytes
			}
			end = to
			continue
		}
		part := buffer[:min(ChunkBytes, size-at)]
		if _, err := file.ReadAt(part, at); err != nil {
			return failure(CodeGone, err, "%s cannot be read", file.Name())
		}
		at += int64(len(part))
		if string(part) == string(zeroChunk[:len(part)]) {
			if err := told(1, nil); err != nil {
				return err
			}
			continue
		}
		if err := told(0, part); err != nil {
			return err
		}
	}
	return nil
}

// extent is where data is from a byte on, in whole chunks: a hole's start is rounded up and its end down. At the end of the data both are
// the file's end, the rest counted as chunks.
func extent(file *os.File, at, size int64) (from, to int64, err error) {
	end := chunksOf(size) * ChunkBytes
	from, err = file.Seek(at, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return end, end, nil
	}
	if errors.Is(err, unix.EINVAL) {
		return at, end, nil // a file system that knows no holes
	}
	if err != nil {
		return 0, 0, err
	}
	if to, err = file.Seek(from, unix.SEEK_HOLE); err != nil {
		return 0, 0, err
	}
	from -= from % ChunkBytes
	return max(from, at), min(chunksOf(to)*ChunkBytes, end), nil
}

// source is one file that is sent.
type source struct {
	name string
	file *os.File
	info unix.Stat_t
}

// openAll opens the files by name. Errors: CodeGone.
func openAll(directory string, names []string) (all []source, err error) {
	defer func() {
		if err != nil {
			closeAll(all)
		}
	}()
	for _, name := range names {
		if !nameForm.MatchString(name) {
			return all, failure(CodeInvalid, nil, "%.100q is no name of a saved file", name)
		}
		file, err := os.OpenFile(filepath.Join(directory, name), os.O_RDONLY|unix.O_NOFOLLOW, 0)
		if err != nil {
			return all, failure(CodeGone, err, "%s is not there", name)
		}
		one := source{name: name, file: file}
		all = append(all, one)
		if err := unix.Fstat(int(file.Fd()), &all[len(all)-1].info); err != nil {
			return all, failure(CodeGone, err, "%s cannot be read", name)
		}
	}
	return all, nil
}

func closeAll(all []source) {
	for _, one := range all {
		one.file.Close()
	}
}

// identity says which files these are, and of what: a placement that is saved again has others of the same names.
func identity(all []source, facts Facts) string {
	var text strings.Builder
	said, _ := json.Marshal(facts)
	text.Write(said)
	for _, one := range all {
		text.WriteString(one.name)
		for _, number := range []int64{int64(one.info.Dev), int64(one.info.Ino), one.info.Size, one.info.Mtim.Nano()} {
			text.WriteByte(' ')
			text.WriteString(strconv.FormatInt(number, 10))
		}
		text.WriteByte('\n')
	}
	return hashOf([]byte(text.String()))
}

// unchanged compares a file with what it was when it was opened.
func (s source) unchanged() error {
	var now unix.Stat_t
	if err := unix.Fstat(int(s.file.Fd()), &now); err != nil {
		return failure(CodeGone, err, "%s cannot be read", s.name)
	}
	if now.Size != s.info.Size || now.Mtim != s.info.Mtim || now.Nlink == 0 {
		return failure(CodeGone, nil, "%s has changed while it was read", s.name)
	}
	return nil
}

func hashOf(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// readAll reads what has at most so many bytes.
func readAll(from io.Reader, most int64) ([]byte, error) {
	content, err := io.ReadAll(io.LimitReader(from, most+1))
	if err == nil && int64(len(content)) > most {
		err = failure(CodeCorrupt, nil, "what came has more than %d bytes", most)
	}
	return content, err
}

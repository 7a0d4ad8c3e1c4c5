package moments

import (
	"bytes"
	"context"
	"errors"
	"hash/crc32"
	"os"

	"golang.org/x/sys/unix"
)

// Where files are cut. gVisor saves the pages of a guest's memory that are not empty one after the other: a page that is written for the first
// time, or emptied, moves all pages behind it. Chunks of a fixed size would all be others from there on, as a second save of 64 MiB was
// that was sent whole. So what is in a page says whether a chunk ends with it, and after such an end all is as it was.
const (
	pagesMax = ChunkBytes / PageBytes
	// A chunk has so many pages before one may end it: where all are alike, chunks would be of one page each.
	pagesMin = 4
	// One page of so many ends a chunk: with the least and the most above chunks of what is random have about 50 KiB.
	endsOneOf = 16
	// So many pages of nothing are left out of a chunk that has begun.
	gapPages = 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// zeroPage is compared with, so that what is written as nothing is stored as nothing.
var zeroPage [PageBytes]byte

// visit is given a file's chunks in order: holes as a number of pages, others by their content, which is the visitor's until it returns.
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
			if skipped := (from - at) / PageBytes; skipped > 0 {
				if err := told(skipped, nil); err != nil {
					return err
				}
				at += skipped * PageBytes
			}
			end = to
			continue
		}
		part := buffer[:min(ChunkBytes, size-at, end-at)]
		if _, err := file.ReadAt(part, at); err != nil {
			return failure(CodeGone, err, "%s cannot be read", file.Name())
		}
		zeros, length := cut(part)
		at += zeros*PageBytes + int64(length)
		if zeros > 0 {
			part = nil
		}
		if err := told(zeros, part[:length]); err != nil {
			return err
		}
	}
	return nil
}

// cut says with what the content begins: with so many pages of nothing, or with a chunk of so many bytes.
func cut(content []byte) (zeros int64, length int) {
	for int(zeros)*PageBytes < len(content) && isZero(page(content, int(zeros))) {
		zeros++
	}
	if zeros > 0 {
		return zeros, 0
	}
	for pages := 1; ; pages++ {
		length = min(pages*PageBytes, len(content))
		if length == len(content) || (pages >= pagesMin && ends(page(content, pages-1))) || isGap(content[length:]) {
			return 0, length
		}
	}
}

// page is one page of it, the last one perhaps shorter.
func page(content []byte, number int) []byte {
	return content[number*PageBytes : min((number+1)*PageBytes, len(content))]
}

func isZero(page []byte) bool { return bytes.Equal(page, zeroPage[:len(page)]) }

func ends(page []byte) bool { return crc32.Checksum(page, castagnoli)%endsOneOf == 1 }

// isGap says whether enough pages of nothing follow.
func isGap(content []byte) bool {
	if len(content) < gapPages*PageBytes {
		return false
	}
	for number := range gapPages {
		if !isZero(page(content, number)) {
			return false
		}
	}
	return true
}

// extent is where data is from a byte on, in whole pages: a hole's start is rounded up and its end down. At the end of the data both are
// the file's end, the rest counted as pages.
func extent(file *os.File, at, size int64) (from, to int64, err error) {
	end := parts(size, PageBytes) * PageBytes
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
	from -= from % PageBytes
	return max(from, at), min(parts(to, PageBytes)*PageBytes, end), nil
}

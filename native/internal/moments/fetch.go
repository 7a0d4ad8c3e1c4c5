package moments

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

// Fetched is a moment whose files are here.
type Fetched struct {
	Facts Facts `json:"facts"`
	// Bytes are those of its files, Data what of them is no hole, Came what was read of the store.
	Bytes int64 `json:"bytes"`
	Data  int64 `json:"data"`
	Came  int64 `json:"came"`
}

// fetchers is how many packs are read at once.
const fetchers = 4

// gapMax is how much of a pack is read in vain rather than asked for anew.
const gapMax = 256 << 10

// attempts to go on with one pack, those that bring something more not counted; between them is a pause that doubles.
const attempts = 7

var firstPause = 200 * time.Millisecond

// Describe reads what is to be known of a moment. Errors: CodeCorrupt; those of Remote.
func Describe(ctx context.Context, from Remote, digest string) (*Fetched, error) {
	m, err := manifestOf(ctx, from, digest)
	if err != nil {
		return nil, err
	}
	return &Fetched{Facts: m.Facts}, nil
}

func manifestOf(ctx context.Context, from Remote, digest string) (*Manifest, error) {
	var said error
	for tried := range attempts {
		content, err := from.Manifest(ctx, digest)
		if err == nil {
			return Parse(digest, content)
		}
		if said = err; CodeOf(err) != CodeUnavailable || !sleep(ctx, tried) {
			break
		}
	}
	return nil, said
}

func sleep(ctx context.Context, tried int) bool {
	if tried+1 >= attempts {
		return false
	}
	select {
	case <-time.After(firstPause << tried):
		return true
	case <-ctx.Done():
		return false
	}
}

// Fetch has the files of a moment in a directory, which is not there yet, on the disk. It takes at most so much of the disk that as many
// bytes are left as are to be spared.
//
// Idempotency: what a run that was cut off has left beside the directory goes. Errors: CodeCorrupt, CodeFull (nothing of it stays); those of
// Remote.
func Fetch(ctx context.Context, from Remote, digest, directory string, spareBytes int64) (*Fetched, error) {
	m, err := manifestOf(ctx, from, digest)
	if err != nil {
		return nil, err
	}
	partial, err := ownPlace(directory)
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(partial)
	f := &fetch{from: from, moment: digest, manifest: m}
	if err := f.requireRoom(partial, spareBytes); err != nil {
		return nil, err
	}
	defer f.close()
	if err := f.create(partial); err != nil {
		return nil, err
	}
	if err := f.fill(ctx); err != nil {
		return nil, err
	}
	if err := f.publish(partial, directory); err != nil {
		return nil, err
	}
	return &f.done, nil
}

// ownPlace makes a directory of this run's own beside the one that is wanted; what runs that were cut off have left there goes, so that one which
// has only been forgotten cannot let its own appear.
func ownPlace(directory string) (string, error) {
	old, err := filepath.Glob(directory + ".partial-*")
	for _, path := range old {
		err = errors.Join(err, os.RemoveAll(path))
	}
	if err != nil {
		return "", diskFailure(err, "what an earlier run has left cannot be removed")
	}
	partial, err := os.MkdirTemp(filepath.Dir(directory), filepath.Base(directory)+".partial-*")
	if err != nil {
		return "", diskFailure(err, "there is no place for what is fetched")
	}
	return partial, nil
}

// target is where the content of a chunk belongs.
type target struct {
	file   int
	offset int64
	length int
}

// wanted is a chunk of a pack, and all places where it belongs.
type wanted struct {
	Chunk
	targets []target
}

type fetch struct {
	from     Remote
	moment   string
	manifest *Manifest
	files    []*os.File
	lock     sync.Mutex
	done     Fetched
}

func (f *fetch) requireRoom(directory string, spareBytes int64) error {
	for _, file := range f.manifest.Files {
		left := file.Size
		for _, chunk := range file.Chunks {
			bytes := f.manifest.units(chunk) * f.manifest.unit()
			if chunk.Zeros == 0 {
				f.done.Data += min(bytes, left)
			}
			left -= bytes
		}
		f.done.Bytes += file.Size
	}
	f.done.Facts = f.manifest.Facts
	var space unix.Statfs_t
	if err := unix.Statfs(directory, &space); err != nil {
		return diskFailure(err, "the disk cannot be looked at")
	}
	if free := int64(space.Bavail)*space.Bsize - spareBytes; free < f.done.Data {
		return failure(CodeFull, nil, "what was saved has %d MiB, and %s has %d MiB to spare", f.done.Data>>20, directory, max(0, free)>>20)
	}
	return nil
}

func (f *fetch) create(directory string) error {
	for _, file := range f.manifest.Files {
		made, err := os.OpenFile(filepath.Join(directory, file.Name), os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return diskFailure(err, "what is fetched cannot be written")
		}
		f.files = append(f.files, made)
		if err := made.Truncate(file.Size); err != nil {
			return diskFailure(err, "what is fetched cannot be written")
		}
	}
	return nil
}

func (f *fetch) close() {
	for _, file := range f.files {
		file.Close()
	}
}

func (f *fetch) fill(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	packs := make(chan []wanted)
	var workers sync.WaitGroup
	for range fetchers {
		workers.Go(func() {
			for run := range packs {
				if err := f.pack(ctx, run); err != nil {
					cancel(err)
				}
			}
		})
	}
	for _, run := range f.runs() {
		select {
		case packs <- run:
			continue
		case <-ctx.Done():
		}
		break
	}
	close(packs)
	workers.Wait()
	return context.Cause(ctx)
}

// runs are chunks of one pack that are read by one request, in the order in which they are in it.
func (f *fetch) runs() [][]wanted {
	type at struct {
		pack   int
		offset int64
	}
	found := map[at]*wanted{}
	var order []*wanted
	for i, file := range f.manifest.Files {
		offset := int64(0)
		for _, chunk := range file.Chunks {
			bytes := f.manifest.units(chunk) * f.manifest.unit()
			if chunk.Zeros > 0 {
				offset += bytes
				continue
			}
			// Two chunks that are said to be at one place, and are not the same, are both compared with what is there.
			one, is := found[at{chunk.Pack, chunk.Offset}]
			if !is || one.SHA256 != chunk.SHA256 || one.Length != chunk.Length {
				one = &wanted{Chunk: chunk}
				found[at{chunk.Pack, chunk.Offset}] = one
				order = append(order, one)
			}
			one.targets = append(one.targets, target{i, offset, int(min(bytes, file.Size-offset))})
			offset += bytes
		}
	}
	slices.SortStableFunc(order, func(a, b *wanted) int {
		return cmp.Or(cmp.Compare(a.Pack, b.Pack), cmp.Compare(a.Offset, b.Offset))
	})
	var runs [][]wanted
	for i, one := range order {
		if before := i - 1; before >= 0 && order[before].Pack == one.Pack {
			if gap := one.Offset - order[before].Offset - order[before].Length; gap >= 0 && gap <= gapMax {
				runs[len(runs)-1] = append(runs[len(runs)-1], *one)
				continue
			}
		}
		runs = append(runs, []wanted{*one})
	}
	return runs
}

// pack reads one run, and goes on where a connection broke.
func (f *fetch) pack(ctx context.Context, run []wanted) error {
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(ChunkBytes), zstd.WithDecoderLowmem(true))
	if err != nil {
		return err
	}
	defer decoder.Close()
	for tried := 0; len(run) > 0; {
		read, err := f.part(ctx, decoder, run)
		run = run[read:]
		if err == nil {
			return nil
		}
		if read > 0 {
			tried = 0
		}
		if ctx.Err() != nil || CodeOf(err) != CodeUnavailable || !sleep(ctx, tried) {
			return err
		}
		tried++
	}
	return nil
}

func (f *fetch) part(ctx context.Context, decoder *zstd.Decoder, run []wanted) (read int, err error) {
	pack, last := f.manifest.Packs[run[0].Pack], run[len(run)-1]
	at := run[0].Offset
	body, err := f.from.Pack(ctx, f.moment, pack.SHA256, at, last.Offset+last.Length-at)
	if err != nil {
		return 0, err
	}
	defer body.Close()
	lines, plain := bufio.NewReaderSize(body, 256<<10), make([]byte, 0, ChunkBytes)
	for _, one := range run {
		stored := make([]byte, one.Length)
		if _, err := io.CopyN(io.Discard, lines, one.Offset-at); err != nil {
			return read, failure(CodeUnavailable, err, "pack %s ended early", pack.SHA256)
		}
		if _, err := io.ReadFull(lines, stored); err != nil {
			return read, failure(CodeUnavailable, err, "pack %s ended early", pack.SHA256)
		}
		f.count(one.Length)
		at = one.Offset + one.Length
		if plain, err = decoder.DecodeAll(stored, plain[:0]); err != nil || hashOf(plain) != one.SHA256 {
			return read, failure(CodeCorrupt, err, "a chunk of pack %s is not what the manifest says", pack.SHA256)
		}
		if err := f.place(one, plain); err != nil {
			return read, err
		}
		read++
	}
	return read, nil
}

func (f *fetch) count(came int64) {
	f.lock.Lock()
	f.done.Came += came
	f.lock.Unlock()
}

func (f *fetch) place(one wanted, plain []byte) error {
	for _, to := range one.targets {
		if len(plain) != to.length {
			return failure(CodeCorrupt, nil, "a chunk has %d bytes where %d belong", len(plain), to.length)
		}
		if _, err := f.files[to.file].WriteAt(plain, to.offset); err != nil {
			return diskFailure(err, "what is fetched cannot be written")
		}
	}
	return nil
}

// publish lets the files appear, on the disk.
func (f *fetch) publish(partial, directory string) error {
	for i, file := range f.files {
		if err := file.Chmod(os.FileMode(f.manifest.Files[i].Mode)); err != nil {
			return diskFailure(err, "what is fetched cannot be written")
		}
		if err := file.Sync(); err != nil {
			return diskFailure(err, "what is fetched cannot be written")
		}
	}
	if err := syncDirectory(partial); err != nil {
		return diskFailure(err, "what is fetched cannot be written")
	}
	if err := os.Rename(partial, directory); err != nil {
		return diskFailure(err, "what was fetched cannot get its name")
	}
	return syncDirectory(filepath.Dir(directory))
}

func syncDirectory(path string) error {
	directory, err := os.Open(path)
	if err != nil {
		return err
	}
	defer directory.Close()
	return directory.Sync()
}

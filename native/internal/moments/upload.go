package moments

import (
	"context"
	"errors"
	"slices"

	"github.com/klauspost/compress/zstd"
)

// Wish is what is to be sent.
type Wish struct {
	// Of is the placement or snapshot whose moment it is.
	Of        string   `json:"of"`
	Directory string   `json:"directory"`
	Files     []string `json:"files"`
	Facts     Facts    `json:"facts"`
	// Bases are moments whose packs the store may have.
	Bases []string `json:"bases"`
	// Work is the directory in which it is written down how far this has come.
	Work string `json:"work"`
	// BytesPerSecond limits what is sent; 0: nothing does.
	BytesPerSecond int64 `json:"bytes_per_second"`
}

// Sent is a moment that is in the store. Sizes are in bytes: of its files, of what of them is data, of what it takes of the store, and of
// what had to be sent now.
type Sent struct {
	Digest string `json:"digest"`
	Size   int64  `json:"size"`
	Files  int64  `json:"files"`
	Data   int64  `json:"data"`
	Stored int64  `json:"stored"`
	New    int64  `json:"sent"`
	Chunks int64  `json:"chunks"`
	Known  int64  `json:"known"`
}

// sideBySide is how many packs are on their way at once.
const sideBySide = 2

// Upload has a moment in the store.
//
// Idempotency: what an earlier run has sent of these very files is not sent again. Errors: CodeGone when they are not there, or others than
// they were; those of Remote.
func Upload(ctx context.Context, to Remote, wish Wish) (*Sent, error) {
	if len(wish.Files) > filesMax {
		return nil, failure(CodeInvalid, nil, "a moment has at most %d files", filesMax)
	}
	all, err := openAll(wish.Directory, wish.Files)
	if err != nil {
		return nil, err
	}
	defer closeAll(all)
	notes, err := openNotes(wish.Work, wish.Of, identity(all, wish.Facts))
	if err != nil {
		return nil, err
	}
	defer notes.close()
	for attempt := 0; ; attempt++ {
		sent, err := upload(ctx, to, wish, all, notes, attempt == 0)
		// What was counted upon is not in the store any more: all is sent, once.
		if CodeOf(err) != CodeIncomplete || attempt > 0 {
			return sent, err
		}
		if err := notes.clear(); err != nil {
			return nil, err
		}
	}
}

func upload(ctx context.Context, to Remote, wish Wish, all []source, notes *notes, trusting bool) (*Sent, error) {
	if done := notes.done; done != nil && trusting {
		if err := to.PutManifest(ctx, wish.Of, done.sent.Digest, done.bases, done.manifest); err != nil {
			return nil, err
		}
		return &done.sent, nil
	}
	known := map[string]place{}
	var bases []string
	if trusting {
		bases = remember(ctx, to, wish, known)
		if err := notes.recall(ctx, to, wish.Of, known); err != nil {
			return nil, err
		}
	}
	made, sent, err := sendChunks(ctx, to, wish, all, known, notes)
	if err != nil {
		return nil, err
	}
	content, digest, err := made.encode()
	if err != nil {
		return nil, err
	}
	if err := made.check(); err != nil || len(content) > ManifestBytesMax {
		return nil, failure(CodeInvalid, err, "there is too much of it")
	}
	if err := to.PutManifest(ctx, wish.Of, digest, bases, content); err != nil {
		return nil, err
	}
	sent.Digest, sent.Stored = digest, made.stored()
	sent.Size = sent.Stored + int64(len(content))
	return sent, notes.finish(finished{*sent, bases, content})
}

// place is where a chunk is in the store.
type place struct {
	pack           Pack
	offset, length int64
}

// remember reads what earlier moments have in the store. One that is not to be had is no loss but of time.
func remember(ctx context.Context, from Remote, wish Wish, known map[string]place) (bases []string) {
	read := []func() (string, []byte, error){func() (string, []byte, error) {
		content, err := from.Last(ctx, wish.Of)
		return digestOf(content), content, err
	}}
	for _, digest := range wish.Bases {
		read = append(read, func() (string, []byte, error) {
			content, err := from.Manifest(ctx, digest)
			return digest, content, err
		})
	}
	for _, one := range read {
		digest, content, err := one()
		if err != nil || slices.Contains(bases, digest) {
			continue
		}
		m, err := Parse(digest, content)
		if err != nil {
			continue
		}
		bases = append(bases, digest)
		for _, file := range m.Files {
			for _, chunk := range file.Chunks {
				if chunk.Zeros == 0 {
					known[chunk.SHA256] = place{m.Packs[chunk.Pack], chunk.Offset, chunk.Length}
				}
			}
		}
	}
	return bases
}

// maker puts a manifest together while its chunks are read.
type maker struct {
	manifest Manifest
	sent     Sent
	known    map[string]place
	packs    map[string]int
	pending  []pendingChunk
	packer   *packer
}

// pendingChunk is a chunk whose pack is not finished, and so has no name yet.
type pendingChunk struct{ file, chunk int }

func sendChunks(ctx context.Context, to Remote, wish Wish, all []source, known map[string]place, notes *notes) (*Manifest, *Sent, error) {
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false))
	if err != nil {
		return nil, nil, err
	}
	defer encoder.Close()
	sender := startSender(ctx, to, wish, notes)
	m := &maker{known: known, packs: map[string]int{}, packer: &packer{encoder: encoder, send: sender.send, chunks: map[string]place{}}}
	m.manifest = Manifest{ChunkBytes: ChunkBytes, Facts: wish.Facts.filled(), Files: make([]File, len(all)), Packs: []Pack{}, Version: Version}
	err = m.takeAll(sender.ctx, all)
	if err == nil {
		err = m.packer.flush()
	}
	sent, failed := sender.wait(err)
	if failed != nil {
		return nil, nil, failed
	}
	for _, one := range all {
		if err := one.unchanged(); err != nil {
			return nil, nil, err
		}
	}
	m.settle()
	m.sent.New = sent
	return &m.manifest, &m.sent, nil
}

func (f Facts) filled() Facts {
	if f.CPU == nil {
		f.CPU = []string{}
	}
	if f.Notes == nil {
		f.Notes = [][2]string{}
	}
	return f
}

func (m *maker) takeAll(ctx context.Context, all []source) error {
	for i, one := range all {
		m.manifest.Files[i] = File{Chunks: []Chunk{}, Mode: one.info.Mode & 0o777, Name: one.name, Size: one.info.Size}
		m.sent.Files += one.info.Size
		err := scan(ctx, one.file, one.info.Size, func(zeros int64, content []byte) error { return m.take(i, zeros, content) })
		if err != nil {
			return err
		}
	}
	return nil
}

func (m *maker) take(file int, zeros int64, content []byte) error {
	to := &m.manifest.Files[file].Chunks
	if zeros > 0 {
		if last := len(*to) - 1; last >= 0 && (*to)[last].Zeros > 0 {
			(*to)[last].Zeros += zeros
		} else {
			*to = append(*to, Chunk{Zeros: zeros})
		}
		return nil
	}
	m.sent.Data += int64(len(content))
	m.sent.Chunks++
	sum, pages := hashOf(content), parts(int64(len(content)), PageBytes)
	if at, is := m.known[sum]; is {
		m.sent.Known++
		*to = append(*to, Chunk{SHA256: sum, Pack: m.index(at.pack), Offset: at.offset, Length: at.length, Pages: pages})
		return nil
	}
	m.pending = append(m.pending, pendingChunk{file, len(*to)})
	*to = append(*to, Chunk{SHA256: sum, Pages: pages})
	return m.packer.add(sum, content)
}

// settle says where the chunks are whose packs have got their names meanwhile.
func (m *maker) settle() {
	for _, at := range m.pending {
		chunk := &m.manifest.Files[at.file].Chunks[at.chunk]
		where := m.packer.chunks[chunk.SHA256]
		chunk.Pack, chunk.Offset, chunk.Length = m.index(where.pack), where.offset, where.length
	}
}

func (m *maker) index(pack Pack) int {
	if i, is := m.packs[pack.SHA256]; is {
		return i
	}
	m.packs[pack.SHA256] = len(m.manifest.Packs)
	m.manifest.Packs = append(m.manifest.Packs, pack)
	return len(m.manifest.Packs) - 1
}

// packer compresses chunks into packs.
type packer struct {
	encoder *zstd.Encoder
	send    func(finishedPack) error
	// chunks says where each is; of the pack that is being filled its name is not known yet.
	chunks map[string]place
	filled []byte
	inside []string
}

// finishedPack is a pack with its content.
type finishedPack struct {
	Pack
	content []byte
	chunks  []string
	places  map[string]place
}

func (p *packer) add(sum string, content []byte) error {
	if _, is := p.chunks[sum]; is {
		return nil
	}
	if p.filled == nil {
		p.filled = make([]byte, 0, PackBytesMax)
	}
	offset := len(p.filled)
	p.filled = p.encoder.EncodeAll(content, p.filled)
	p.chunks[sum] = place{offset: int64(offset), length: int64(len(p.filled) - offset)}
	p.inside = append(p.inside, sum)
	if len(p.filled) > PackBytesMax-storedMax {
		return p.flush()
	}
	return nil
}

func (p *packer) flush() error {
	if len(p.inside) == 0 {
		return nil
	}
	done := finishedPack{Pack{hashOf(p.filled), int64(len(p.filled))}, p.filled, p.inside, map[string]place{}}
	for _, sum := range p.inside {
		at := p.chunks[sum]
		at.pack = done.Pack
		p.chunks[sum], done.places[sum] = at, at
	}
	p.filled, p.inside = nil, nil
	return p.send(done)
}

// sender brings packs away while the next are made.
type sender struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	queue  chan finishedPack
	ended  chan int64
}

func startSender(ctx context.Context, to Remote, wish Wish, notes *notes) *sender {
	ctx, cancel := context.WithCancelCause(ctx)
	s := &sender{ctx, cancel, make(chan finishedPack), make(chan int64, sideBySide)}
	pace := &pace{bytesPerSecond: wish.BytesPerSecond}
	for range sideBySide {
		go func() {
			var sent int64
			defer func() { s.ended <- sent }()
			for pack := range s.queue {
				if err := putPack(ctx, to, wish.Of, pack, notes, pace); err != nil {
					cancel(err)
					continue
				}
				sent += pack.Size
			}
		}()
	}
	return s
}

func putPack(ctx context.Context, to Remote, of string, pack finishedPack, notes *notes, pace *pace) error {
	if err := pace.wait(ctx, pack.Size); err != nil {
		return err
	}
	missing, err := to.Missing(ctx, of, []string{pack.SHA256})
	if err == nil && len(missing) > 0 {
		err = to.PutPack(ctx, of, pack.SHA256, pack.content)
	}
	if err != nil {
		return err
	}
	return notes.keep(pack)
}

func (s *sender) send(pack finishedPack) error {
	select {
	case s.queue <- pack:
		return nil
	case <-s.ctx.Done():
		return context.Cause(s.ctx)
	}
}

// wait is called once, when nothing more comes; failed: why nothing more comes.
func (s *sender) wait(failed error) (sent int64, err error) {
	if failed != nil {
		s.cancel(failed)
	}
	close(s.queue)
	for range sideBySide {
		sent += <-s.ended
	}
	if err = context.Cause(s.ctx); failed != nil && (err == nil || errors.Is(err, context.Canceled)) {
		err = failed
	}
	s.cancel(nil)
	return sent, err
}

package moments

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/klauspost/compress/zstd"
)

// random is so many pages that are all others.
func random(seed byte, pages int) []byte {
	content := make([]byte, pages*PageBytes)
	dice := rand.NewChaCha8([32]byte{seed})
	_, _ = dice.Read(content)
	return content
}

// cutAll is a content's chunks, those of nothing as their length.
func cutAll(t *testing.T, content []byte) (chunks [][]byte, zeros int) {
	t.Helper()
	for len(content) > 0 {
		part := content[:min(ChunkBytes, len(content))]
		empty, length := cut(part)
		if empty > 0 {
			zeros += int(empty)
			content = content[min(int(empty)*PageBytes, len(content)):]
			continue
		}
		if length <= 0 || length > ChunkBytes || (length%PageBytes != 0 && length != len(content)) {
			t.Fatalf("a chunk of %d bytes, %d are left", length, len(content))
		}
		chunks = append(chunks, content[:length])
		content = content[length:]
	}
	return chunks, zeros
}

func TestChunksAreOfAUsefulSize(t *testing.T) {
	chunks, zeros := cutAll(t, random(1, 16384))
	// 64 MiB: 1024 if all had the most.
	if zeros != 0 || len(chunks) < 1100 || len(chunks) > 1700 {
		t.Fatalf("%d chunks, %d pages of nothing", len(chunks), zeros)
	}
	alike := bytes.Repeat([]byte{7}, 1024*PageBytes)
	if chunks, _ := cutAll(t, alike); len(chunks) > 1024/pagesMin {
		t.Fatalf("%d chunks of pages that are all alike", len(chunks))
	}
}

func TestPagesOfNothingAreStoredAsNothing(t *testing.T) {
	content := random(2, 40)
	clear(content[10*PageBytes : 20*PageBytes])
	clear(content[25*PageBytes : 26*PageBytes])
	clear(content[38*PageBytes:])
	content = content[:len(content)-100]
	chunks, zeros := cutAll(t, content)
	total := 0
	for _, chunk := range chunks {
		total += len(chunk)
	}
	// A single one is not worth a chunk's end; the last page is shorter than others.
	if over := total + zeros*PageBytes - len(content); (over != 0 && over != 100) || zeros < 10 || zeros > 13 {
		t.Fatalf("%d bytes in chunks, %d pages of nothing", total, zeros)
	}
}

// Of a guest of which a little has changed the pages behind are where others were.
func TestASaveInWhichPagesHaveMovedIsSentAsWhatChanged(t *testing.T) {
	for name, change := range map[string]func(pages []byte) []byte{
		"one more in front":   func(pages []byte) []byte { return append(random(9, 1), pages...) },
		"one less in front":   func(pages []byte) []byte { return pages[PageBytes:] },
		"seven in the middle": func(pages []byte) []byte { return append(pages[:8<<20], append(random(9, 7), pages[8<<20:]...)...) },
		"here and there": func(pages []byte) []byte {
			for at := 1 << 20; at < 20<<20; at += 4 << 20 {
				pages = append(pages[:at], append(random(byte(at>>20), 3), pages[at+5*PageBytes:]...)...)
			}
			return pages
		},
	} {
		t.Run(name, func(t *testing.T) {
			store, directory := OpenFolder(t.TempDir()), t.TempDir()
			path := filepath.Join(directory, "pages.img")
			pages := random(3, 24<<20/PageBytes)
			check(t, os.WriteFile(path, pages, 0o600))
			wish := Wish{Of: "plc_1", Directory: directory, Files: []string{"pages.img"}, Facts: facts, Work: t.TempDir()}
			first, err := Upload(context.Background(), store, wish)
			check(t, err)
			check(t, os.WriteFile(path, change(bytes.Clone(pages)), 0o600))
			second, err := Upload(context.Background(), store, wish)
			check(t, err)
			if first.New < 24<<20 || second.New > 1<<20 {
				t.Fatalf("%d bytes were sent again, of %d", second.New, first.New)
			}
			target := filepath.Join(t.TempDir(), "fetched")
			_, err = Fetch(context.Background(), store, second.Digest, target, 0)
			check(t, err)
			same(t, directory, target, wish.Files)
		})
	}
}

// sendOld sends a file as the version before did.
func sendOld(t *testing.T, store Remote, content []byte) string {
	t.Helper()
	encoder, err := zstd.NewWriter(nil)
	check(t, err)
	defer encoder.Close()
	m := &Manifest{ChunkBytes: ChunkBytes, Version: versionOld, Facts: facts, Files: []File{{Mode: 0o600, Name: "pages.img", Size: int64(len(content))}}}
	var pack []byte
	for at := 0; at < len(content); at += ChunkBytes {
		part := content[at:min(at+ChunkBytes, len(content))]
		if bytes.Equal(part, make([]byte, len(part))) {
			m.Files[0].Chunks = append(m.Files[0].Chunks, Chunk{Zeros: 1})
			continue
		}
		offset := len(pack)
		pack = encoder.EncodeAll(part, pack)
		m.Files[0].Chunks = append(m.Files[0].Chunks, Chunk{SHA256: hashOf(part), Offset: int64(offset), Length: int64(len(pack) - offset)})
	}
	m.Packs = []Pack{{hashOf(pack), int64(len(pack))}}
	document, digest, err := m.encode()
	check(t, err)
	check(t, store.PutPack(context.Background(), "plc_1", m.Packs[0].SHA256, pack))
	check(t, store.PutManifest(context.Background(), "plc_1", digest, nil, document))
	return digest
}

func TestAMomentOfTheVersionBeforeIsFetchedAndStoodOn(t *testing.T) {
	store, directory := OpenFolder(t.TempDir()), t.TempDir()
	content := random(4, 50)
	clear(content[ChunkBytes : 2*ChunkBytes])
	content = append(content, "the end"...)
	digest := sendOld(t, store, content)
	target := filepath.Join(t.TempDir(), "fetched")
	fetched, err := Fetch(context.Background(), store, digest, target, 0)
	check(t, err)
	check(t, os.WriteFile(filepath.Join(directory, "pages.img"), content, 0o600))
	same(t, directory, target, []string{"pages.img"})
	if fetched.Data != int64(len(content))-ChunkBytes {
		t.Fatalf("%+v", fetched)
	}
	wish := Wish{Of: "plc_1", Directory: directory, Files: []string{"pages.img"}, Facts: facts, Work: t.TempDir(), Bases: []string{digest}}
	sent, err := Upload(context.Background(), store, wish)
	check(t, err)
	_, err = Fetch(context.Background(), store, sent.Digest, filepath.Join(t.TempDir(), "again"), 0)
	check(t, err)
}

// FuzzCut holds that chunks are a content's parts, whatever it is.
func FuzzCut(f *testing.F) {
	f.Add([]byte{1}, uint8(3), uint8(7), uint16(1))
	f.Fuzz(func(t *testing.T, seed []byte, pages, empty uint8, less uint16) {
		if len(seed) == 0 {
			return
		}
		content := bytes.Repeat(seed, int(pages)*PageBytes/len(seed)+1)
		from := min(int(empty)*PageBytes, len(content))
		clear(content[from:min(from+6*PageBytes, len(content))])
		content = content[:max(1, len(content)-int(less))]
		path := filepath.Join(t.TempDir(), "content")
		check(t, os.WriteFile(path, content, 0o600))
		file, err := os.Open(path)
		check(t, err)
		defer file.Close()
		var again []byte
		check(t, scan(context.Background(), file, int64(len(content)), func(zeros int64, part []byte) error {
			again = append(append(again, part...), make([]byte, zeros*PageBytes)...)
			return nil
		}))
		if !bytes.Equal(again[:len(content)], content) || len(again) >= len(content)+PageBytes {
			t.Fatal("it is another than it was")
		}
	})
}

package moments

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// whole is a manifest that is right, to be made wrong.
func whole() *Manifest {
	sum := strings.Repeat("ab", 32)
	return &Manifest{ChunkBytes: ChunkBytes, Version: Version, Facts: facts, Packs: []Pack{{strings.Repeat("cd", 32), 3000}},
		Files: []File{{Chunks: []Chunk{{Zeros: 2}, {SHA256: sum, Length: 1000, Pages: 16}, {SHA256: sum, Offset: 2000, Length: 1000, Pages: 1}}, Mode: 0o600,
			Name: "pages.img", Size: 2*PageBytes + ChunkBytes + 1}}}
}

// wholeOld is one of the version before.
func wholeOld() *Manifest {
	m := whole()
	m.Version, m.Files[0].Size = versionOld, 3*ChunkBytes+1
	for i := range m.Files[0].Chunks {
		m.Files[0].Chunks[i].Pages = 0
	}
	return m
}

func TestHostileManifestsAreRefused(t *testing.T) {
	content, digest, err := whole().encode()
	check(t, err)
	_, err = Parse(digest, content)
	check(t, err)
	_, err = Parse("sha256:"+strings.Repeat("0", 64), content)
	wants(t, err, CodeCorrupt)
	_, err = Parse("../../etc/passwd", content)
	wants(t, err, CodeInvalid)
	for name, harm := range map[string]func(*Manifest){
		"path":             func(m *Manifest) { m.Files[0].Name = "../pages.img" },
		"hidden":           func(m *Manifest) { m.Files[0].Name = ".hidden" },
		"no name":          func(m *Manifest) { m.Files[0].Name = "" },
		"twice":            func(m *Manifest) { m.Files = append(m.Files, m.Files[0]) },
		"only packs":       func(m *Manifest) { m.Files = []File{} },
		"set-uid":          func(m *Manifest) { m.Files[0].Mode = 0o4755 },
		"huge":             func(m *Manifest) { m.Files[0].Size = 1 << 50 },
		"negative":         func(m *Manifest) { m.Files[0].Size = -1 },
		"longer":           func(m *Manifest) { m.Files[0].Size += PageBytes },
		"shorter":          func(m *Manifest) { m.Files[0].Size -= PageBytes },
		"no pages":         func(m *Manifest) { m.Files[0].Chunks[2].Pages = 0 },
		"negative pages":   func(m *Manifest) { m.Files[0].Chunks[2].Pages = -1 },
		"many pages":       func(m *Manifest) { m.Files[0].Chunks[2].Pages, m.Files[0].Size = 17, m.Files[0].Size+ChunkBytes },
		"old with pages":   func(m *Manifest) { *m = *wholeOld(); m.Files[0].Chunks[2].Pages = 1 },
		"old and longer":   func(m *Manifest) { *m = *wholeOld(); m.Files[0].Size += ChunkBytes },
		"older":            func(m *Manifest) { m.Version = 0 },
		"no such pack":     func(m *Manifest) { m.Files[0].Chunks[1].Pack = 1 },
		"beyond the pack":  func(m *Manifest) { m.Files[0].Chunks[2].Offset = 2001 },
		"overflow":         func(m *Manifest) { m.Files[0].Chunks[2].Offset = 1<<63 - 1 },
		"bomb":             func(m *Manifest) { m.Packs[0].Size, m.Files[0].Chunks[1].Length = PackBytesMax, storedMax+1 },
		"empty chunk":      func(m *Manifest) { m.Files[0].Chunks[1].Length = 0 },
		"no digest":        func(m *Manifest) { m.Files[0].Chunks[1].SHA256 = strings.Repeat("x", 64) },
		"pack too long":    func(m *Manifest) { m.Packs[0].Size = PackBytesMax + 1 },
		"pack of nothing":  func(m *Manifest) { m.Packs = append(m.Packs, Pack{strings.Repeat("ef", 32), 10}) },
		"pack with a path": func(m *Manifest) { m.Packs[0].SHA256 = strings.Repeat("../", 21) + "a" },
		"another version":  func(m *Manifest) { m.Version = 3 },
		"other chunks":     func(m *Manifest) { m.ChunkBytes = 1 },
		"too many zeros":   func(m *Manifest) { m.Files[0].Chunks[0].Zeros = 1 << 62 },
		"much to say":      func(m *Manifest) { m.Facts.Runtime = strings.Repeat("x", textMax+1) },
		"many flags":       func(m *Manifest) { m.Facts.CPU = make([]string, listMax+1) },
	} {
		t.Run(name, func(t *testing.T) {
			m := whole()
			harm(m)
			content, digest, err := m.encode()
			check(t, err)
			_, err = Parse(digest, content)
			wants(t, err, CodeCorrupt)
		})
	}
	old, oldDigest, err := wholeOld().encode()
	check(t, err)
	_, err = Parse(oldDigest, old)
	check(t, err)
	for name, other := range map[string]string{
		"pages of 0":   strings.Replace(string(content), `2000,1000,1]`, `2000,1000,0]`, 1),
		"six parts":    strings.Replace(string(content), `2000,1000,1]`, `2000,1000,1,1]`, 1),
		"space":        strings.Replace(string(content), `"files":`, `"files": `, 1),
		"said twice":   strings.Replace(string(content), `"version":2`, `"version":2,"version":2`, 1),
		"unknown":      strings.Replace(string(content), `"version":2`, `"version":2,"x":1`, 1),
		"more":         string(content) + `{}`,
		"negative run": strings.Replace(string(content), `"chunks":[2,`, `"chunks":[-2,`, 1),
		"not JSON":     "moments",
		"nothing":      "",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse(digestOf([]byte(other)), []byte(other))
			wants(t, err, CodeCorrupt)
		})
	}
}

// FuzzManifest holds that whatever is taken for a manifest leads to its files alone, and has one form.
func FuzzManifest(f *testing.F) {
	content, _, err := whole().encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(content)
	f.Add([]byte(`{"chunk_bytes":65536}`))
	if content, _, err = wholeOld().encode(); err != nil {
		f.Fatal(err)
	}
	f.Add(content)
	f.Fuzz(func(t *testing.T, content []byte) {
		m, err := Parse(digestOf(content), content)
		if err != nil {
			if CodeOf(err) != CodeCorrupt {
				t.Fatal(err)
			}
			return
		}
		for _, file := range m.Files {
			if filepath.Base(file.Name) != file.Name || strings.HasPrefix(file.Name, ".") {
				t.Fatalf("%q is taken for a name", file.Name)
			}
		}
		runs := (&fetch{manifest: m}).runs()
		for _, run := range runs {
			for _, one := range run {
				if end := one.Offset + one.Length; one.Offset < 0 || end > m.Packs[one.Pack].Size {
					t.Fatalf("%+v leads out of its pack", one)
				}
			}
		}
	})
}

// FuzzChunk holds that any content of a pack gives what the manifest says, or is refused.
func FuzzChunk(f *testing.F) {
	f.Add([]byte("(\xb5/\xfd"), uint16(1))
	f.Fuzz(func(t *testing.T, content []byte, length uint16) {
		if len(content) == 0 || len(content) > storedMax {
			return
		}
		firstPause = 0
		root := t.TempDir()
		pack := hashOf(content)
		m := &Manifest{ChunkBytes: ChunkBytes, Version: Version, Facts: facts.filled(), Packs: []Pack{{pack, int64(len(content))}},
			Files: []File{{Chunks: []Chunk{{SHA256: strings.Repeat("ab", 32), Length: int64(len(content)), Pages: parts(int64(length)+1, PageBytes)}}, Mode: 0o600, Name: "a", Size: int64(length) + 1}}}
		document, digest, err := m.encode()
		check(t, err)
		folder := OpenFolder(root)
		check(t, folder.PutPack(context.Background(), "x", pack, content))
		check(t, folder.PutManifest(context.Background(), "x", digest, nil, document))
		target := filepath.Join(root, "fetched")
		_, err = Fetch(context.Background(), folder, digest, target, 0)
		wants(t, err, CodeCorrupt)
		if _, err := os.Stat(target); err == nil {
			t.Fatal("what was refused is there")
		}
	})
}

// FuzzNotes holds that whatever is found in notes does no harm: an upload goes on with them or begins anew.
func FuzzNotes(f *testing.F) {
	line, _ := json.Marshal(noted{Pack: strings.Repeat("ab", 32), Size: 10, Chunks: []notedAt{{strings.Repeat("cd", 32), 0, 10}}})
	f.Add(line)
	f.Fuzz(func(t *testing.T, content []byte) {
		work := t.TempDir()
		first := `{"identity":"these"}` + "\n"
		check(t, os.WriteFile(filepath.Join(work, "plc_1.sent"), append([]byte(first), content...), 0o600))
		n, err := openNotes(work, "plc_1", "these")
		check(t, err)
		defer n.close()
		check(t, n.recall(context.Background(), OpenFolder(t.TempDir()), "plc_1", map[string]place{}))
	})
}

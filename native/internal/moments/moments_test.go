package moments

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var facts = Facts{Arch: "x86_64", CPU: []string{"avx2"}, Driver: "oci-runsc", Image: "sha256:00", Isolation: "gvisor", Mode: "full",
	Notes: [][2]string{{"named", "1"}}, Runtime: "runsc <1> & more"}

// saved makes a directory with files such as a driver saves: one with data and holes, a small one, one that is a hole from end to end.
func saved(t *testing.T, seed uint64) (directory string, names []string) {
	t.Helper()
	directory = t.TempDir()
	dice := rand.New(rand.NewPCG(seed, 1))
	pages := make([]byte, 3*ChunkBytes+1234)
	for i := range pages {
		pages[i] = byte(dice.Uint32())
	}
	file, err := os.Create(filepath.Join(directory, "pages.img"))
	check(t, err)
	defer file.Close()
	check(t, file.Truncate(40<<20+77))
	for _, at := range []int64{5000, 10 << 20, 30<<20 + 4096} {
		_, err := file.WriteAt(pages, at)
		check(t, err)
	}
	_, err = file.WriteAt(make([]byte, 2*ChunkBytes), 20<<20) // written as nothing
	check(t, err)
	_, err = file.WriteAt([]byte("the end"), 40<<20+70)
	check(t, err)
	check(t, os.WriteFile(filepath.Join(directory, "checkpoint.img"), []byte("state"), 0o640))
	check(t, os.WriteFile(filepath.Join(directory, "nothing.img"), nil, 0o600))
	check(t, os.Truncate(filepath.Join(directory, "nothing.img"), 8<<20))
	return directory, []string{"checkpoint.img", "nothing.img", "pages.img"}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wants(t *testing.T, err error, code string) {
	t.Helper()
	if CodeOf(err) != code || err == nil {
		t.Fatalf("%s was expected, not %v", code, err)
	}
}

func blocks(t *testing.T, path string) int64 {
	t.Helper()
	var info unix.Stat_t
	check(t, unix.Stat(path, &info))
	return info.Blocks * 512
}

func same(t *testing.T, before, after string, names []string) {
	t.Helper()
	for _, name := range names {
		was, err := os.ReadFile(filepath.Join(before, name))
		check(t, err)
		is, err := os.ReadFile(filepath.Join(after, name))
		check(t, err)
		if !bytes.Equal(was, is) {
			t.Fatalf("%s is another than it was", name)
		}
	}
}

func TestFilesComeBackAsTheyWereAndHolesStayHoles(t *testing.T) {
	directory, names := saved(t, 1)
	store, target := OpenFolder(t.TempDir()), filepath.Join(t.TempDir(), "fetched")
	sent, err := Upload(context.Background(), store, Wish{Of: "plc_1", Directory: directory, Files: names, Facts: facts, Work: t.TempDir()})
	check(t, err)
	if sent.Files != 40<<20+77+5+8<<20 || sent.Data > 2<<20 || sent.New == 0 || sent.Size <= sent.Stored {
		t.Fatalf("%+v", sent)
	}
	described, err := Describe(context.Background(), store, sent.Digest)
	check(t, err)
	if described.Facts.Runtime != facts.Runtime || described.Facts.Notes[0] != facts.Notes[0] {
		t.Fatalf("%+v", described)
	}
	fetched, err := Fetch(context.Background(), store, sent.Digest, target, 0)
	check(t, err)
	same(t, directory, target, names)
	if fetched.Data != sent.Data || blocks(t, filepath.Join(target, "pages.img")) > 3<<20 || blocks(t, filepath.Join(target, "nothing.img")) > 0 {
		t.Fatalf("%+v", fetched)
	}
	if info, err := os.Stat(filepath.Join(target, "checkpoint.img")); err != nil || info.Mode().Perm() != 0o640 {
		t.Fatal(info, err)
	}
	if left, _ := filepath.Glob(target + ".*"); len(left) > 0 {
		t.Fatal(left)
	}
}

// counting says what was sent, and fails where a test wants it to.
type counting struct {
	Remote
	packs []string
	fail  func(pack string) error
}

func (c *counting) PutPack(ctx context.Context, of, pack string, content []byte) error {
	if c.fail != nil {
		if err := c.fail(pack); err != nil {
			return err
		}
	}
	c.packs = append(c.packs, pack)
	return c.Remote.PutPack(ctx, of, pack, content)
}

func TestWhatAnEarlierMomentHasIsNotSentAgain(t *testing.T) {
	directory, names := saved(t, 2)
	store := &counting{Remote: OpenFolder(t.TempDir())}
	first, err := Upload(context.Background(), store, Wish{Of: "plc_1", Directory: directory, Files: names, Facts: facts, Work: t.TempDir()})
	check(t, err)
	file, err := os.OpenFile(filepath.Join(directory, "pages.img"), os.O_WRONLY, 0)
	check(t, err)
	_, err = file.WriteAt([]byte("changed"), 15<<20)
	check(t, err)
	check(t, file.Close())
	second, err := Upload(context.Background(), store, Wish{Of: "plc_2", Directory: directory, Files: names, Facts: facts, Work: t.TempDir(),
		Bases: []string{first.Digest, "sha256:" + strings.Repeat("0", 64)}})
	check(t, err)
	if second.Known != first.Chunks || second.New > 1024 || second.Digest == first.Digest {
		t.Fatalf("%+v after %+v", second, first)
	}
	target := filepath.Join(t.TempDir(), "fetched")
	_, err = Fetch(context.Background(), store, second.Digest, target, 0)
	check(t, err)
	same(t, directory, target, names)
}

// big writes what takes several packs.
func big(t *testing.T, mib int) string {
	t.Helper()
	directory := t.TempDir()
	content := make([]byte, mib<<20)
	dice := rand.NewChaCha8([32]byte{7})
	_, _ = dice.Read(content)
	check(t, os.WriteFile(filepath.Join(directory, "pages.img"), content, 0o600))
	return directory
}

func TestAnUploadThatWasCutOffGoesOnWhereItWas(t *testing.T) {
	directory, work := big(t, 70), t.TempDir()
	wish := Wish{Of: "plc_1", Directory: directory, Files: []string{"pages.img"}, Facts: facts, Work: work}
	folder := OpenFolder(t.TempDir())
	broken := &counting{Remote: folder}
	broken.fail = func(string) error {
		if len(broken.packs) == 2 {
			return failure(CodeUnavailable, nil, "the store is away")
		}
		return nil
	}
	_, err := Upload(context.Background(), broken, wish)
	wants(t, err, CodeUnavailable)
	// As of a process that was killed while it wrote.
	notes, err := os.OpenFile(filepath.Join(work, "plc_1.sent"), os.O_WRONLY|os.O_APPEND, 0)
	check(t, err)
	_, err = notes.WriteString(`{"pack":"torn`)
	check(t, err)
	check(t, notes.Close())
	after := &counting{Remote: folder}
	sent, err := Upload(context.Background(), after, wish)
	check(t, err)
	if len(broken.packs) != 2 || len(after.packs) != 3 || sent.Known == 0 {
		t.Fatalf("%d packs, then %d: %+v", len(broken.packs), len(after.packs), sent)
	}
	for _, pack := range after.packs {
		if slices.Contains(broken.packs, pack) {
			t.Fatalf("%s was sent twice", pack)
		}
	}
	target := filepath.Join(t.TempDir(), "fetched")
	_, err = Fetch(context.Background(), folder, sent.Digest, target, 0)
	check(t, err)
	same(t, directory, target, wish.Files)
	again := &counting{Remote: folder}
	same, err := Upload(context.Background(), again, wish)
	check(t, err)
	if same.Digest != sent.Digest || len(again.packs) > 0 {
		t.Fatalf("%+v after %+v", same, sent)
	}
}

func TestWhatTheStoreHasLostIsSentAgain(t *testing.T) {
	directory, work, root := big(t, 40), t.TempDir(), t.TempDir()
	wish := Wish{Of: "plc_1", Directory: directory, Files: []string{"pages.img"}, Facts: facts, Work: work}
	folder := OpenFolder(root)
	sent, err := Upload(context.Background(), folder, wish)
	check(t, err)
	packs, err := filepath.Glob(filepath.Join(root, "packs/sha256/*"))
	check(t, err)
	check(t, os.Remove(packs[0]))
	check(t, os.Remove(filepath.Join(root, "moments/sha256", strings.TrimPrefix(sent.Digest, "sha256:"))))
	again, err := Upload(context.Background(), folder, wish)
	check(t, err)
	target := filepath.Join(t.TempDir(), "fetched")
	_, err = Fetch(context.Background(), folder, again.Digest, target, 0)
	check(t, err)
	same(t, directory, target, wish.Files)
}

func TestNotesAreOfTheseVeryFiles(t *testing.T) {
	work, folder := t.TempDir(), OpenFolder(t.TempDir())
	first, names := saved(t, 3)
	one, err := Upload(context.Background(), folder, Wish{Of: "plc_1", Directory: first, Files: names, Facts: facts, Work: work})
	check(t, err)
	second, _ := saved(t, 4)
	two, err := Upload(context.Background(), folder, Wish{Of: "plc_1", Directory: second, Files: names, Facts: facts, Work: work})
	check(t, err)
	if one.Digest == two.Digest {
		t.Fatal("another save of the same placement was taken for the one before")
	}
}

func TestFilesThatChangeMeanwhileAreNoMoment(t *testing.T) {
	directory := big(t, 20)
	store := &counting{Remote: OpenFolder(t.TempDir())}
	store.fail = func(string) error {
		return os.WriteFile(filepath.Join(directory, "pages.img"), []byte("another"), 0o600)
	}
	_, err := Upload(context.Background(), store, Wish{Of: "plc_1", Directory: directory, Files: []string{"pages.img"}, Facts: facts, Work: t.TempDir()})
	wants(t, err, CodeGone)
	_, err = Upload(context.Background(), store, Wish{Of: "plc_1", Directory: directory, Files: []string{"no.img"}, Facts: facts, Work: t.TempDir()})
	wants(t, err, CodeGone)
	_, err = Upload(context.Background(), store, Wish{Of: "plc_1", Directory: directory, Files: []string{"../x"}, Facts: facts, Work: t.TempDir()})
	wants(t, err, CodeInvalid)
}

func TestADamagedPackIsTold(t *testing.T) {
	for _, harm := range []string{"flipped", "short", "gone"} {
		t.Run(harm, func(t *testing.T) {
			firstPause = time.Millisecond
			directory, names := saved(t, 5)
			root := t.TempDir()
			folder := OpenFolder(root)
			sent, err := Upload(context.Background(), folder, Wish{Of: "plc_1", Directory: directory, Files: names, Facts: facts, Work: t.TempDir()})
			check(t, err)
			packs, err := filepath.Glob(filepath.Join(root, "packs/sha256/*"))
			check(t, err)
			content, err := os.ReadFile(packs[0])
			check(t, err)
			code := CodeCorrupt
			switch harm {
			case "flipped":
				content[len(content)/2] ^= 1
				check(t, os.WriteFile(packs[0], content, 0o600))
			case "short":
				code = CodeUnavailable
				check(t, os.WriteFile(packs[0], content[:len(content)/2], 0o600))
			case "gone":
				code = CodeUnavailable
				check(t, os.Remove(packs[0]))
			}
			target := filepath.Join(t.TempDir(), "fetched")
			_, err = Fetch(context.Background(), folder, sent.Digest, target, 0)
			wants(t, err, code)
			if left, _ := filepath.Glob(target + "*"); len(left) > 0 {
				t.Fatalf("%v is left", left)
			}
		})
	}
}

// faltering breaks off after so many bytes.
type faltering struct {
	Remote
	after int64
}

func (f *faltering) Pack(ctx context.Context, moment, pack string, offset, length int64) (io.ReadCloser, error) {
	body, err := f.Remote.Pack(ctx, moment, pack, offset, length)
	if err != nil {
		return nil, err
	}
	return struct {
		io.Reader
		io.Closer
	}{io.LimitReader(body, f.after), body}, nil
}

func TestAFetchGoesOnWhereItsConnectionBroke(t *testing.T) {
	firstPause = time.Millisecond
	directory := big(t, 20)
	folder := OpenFolder(t.TempDir())
	sent, err := Upload(context.Background(), folder, Wish{Of: "plc_1", Directory: directory, Files: []string{"pages.img"}, Facts: facts, Work: t.TempDir()})
	check(t, err)
	target := filepath.Join(t.TempDir(), "fetched")
	_, err = Fetch(context.Background(), &faltering{folder, 1 << 20}, sent.Digest, target, 0)
	check(t, err)
	same(t, directory, target, []string{"pages.img"})
}

func TestADiskWithoutRoomIsLookedAtFirst(t *testing.T) {
	directory, names := saved(t, 6)
	folder := OpenFolder(t.TempDir())
	sent, err := Upload(context.Background(), folder, Wish{Of: "plc_1", Directory: directory, Files: names, Facts: facts, Work: t.TempDir()})
	check(t, err)
	target := filepath.Join(t.TempDir(), "fetched")
	_, err = Fetch(context.Background(), folder, sent.Digest, target, 1<<60)
	wants(t, err, CodeFull)
	if left, _ := filepath.Glob(target + "*"); len(left) > 0 {
		t.Fatalf("%v is left", left)
	}
}

func TestWhatIsCancelledEndsAtOnce(t *testing.T) {
	directory := big(t, 40)
	ctx, cancel := context.WithCancel(context.Background())
	store := &counting{Remote: OpenFolder(t.TempDir())}
	store.fail = func(string) error { cancel(); return nil }
	_, err := Upload(ctx, store, Wish{Of: "plc_1", Directory: directory, Files: []string{"pages.img"}, Facts: facts, Work: t.TempDir()})
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

func TestAMomentOfNoFilesIsKnownByItsFacts(t *testing.T) {
	folder, work := OpenFolder(t.TempDir()), t.TempDir()
	one, err := Upload(context.Background(), folder, Wish{Of: "plc_1", Directory: work, Facts: facts, Work: work})
	check(t, err)
	other := facts
	other.Notes = [][2]string{{"memory", "another"}}
	two, err := Upload(context.Background(), folder, Wish{Of: "plc_1", Directory: work, Facts: other, Work: work})
	check(t, err)
	if one.Digest == two.Digest {
		t.Fatal("what is saved now was taken for what was saved before")
	}
	_, err = Fetch(context.Background(), folder, two.Digest, filepath.Join(t.TempDir(), "fetched"), 0)
	check(t, err)
}

func TestTheNextSaveStandsOnTheLastOfTheSameName(t *testing.T) {
	directory, names := saved(t, 8)
	store := &counting{Remote: OpenFolder(t.TempDir())}
	wish := Wish{Of: "plc_1", Directory: directory, Files: names, Facts: facts, Work: t.TempDir()}
	first, err := Upload(context.Background(), store, wish)
	check(t, err)
	file, err := os.OpenFile(filepath.Join(directory, "pages.img"), os.O_WRONLY, 0)
	check(t, err)
	_, err = file.WriteAt([]byte("changed"), 15<<20)
	check(t, err)
	check(t, file.Close())
	second, err := Upload(context.Background(), store, wish)
	check(t, err)
	if second.Known != first.Chunks || len(store.packs) != 2 {
		t.Fatalf("%+v after %+v", second, first)
	}
}

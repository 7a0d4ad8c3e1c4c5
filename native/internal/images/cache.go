package images

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"atoll.local/native/internal/images/unpack"
	"atoll.local/native/internal/objects"
)

// manifestName and the fields below are what the host's image cache reads.
const manifestName = "manifest.json"

// Unpacked describes a root file system that is ready.
type Unpacked struct {
	Name      string `json:"name"`
	Recipe    string `json:"recipe_sha256"`
	Digest    string `json:"digest"`
	SizeBytes int64  `json:"size_bytes"`
	Entries   int64  `json:"entries"`
	Arch      string `json:"arch"`
	CreatedAt string `json:"created_at"`
	// OwnBytes is what the tree does not share with the one that it was made from.
	OwnBytes int64 `json:"own_bytes"`
	// Shares are the trees that it shares the rest with, those that came first first: when one of them goes, what was its own is still
	// held by this one.
	Shares []Share `json:"shares,omitempty"`
	// Chain is what the tree is made of, in this order: the image below (or ""), then each layer's DiffID. Only trees that other
	// trees may be made from have it.
	Chain []string `json:"chain,omitempty"`
}

// Share is how many bytes are shared with a tree that are not of the trees which that one was made from.
type Share struct {
	Digest string `json:"digest"`
	Bytes  int64  `json:"bytes"`
}

// Base is a tree that the host has ready-made, for images that stand on one.
type Base struct {
	Digest, Tree string
}

// machines are Go's names of processors in the kernel's words.
var machines = map[string]string{"amd64": "x86_64", "arm64": "aarch64"}

// Making says how a tree is made.
type Making struct {
	Base   Base
	Limits unpack.Limits
	// From is where layers are fetched from that the store has not, and unpacked as they come; nil: the store has all.
	From objects.Reader
	Told Progress
}

// Unpack has an image's root file system in `CACHE/sha256/HEX/rootfs`, made of blobs of the store, each checked again on its
// way: whoever may write the store decides nothing about what is in the tree.
//
// Idempotency: a tree that is there stays; of two that want it, one makes it. A killed run leaves `.unfinished-HEX`, which the
// next one for that image removes. Errors: IMAGE_UNAVAILABLE, IMAGE_CORRUPT, IMAGE_REFUSED, HOST_DISK_FULL; with From those of Fetch.
func Unpack(ctx context.Context, store *Store, digest, cache string, how Making) (*Unpacked, error) {
	if !digestForm.MatchString(digest) {
		return nil, failure(CodeInvalid, nil, "%.80q is no SHA-256 digest", digest)
	}
	hex := strings.TrimPrefix(digest, "sha256:")
	parent := filepath.Join(cache, "sha256")
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return nil, failure(CodeInternal, err, "the image cache cannot be made")
	}
	unlock, err := lockFile(ctx, filepath.Join(parent, ".lock-"+hex))
	if err != nil {
		return nil, err
	}
	defer unlock()
	final := filepath.Join(parent, hex)
	if known, err := readUnpacked(final); err == nil {
		return known, nil
	}
	unfinished := filepath.Join(parent, ".unfinished-"+hex)
	if err := os.RemoveAll(unfinished); err != nil {
		return nil, failure(CodeInternal, err, "what an earlier run left cannot be removed")
	}
	made, err := build(ctx, store, digest, unfinished, how)
	if err == nil {
		err = publish(unfinished, final)
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(unfinished))
	}
	return made, nil
}

func build(ctx context.Context, store *Store, digest, unfinished string, how Making) (*Unpacked, error) {
	image, config, platform, err := load(store, digest)
	if err != nil {
		return nil, err
	}
	if image.base != "" && image.base != how.Base.Digest {
		return nil, failure(CodeUnavailable, nil, "image %s stands on ready-made image %s, which this host does not have", digest, image.base)
	}
	rootfs := filepath.Join(unfinished, "rootfs")
	if err := os.MkdirAll(unfinished, 0o700); err != nil {
		return nil, failure(CodeInternal, err, "a tree cannot be made")
	}
	if err := errors.Join(os.Mkdir(rootfs, 0o755), os.Chmod(rootfs, 0o755)); err != nil {
		return nil, failure(CodeInternal, err, "a tree cannot be made")
	}
	chain := append([]string{image.base}, config.RootFS.DiffIDs...)
	first, shares, err := begin(image, chain, filepath.Dir(unfinished), rootfs, how.Base)
	if err != nil {
		return nil, err
	}
	stacked := &stack{store: store, image: image, config: config, how: how, first: first, beside: unfinished}
	entries, size, err := stacked.into(ctx, rootfs)
	if err != nil {
		return nil, err
	}
	own := size
	for _, share := range shares {
		own -= share.Bytes
	}
	made := &Unpacked{
		Name: "sha256", Recipe: strings.TrimPrefix(digest, "sha256:"), Digest: digest, SizeBytes: size, Entries: entries,
		Arch: machines[platform.Architecture], CreatedAt: time.Now().UTC().Format(time.RFC3339), OwnBytes: max(0, own), Shares: shares, Chain: chain,
	}
	content, err := json.MarshalIndent(made, "", "  ")
	if err != nil {
		return nil, failure(CodeInternal, err, "the tree's manifest cannot be made")
	}
	if err := os.WriteFile(filepath.Join(unfinished, manifestName), append(content, '\n'), 0o600); err != nil {
		return nil, failure(CodeInternal, err, "the tree's manifest cannot be written")
	}
	return made, nil
}

// publish gives a tree its name once all of it is on the disk. A broken one that has the name goes.
func publish(unfinished, final string) error {
	opened, err := os.Open(unfinished)
	if err != nil {
		return failure(CodeInternal, err, "a tree cannot be published")
	}
	defer opened.Close()
	if err := unix.Syncfs(int(opened.Fd())); err != nil {
		return failure(CodeInternal, err, "a tree cannot be written to the disk")
	}
	if err := os.RemoveAll(final); err != nil {
		return failure(CodeInternal, err, "a broken tree cannot be removed")
	}
	if err := os.Rename(unfinished, final); err != nil {
		return failure(CodeInternal, err, "a tree cannot be published")
	}
	return nil
}

func readUnpacked(directory string) (*Unpacked, error) {
	content, err := os.ReadFile(filepath.Join(directory, manifestName))
	if err != nil {
		return nil, err
	}
	var known Unpacked
	if err := json.Unmarshal(content, &known); err != nil {
		return nil, err
	}
	if known.Recipe != filepath.Base(directory) {
		return nil, errors.New("the manifest is another tree's")
	}
	_, err = os.Stat(filepath.Join(directory, "rootfs"))
	return &known, err
}

// begin fills a new tree with what there is already: the tree that has most of the image's layers, else the ready-made one below
// them. It answers how many layers are in, and what is shared.
//
// Only trees with all layers from elsewhere count, since what guests need comes after these.
func begin(image *Image, chain []string, cache, rootfs string, base Base) (layers int, shares []Share, err error) {
	if below := longest(cache, chain, 1+image.outside); below != nil {
		from := filepath.Join(cache, below.Recipe, "rootfs")
		copied, err := cloneTree(from, rootfs)
		if err == nil && isWhole(rootfs, below) {
			// What had to be copied is taken for the newest part of it.
			return len(below.Chain) - 1, append(below.Shares, Share{below.Digest, max(0, below.OwnBytes-copied)}), nil
		}
		// It was being removed, or is broken: without it, then.
		if err := emptied(rootfs); err != nil {
			return 0, nil, failure(CodeInternal, err, "a tree cannot be made")
		}
	}
	if image.base == "" {
		return 0, nil, nil
	}
	copied, err := cloneTree(base.Tree, rootfs)
	if err != nil {
		return 0, nil, failure(CodeInternal, err, "the ready-made image %s cannot be shared", base.Digest)
	}
	_, size, err := countOf(rootfs)
	return 0, []Share{{base.Digest, max(0, size-copied)}}, err
}

// longest finds the tree of the cache whose chain is the longest beginning of this one, of at least so many parts.
func longest(cache string, chain []string, atLeast int) *Unpacked {
	entries, err := os.ReadDir(cache)
	if err != nil {
		return nil
	}
	var best *Unpacked
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), ".") {
			continue
		}
		known, err := readUnpacked(filepath.Join(cache, entry.Name()))
		if err != nil || len(known.Chain) < atLeast || len(known.Chain) > len(chain) || !slices.Equal(known.Chain, chain[:len(known.Chain)]) {
			continue
		}
		if best == nil || len(known.Chain) > len(best.Chain) {
			best = known
		}
	}
	return best
}

func isWhole(rootfs string, as *Unpacked) bool {
	entries, size, err := countOf(rootfs)
	return err == nil && entries == as.Entries && size == as.SizeBytes
}

func countOf(rootfs string) (entries, size int64, err error) {
	tree, err := unpack.OpenTree(rootfs)
	if err != nil {
		return 0, 0, err
	}
	defer tree.Close()
	return tree.Count()
}

func emptied(rootfs string) error {
	return errors.Join(os.RemoveAll(rootfs), os.Mkdir(rootfs, 0o755), os.Chmod(rootfs, 0o755))
}

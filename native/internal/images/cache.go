package images

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"atoll.local/native/internal/images/unpack"
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
}

// machines are Go's names of processors in the kernel's words.
var machines = map[string]string{"amd64": "x86_64", "arm64": "aarch64"}

// Unpack has an image's root file system in `CACHE/sha256/HEX/rootfs`, made of blobs of the store, each checked again on its
// way: whoever may write the store decides nothing about what is in the tree.
//
// Idempotency: a tree that is there stays; of two that want it, one makes it. A killed run leaves `.unfinished-HEX`, which the
// next one for that image removes. Errors: IMAGE_UNAVAILABLE, IMAGE_CORRUPT, IMAGE_REFUSED, HOST_DISK_FULL.
func Unpack(ctx context.Context, store *Store, digest, cache string, limits unpack.Limits) (*Unpacked, error) {
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
	made, err := build(ctx, store, digest, unfinished, limits)
	if err == nil {
		err = publish(unfinished, final)
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(unfinished))
	}
	return made, nil
}

func build(ctx context.Context, store *Store, digest, unfinished string, limits unpack.Limits) (*Unpacked, error) {
	image, config, platform, err := load(store, digest)
	if err != nil {
		return nil, err
	}
	rootfs := filepath.Join(unfinished, "rootfs")
	if err := os.MkdirAll(unfinished, 0o700); err != nil {
		return nil, failure(CodeInternal, err, "a tree cannot be made")
	}
	if err := errors.Join(os.Mkdir(rootfs, 0o755), os.Chmod(rootfs, 0o755)); err != nil {
		return nil, failure(CodeInternal, err, "a tree cannot be made")
	}
	tree, err := unpack.OpenTree(rootfs)
	if err != nil {
		return nil, err
	}
	defer tree.Close()
	meter := &unpack.Meter{Limits: limits}
	for i, blob := range image.Layers {
		apply := func(layer unpack.Layer) error { return tree.Apply(ctx, layer, meter) }
		if err := withLayer(store, blob, config.RootFS.DiffIDs[i], apply); err != nil {
			return nil, err
		}
	}
	if err := tree.Furnish(); err != nil {
		return nil, err
	}
	if err := tree.MakeDirectory(config.Config.WorkingDir); err != nil {
		return nil, err
	}
	entries, size, err := tree.Count()
	if err != nil {
		return nil, failure(CodeInternal, err, "the tree cannot be counted")
	}
	made := &Unpacked{
		Name: "sha256", Recipe: strings.TrimPrefix(digest, "sha256:"), Digest: digest, SizeBytes: size, Entries: entries,
		Arch: machines[platform.Architecture], CreatedAt: time.Now().UTC().Format(time.RFC3339),
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

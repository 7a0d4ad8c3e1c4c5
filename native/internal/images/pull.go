package images

import (
	"context"
	"io"
	"strings"

	"atoll.local/native/internal/images/unpack"
)

// parallel blobs of one image are fetched at a time.
const parallel = 4

// Record is what is known of an image that is in the store, for whoever makes a template of it.
type Record struct {
	Digest     string       `json:"digest"`
	Platform   Platform     `json:"platform"`
	Layers     []Descriptor `json:"layers"`
	DiffIDs    []string     `json:"diffIds"`
	Bytes      int64        `json:"bytes"`
	Env        []string     `json:"env"`
	User       string       `json:"user"`
	WorkingDir string       `json:"workingDir"`
	Entrypoint []string     `json:"entrypoint"`
	Cmd        []string     `json:"cmd"`
	Unpacked   unpack.Stats `json:"unpacked,omitzero"`
}

// Progress is told of each layer when it has been fetched, and when it has been checked, in this order or the other.
type Progress func(event string, layer int, blob Descriptor)

// Pull has an image with all of its blobs in the store, each of them checked down to the last entry of its archive.
//
// Idempotency: what is in the store is not fetched again. Errors: IMAGE_UNAVAILABLE, IMAGE_ACCESS_DENIED, IMAGE_CORRUPT,
// IMAGE_REFUSED, HOST_DISK_FULL.
func Pull(ctx context.Context, store *Store, from Source, platform Platform, limits unpack.Limits, told Progress) (*Record, error) {
	image, err := from.Resolve(ctx, platform)
	if err != nil {
		return nil, err
	}
	if image.Config.Size > documentBytesMax {
		return nil, failure(CodeRefused, nil, "the image's configuration has more than %d bytes", documentBytesMax)
	}
	if err := store.resume(ctx, from.Blob, image.Config); err != nil {
		return nil, err
	}
	content, err := store.Document(image.Config.Digest)
	if err != nil {
		return nil, err
	}
	config, err := parseConfig(content, image, platform)
	if err != nil {
		return nil, err
	}
	meter := &unpack.Meter{Limits: limits}
	err = each(ctx, image.Layers, func(ctx context.Context, i int, says func(string)) error {
		check := func(layer unpack.Layer) error { return unpack.Check(ctx, layer, meter) }
		err := withLayer(ctx, store, from.Blob, image.Layers[i], config.RootFS.DiffIDs[i], func() { says("fetched") }, check)
		if err == nil {
			says("checked")
		}
		return err
	}, told)
	if err != nil {
		return nil, err
	}
	// Last, so that a manifest in the store says that all of its image is there.
	if _, err := store.Add(ctx, image.manifest); err != nil {
		return nil, err
	}
	record := recordOf(image, config, platform)
	record.Unpacked = meter.Stats
	return record, nil
}

// withLayer uses a layer's bytes: of the store, else, where get says from where, as they come into it.
func withLayer(
	ctx context.Context, store *Store, get getter, blob Descriptor, diffID string, came func(), use func(unpack.Layer) error,
) error {
	compression, err := unpack.CompressionOf(blob.MediaType)
	if err != nil {
		return err
	}
	read := func(from io.Reader) error {
		return use(unpack.Layer{Content: from, Compression: compression, Digest: blob.Digest, Size: blob.Size, DiffID: diffID})
	}
	if get == nil {
		return store.read(blob.Digest, read)
	}
	return store.through(ctx, get, blob, came, read)
}

// Inspect reads an image of the store by its manifest's digest.
func Inspect(store *Store, digest string) (*Record, error) {
	image, config, platform, err := load(store, digest)
	if err != nil {
		return nil, err
	}
	return recordOf(image, config, platform), nil
}

func load(store *Store, digest string) (*Image, *Config, Platform, error) {
	content, err := store.Document(digest)
	if err != nil {
		return nil, nil, Platform{}, err
	}
	image, err := imageOf(digest, content)
	if err != nil {
		return nil, nil, Platform{}, err
	}
	if content, err = store.Document(image.Config.Digest); err != nil {
		return nil, nil, Platform{}, err
	}
	platform, _ := ParsePlatform("")
	config, err := parseConfig(content, image, platform)
	return image, config, platform, err
}

func recordOf(image *Image, config *Config, platform Platform) *Record {
	record := &Record{
		Digest:     image.Digest,
		Platform:   platform,
		Layers:     image.Layers,
		DiffIDs:    config.RootFS.DiffIDs,
		Env:        config.Config.Env,
		User:       strings.TrimSpace(config.Config.User),
		WorkingDir: config.Config.WorkingDir,
		Entrypoint: config.Config.Entrypoint,
		Cmd:        config.Config.Cmd,
	}
	for _, one := range append([]Descriptor{image.Config}, image.Layers...) {
		record.Bytes += one.Size
	}
	return record
}

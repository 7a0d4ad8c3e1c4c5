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

// Progress is told of each layer: fetched, then checked.
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
	if err := fetch(ctx, store, from, image.Config); err != nil {
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
	if err := fetchLayers(ctx, store, from, image, told); err != nil {
		return nil, err
	}
	meter := &unpack.Meter{Limits: limits}
	for i, blob := range image.Layers {
		if err := checkLayer(ctx, store, blob, config.RootFS.DiffIDs[i], meter); err != nil {
			return nil, err
		}
		told("checked", i, blob)
	}
	// Last, so that a manifest in the store says that all of its image is there.
	if _, err := store.Add(ctx, image.manifest); err != nil {
		return nil, err
	}
	record := recordOf(image, config, platform)
	record.Unpacked = meter.Stats
	return record, nil
}

func fetch(ctx context.Context, store *Store, from Source, blob Descriptor) error {
	return store.Fetch(ctx, blob, func(ctx context.Context) (io.ReadCloser, error) { return from.Blob(ctx, blob) })
}

func fetchLayers(ctx context.Context, store *Store, from Source, image *Image, told Progress) error {
	return inParallel(ctx, image.Layers, told, func(ctx context.Context, blob Descriptor) error { return fetch(ctx, store, from, blob) })
}

// checkLayer reads a layer of the store whole; one that is not what its digest says leaves the store.
func checkLayer(ctx context.Context, store *Store, blob Descriptor, diffID string, meter *unpack.Meter) error {
	return withLayer(store, blob, diffID, func(layer unpack.Layer) error { return unpack.Check(ctx, layer, meter) })
}

func withLayer(store *Store, blob Descriptor, diffID string, use func(unpack.Layer) error) error {
	compression, err := unpack.CompressionOf(blob.MediaType)
	if err != nil {
		return err
	}
	file, err := store.Open(blob.Digest)
	if err != nil {
		return err
	}
	defer file.Close()
	err = use(unpack.Layer{Content: file, Compression: compression, Digest: blob.Digest, Size: blob.Size, DiffID: diffID})
	if err != nil && CodeOf(err) == CodeCorrupt {
		store.Quarantine(blob.Digest)
	}
	return err
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

package images

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"strings"

	"atoll.local/native/internal/objects"
)

// Source is where an image comes from.
type Source interface {
	// Resolve finds the manifest for a platform. What it says is not checked beyond its own digest.
	Resolve(ctx context.Context, platform Platform) (*Image, error)
	// Blob reads a blob of the image, from a byte on.
	Blob(ctx context.Context, blob Descriptor, at int64) (io.ReadCloser, error)
	Close() error
}

// Options of a source.
type Options struct {
	// Mirrors to ask first, by the registry's name.
	Mirrors map[string]string `json:"mirrors,omitempty"`
	// Username and Password, or Token, for the registry; never logged.
	Username string `json:"username,omitempty"`
	Password string `json:"password,omitempty"`
	Token    string `json:"token,omitempty"`
	// PlainHTTP registries besides those on loopback.
	PlainHTTP []string `json:"plainHttp,omitempty"`
	// Objects is where images are fetched from, or published to.
	Objects objects.Settings `json:"objects,omitzero"`
}

// OpenSource reads `registry:REF`, `oci-layout:DIR[:TAG]`, `docker-archive:FILE` or `archive:FILE[:TAG]`, which is a tar of a
// layout or what `docker save` writes.
func OpenSource(text string, options Options) (Source, error) {
	kind, rest, found := strings.Cut(text, ":")
	if !found || rest == "" {
		return nil, failure(CodeInvalid, nil, "%.200q is no source (registry:REF, oci-layout:DIR[:TAG], docker-archive:FILE)", text)
	}
	switch kind {
	case "registry":
		return openRegistry(rest, options)
	case "oci-layout", "docker-archive", "archive":
		return openLocal(kind, rest)
	}
	return nil, failure(CodeInvalid, nil, "%.40q is no kind of source", kind)
}

func openLocal(kind, rest string) (Source, error) {
	name, tag := rest, ""
	from, err := openFiles(name)
	if errors.Is(err, fs.ErrNotExist) && kind != "docker-archive" {
		// A name may have colons of its own, so the whole of it is tried first.
		if at := strings.LastIndex(rest, ":"); at > 0 {
			name, tag = rest[:at], rest[at+1:]
			from, err = openFiles(name)
		}
	}
	if err != nil {
		return nil, failure(CodeUnavailable, err, "the image's files cannot be read")
	}
	if _, size, err := from.open("index.json"); err == nil && size > 0 && kind != "docker-archive" {
		return &layout{from: from, tag: tag}, nil
	}
	if kind != "oci-layout" {
		if _, _, err := from.open("manifest.json"); err == nil {
			return &saved{from: from, tag: tag}, nil
		}
	}
	from.close()
	return nil, failure(CodeCorrupt, nil, "there is no image: neither index.json of a layout nor manifest.json of a saved image")
}

const refName = "org.opencontainers.image.ref.name"

// layout is an OCI image layout.
type layout struct {
	from files
	tag  string
}

func (l *layout) Close() error { return l.from.close() }

func (l *layout) Blob(_ context.Context, blob Descriptor, at int64) (io.ReadCloser, error) {
	return openBlob(l.from, blobName(blob.Digest), blob.Digest, at)
}

func openBlob(from files, name, digest string, at int64) (io.ReadCloser, error) {
	file, _, err := from.open(name)
	if err != nil {
		return nil, failure(CodeCorrupt, err, "blob %s is missing", digest)
	}
	if _, err := io.CopyN(io.Discard, file, at); err != nil && !errors.Is(err, io.EOF) {
		file.Close()
		return nil, failure(CodeInternal, err, "blob %s cannot be read", digest)
	}
	return file, nil
}

func (l *layout) Resolve(_ context.Context, platform Platform) (*Image, error) {
	content, err := readSmall(l.from, "index.json")
	if err != nil {
		return nil, failure(CodeCorrupt, err, "index.json cannot be read")
	}
	top, err := parseDocument(content)
	if err != nil {
		return nil, err
	}
	chosen, err := l.tagged(top, platform)
	if err != nil {
		return nil, err
	}
	for range 4 { // an index may point at an index
		content, err := l.document(chosen)
		if err != nil {
			return nil, err
		}
		read, err := parseDocument(content)
		if err != nil {
			return nil, err
		}
		if !read.isIndex() {
			return imageOf(chosen.Digest, content)
		}
		if chosen, err = read.choose(platform); err != nil {
			return nil, err
		}
	}
	return nil, failure(CodeRefused, nil, "the image's indexes are nested too deeply")
}

// tagged picks from a layout's index: by tag, else the only one, else the platform's.
func (l *layout) tagged(top *document, platform Platform) (Descriptor, error) {
	var tags []string
	for _, one := range top.Manifests {
		name := one.Annotations[refName]
		if l.tag != "" && (name == l.tag || strings.HasSuffix(name, ":"+l.tag)) {
			return one, nil
		}
		tags = append(tags, name)
	}
	if l.tag != "" {
		return Descriptor{}, failure(CodeUnavailable, nil, "the layout has no tag %.80q, it has: %.400s", l.tag, strings.Join(tags, ", "))
	}
	if len(top.Manifests) == 1 {
		return top.Manifests[0], nil
	}
	return top.choose(platform)
}

func (l *layout) document(blob Descriptor) ([]byte, error) {
	if !digestForm.MatchString(blob.Digest) {
		return nil, failure(CodeRefused, nil, "%.80q is no SHA-256 digest", blob.Digest)
	}
	content, err := readSmall(l.from, blobName(blob.Digest))
	if err != nil {
		return nil, failure(CodeCorrupt, err, "manifest %s is missing", blob.Digest)
	}
	if digestOf(content) != blob.Digest {
		return nil, failure(CodeCorrupt, nil, "manifest %s is in truth %s", blob.Digest, digestOf(content))
	}
	return content, nil
}

// saved is what `docker save` writes. It has no manifest of ours, so one is made: layers are named by what they unpack to.
type saved struct {
	from   files
	tag    string
	config []byte
	names  map[string]string
}

type savedImage struct {
	Config   string
	RepoTags []string
	Layers   []string
}

func (s *saved) Close() error { return s.from.close() }

func (s *saved) Resolve(_ context.Context, _ Platform) (*Image, error) {
	chosen, err := s.choose()
	if err != nil {
		return nil, err
	}
	if s.config, err = readSmall(s.from, chosen.Config); err != nil {
		return nil, failure(CodeCorrupt, err, "the saved image's configuration is missing")
	}
	var config Config
	if err := json.Unmarshal(s.config, &config); err != nil {
		return nil, failure(CodeCorrupt, err, "the saved image's configuration is not JSON")
	}
	if len(config.RootFS.DiffIDs) != len(chosen.Layers) {
		return nil, failure(CodeCorrupt, nil, "the saved image has %d layers, its configuration says %d", len(chosen.Layers), len(config.RootFS.DiffIDs))
	}
	made := document{SchemaVersion: 2, MediaType: typeOCIManifest}
	made.Config = Descriptor{MediaType: typeOCIConfig, Digest: digestOf(s.config), Size: int64(len(s.config))}
	s.names = make(map[string]string)
	for i, name := range chosen.Layers {
		file, size, err := s.from.open(name)
		if err != nil {
			return nil, failure(CodeCorrupt, err, "layer %.120q of the saved image is missing", name)
		}
		file.Close()
		digest := config.RootFS.DiffIDs[i]
		s.names[digest] = name
		made.Layers = append(made.Layers, Descriptor{MediaType: typeLayerTar, Digest: digest, Size: size})
	}
	content, err := json.Marshal(made)
	if err != nil {
		return nil, failure(CodeInternal, err, "a manifest cannot be made")
	}
	return imageOf(digestOf(content), content)
}

func (s *saved) choose() (*savedImage, error) {
	content, err := readSmall(s.from, "manifest.json")
	if err != nil {
		return nil, failure(CodeCorrupt, err, "manifest.json cannot be read")
	}
	var all []savedImage
	if err := json.Unmarshal(content, &all); err != nil {
		return nil, failure(CodeCorrupt, err, "manifest.json is not what `docker save` writes")
	}
	for i := range all {
		for _, tag := range all[i].RepoTags {
			if s.tag != "" && (tag == s.tag || strings.HasSuffix(tag, ":"+s.tag)) {
				return &all[i], nil
			}
		}
	}
	if s.tag == "" && len(all) == 1 {
		return &all[0], nil
	}
	return nil, failure(CodeInvalid, nil, "the archive has %d images, and %.80q names none of them", len(all), s.tag)
}

func (s *saved) Blob(_ context.Context, blob Descriptor, at int64) (io.ReadCloser, error) {
	if blob.Digest == digestOf(s.config) {
		return io.NopCloser(bytes.NewReader(s.config[min(at, int64(len(s.config))):])), nil
	}
	return openBlob(s.from, s.names[blob.Digest], blob.Digest, at)
}

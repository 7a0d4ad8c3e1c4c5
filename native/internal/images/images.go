// Package images moves container images: from registries, layouts and archives into a content-addressed store, and from
// there into root file systems.
//
// Theory of operation. Nothing that a registry or a file says is believed: a blob counts once its size and SHA-256 are what
// the manifest above it says, and the manifest's own digest is what the caller keeps. Blobs are written to private temporary
// files and appear in the store by one rename, so that a killed run leaves a temporary file and nothing else. A root file
// system is unpacked beside its final place and appears by one rename, too (cache.go). What is unpacked, and what of it is
// refused, is package unpack's business.
package images

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"atoll.local/native/internal/images/unpack"
)

// Stable codes, the same as in Atoll's table of codes.
const (
	CodeInvalid     = "INVALID_REQUEST"
	CodeUnavailable = "IMAGE_UNAVAILABLE"
	CodeCorrupt     = "IMAGE_CORRUPT"
	CodeRefused     = unpack.CodeRefused
	CodeDenied      = "IMAGE_ACCESS_DENIED"
	CodeDiskFull    = "HOST_DISK_FULL"
	CodeInternal    = "INTERNAL"
)

// Error is a failure with a stable code.
type Error = unpack.Error

func failure(code string, cause error, format string, values ...any) error {
	var known *Error
	if errors.As(cause, &known) {
		return cause
	}
	if errors.Is(cause, syscall.ENOSPC) || errors.Is(cause, syscall.EDQUOT) {
		code = CodeDiskFull
	}
	return &Error{Code: code, Text: fmt.Sprintf(format, values...), Cause: cause}
}

// CodeOf is the stable code of any failure of this package.
func CodeOf(err error) string {
	var known *Error
	switch {
	case errors.As(err, &known):
		return known.Code
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return CodeDiskFull
	}
	return CodeInternal
}

// Media types that Atoll reads. Everything else is refused by name.
const (
	typeOCIIndex       = "application/vnd.oci.image.index.v1+json"
	typeDockerIndex    = "application/vnd.docker.distribution.manifest.list.v2+json"
	typeOCIManifest    = "application/vnd.oci.image.manifest.v1+json"
	typeDockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	typeOCIConfig      = "application/vnd.oci.image.config.v1+json"
	typeLayerTar       = "application/vnd.oci.image.layer.v1.tar"
)

// Sizes that documents may have, in bytes. The specification asks registries to accept manifests of 4 MiB.
const (
	documentBytesMax = 4 << 20
	layersMax        = 128
)

// Descriptor points at a blob.
type Descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Platform    *Platform         `json:"platform,omitempty"`
	URLs        []string          `json:"urls,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// Platform is what an image runs on.
type Platform struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
	Variant      string `json:"variant,omitempty"`
}

// index and manifest are read from the same bytes: which of them it is, the media type or the fields say.
type document struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	Manifests     []Descriptor      `json:"manifests,omitempty"`
	Config        Descriptor        `json:"config,omitzero"`
	Layers        []Descriptor      `json:"layers,omitempty"`
	Annotations   map[string]string `json:"annotations,omitempty"`
}

// Config is the part of an image's configuration that Atoll uses.
type Config struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
	Config       struct {
		User       string   `json:"User"`
		Env        []string `json:"Env"`
		Entrypoint []string `json:"Entrypoint"`
		Cmd        []string `json:"Cmd"`
		WorkingDir string   `json:"WorkingDir"`
	} `json:"config"`
	RootFS struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
}

// Image is one image for one platform, by its manifest.
type Image struct {
	Digest   string       `json:"digest"`
	Config   Descriptor   `json:"config"`
	Layers   []Descriptor `json:"layers"`
	manifest []byte
	// base is the ready-made image below the layers, which hosts bring along; empty: there is none.
	base string
	// outside counts the layers that come from elsewhere; those after them were captured in sandboxes of this deployment, on
	// trees with what guests need. Without annotation all come from elsewhere.
	outside int
}

// Annotations of images that were made of layers captured here. Source: src/atoll/images/assembling.py.
const (
	annotationBase    = "dev.atoll.base"
	annotationOutside = "dev.atoll.outside"
)

var digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// ParsePlatform reads `os/architecture[/variant]`; empty: this machine's.
func ParsePlatform(text string) (Platform, error) {
	if text == "" {
		return Platform{OS: "linux", Architecture: runtime.GOARCH}, nil
	}
	parts := strings.Split(text, "/")
	if len(parts) < 2 || len(parts) > 3 || parts[0] == "" || parts[1] == "" {
		return Platform{}, failure(CodeInvalid, nil, "%q is no platform (os/architecture)", text)
	}
	platform := Platform{OS: parts[0], Architecture: parts[1]}
	if len(parts) == 3 {
		platform.Variant = parts[2]
	}
	return platform, nil
}

func (p Platform) String() string { return p.OS + "/" + p.Architecture }

// fits says whether an image for other runs on p. A variant counts only where p names one.
func (p Platform) fits(other *Platform) bool {
	return other != nil && other.OS == p.OS && other.Architecture == p.Architecture && (p.Variant == "" || p.Variant == other.Variant)
}

// parseDocument reads an index or a manifest, and refuses what is neither.
func parseDocument(content []byte) (*document, error) {
	var read document
	if err := json.Unmarshal(content, &read); err != nil {
		return nil, failure(CodeCorrupt, err, "the manifest is not JSON")
	}
	if read.SchemaVersion != 2 {
		return nil, failure(CodeRefused, nil, "the manifest has schema version %d, 2 is supported", read.SchemaVersion)
	}
	if len(read.Manifests) > 0 && len(read.Layers) > 0 {
		return nil, failure(CodeRefused, nil, "the manifest is an index and an image at once")
	}
	return &read, nil
}

func (d *document) isIndex() bool {
	return d.MediaType == typeOCIIndex || d.MediaType == typeDockerIndex || (d.MediaType == "" && d.Config.Digest == "")
}

// choose picks an index's manifest for a platform; one that says no platform is taken when it is alone.
func (d *document) choose(platform Platform) (Descriptor, error) {
	var known []string
	for _, one := range d.Manifests {
		if platform.fits(one.Platform) {
			return one, nil
		}
		if one.Platform != nil {
			known = append(known, one.Platform.String())
		}
	}
	if len(d.Manifests) == 1 && d.Manifests[0].Platform == nil {
		return d.Manifests[0], nil
	}
	return Descriptor{}, failure(CodeUnavailable, nil, "the image has nothing for %s, it has: %s", platform, strings.Join(known, ", "))
}

// imageOf reads an image's manifest and refuses what cannot be unpacked.
func imageOf(digest string, content []byte) (*Image, error) {
	read, err := parseDocument(content)
	if err != nil {
		return nil, err
	}
	if read.isIndex() {
		return nil, failure(CodeRefused, nil, "%s is an index where an image's manifest was expected", digest)
	}
	if len(read.Layers) > layersMax {
		return nil, failure(CodeRefused, nil, "the image has %d layers, at most %d are allowed", len(read.Layers), layersMax)
	}
	for _, one := range append([]Descriptor{read.Config}, read.Layers...) {
		if !digestForm.MatchString(one.Digest) {
			return nil, failure(CodeRefused, nil, "%.80q is no SHA-256 digest", one.Digest)
		}
		if len(one.URLs) > 0 {
			return nil, failure(CodeRefused, nil, "layer %s is to be fetched from elsewhere: foreign layers are not supported", one.Digest)
		}
	}
	for _, layer := range read.Layers {
		if _, err := unpack.CompressionOf(layer.MediaType); err != nil {
			return nil, err
		}
	}
	image := &Image{Digest: digest, Config: read.Config, Layers: read.Layers, manifest: content, outside: len(read.Layers)}
	return image, image.annotate(read.Annotations)
}

// annotate reads what an image says of its making. Images from elsewhere that say so, too, only decide what is in their own tree.
func (i *Image) annotate(said map[string]string) error {
	if base, found := said[annotationBase]; found {
		if !digestForm.MatchString(base) {
			return failure(CodeRefused, nil, "%.80q is no SHA-256 digest", base)
		}
		i.base = base
	}
	if text, found := said[annotationOutside]; found {
		count, err := strconv.Atoi(text)
		if err != nil || count < 0 || count > len(i.Layers) || (i.base != "" && count > 0) {
			return failure(CodeRefused, nil, "the image says that %.20q of its %d layers are from elsewhere", text, len(i.Layers))
		}
		i.outside = count
	}
	return nil
}

// parseConfig reads an image's configuration and compares it with the manifest's layers and the platform.
func parseConfig(content []byte, image *Image, platform Platform) (*Config, error) {
	var config Config
	if err := json.Unmarshal(content, &config); err != nil {
		return nil, failure(CodeCorrupt, err, "the image's configuration is not JSON")
	}
	if len(config.RootFS.DiffIDs) != len(image.Layers) {
		return nil, failure(CodeCorrupt, nil, "the image has %d layers, its configuration says %d", len(image.Layers), len(config.RootFS.DiffIDs))
	}
	for _, one := range config.RootFS.DiffIDs {
		if !digestForm.MatchString(one) {
			return nil, failure(CodeRefused, nil, "%.80q is no SHA-256 digest", one)
		}
	}
	if !platform.fits(&Platform{OS: config.OS, Architecture: config.Architecture, Variant: platform.Variant}) {
		return nil, failure(CodeUnavailable, nil, "the image is for %.40s/%.40s, this needs %s", config.OS, config.Architecture, platform)
	}
	return &config, nil
}

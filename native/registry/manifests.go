package main

import (
	"bytes"
	"context"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/distribution/distribution/v3"
	"github.com/distribution/distribution/v3/registry/storage"
	"github.com/distribution/distribution/v3/registry/storage/driver/filesystem"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// manifestMax is the engine's own limit.
const manifestMax = 4 << 20

var tagText = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`)

// elsewhere are layers that their makers do not permit to be kept here: an image may name them without their being sent.
var elsewhere = map[string]bool{
	"application/vnd.oci.image.layer.nondistributable.v1.tar":      true,
	"application/vnd.oci.image.layer.nondistributable.v1.tar+gzip": true,
	"application/vnd.oci.image.layer.nondistributable.v1.tar+zstd": true,
	"application/vnd.docker.image.rootfs.foreign.diff.tar.gzip":    true,
}

// manifests takes and removes manifests, in the engine's store, where the engine's own handlers know too little: of subjects, of
// layers that are kept elsewhere, and of digests other than SHA-256.
type manifests struct {
	names   names
	store   distribution.Namespace
	touched *touches
	log     *slog.Logger
}

func newManifests(ctx context.Context, config Config, touched *touches, log *slog.Logger) (*manifests, error) {
	files := filesystem.New(filesystem.DriverParameters{RootDirectory: config.Root, MaxThreads: 100})
	store, err := storage.NewRegistry(ctx, files, storage.EnableDelete)
	if err != nil {
		return nil, err
	}
	return &manifests{names: names{config.Root}, store: store, touched: touched, log: log}, nil
}

func (m *manifests) of(ctx context.Context, repository string) (distribution.Repository, distribution.ManifestService, error) {
	named, err := reference.WithName(repository)
	if err != nil {
		return nil, nil, err
	}
	found, err := m.store.Repository(ctx, named)
	if err != nil {
		return nil, nil, err
	}
	service, err := found.Manifests(ctx, storage.SkipLayerVerification())
	return found, service, err
}

// put answers `PUT /v2/NAME/manifests/REFERENCE`; the token was looked at before.
func (m *manifests) put(w http.ResponseWriter, r *http.Request, repository, refersTo string) {
	body, err := io.ReadAll(io.LimitReader(r.Body, manifestMax+1))
	if err != nil {
		refuse(w, http.StatusBadRequest, "MANIFEST_INVALID", "the manifest broke off")
		return
	}
	if len(body) > manifestMax {
		refuse(w, http.StatusRequestEntityTooLarge, "MANIFEST_INVALID", "a manifest has at most 4 MiB")
		return
	}
	ctx := r.Context()
	found, service, err := m.of(ctx, repository)
	if err != nil {
		refuse(w, http.StatusBadRequest, "NAME_INVALID", err.Error())
		return
	}
	content, described, err := distribution.UnmarshalManifest(r.Header.Get("Content-Type"), body)
	if err != nil {
		refuse(w, http.StatusBadRequest, "MANIFEST_INVALID", err.Error())
		return
	}
	said, byDigest, err := wanted(refersTo, body)
	if err != nil {
		refuse(w, http.StatusBadRequest, "DIGEST_INVALID", err.Error())
		return
	}
	// Everything that a manifest names is counted on before it is looked for.
	m.touched.touch(repository, append(digestText.FindAllString(string(body), -1), described.Digest.String())...)
	if missing, err := m.missing(ctx, found, service, content); err != nil {
		m.failed(w, err)
		return
	} else if len(missing) > 0 {
		refuseEach(w, http.StatusBadRequest, "MANIFEST_BLOB_UNKNOWN", "blob unknown to registry", missing)
		return
	}
	if _, err := service.Put(ctx, content); err != nil {
		m.rejected(w, err)
		return
	}
	// Before the tag: whoever sees an image by its name sees what it refers to as well.
	referrer := newReferrer(described.Digest, content, body)
	if referrer != nil {
		if err := m.names.noteReferrer(repository, referrer); err != nil {
			m.failed(w, err)
			return
		}
		w.Header().Set("OCI-Subject", referrer.Subject.String())
	}
	if byDigest {
		err = m.names.alias(repository, revisions, said, described.Digest)
	} else {
		err = found.Tags(ctx).Tag(ctx, refersTo, v1.Descriptor{Digest: described.Digest})
	}
	if err != nil {
		m.failed(w, err)
		return
	}
	m.touched.touch(repository, described.Digest.String())
	w.Header().Set("Location", "/v2/"+repository+"/manifests/"+said.String())
	w.Header().Set("Docker-Content-Digest", said.String())
	w.WriteHeader(http.StatusCreated)
}

// wanted is the digest that a client will ask for what it sends, and whether it named it by that.
func wanted(refersTo string, body []byte) (digest.Digest, bool, error) {
	if tagText.MatchString(refersTo) {
		return digest.FromBytes(body), false, nil
	}
	said, err := digest.Parse(refersTo)
	if err != nil {
		return "", false, err
	}
	if said.Algorithm() != digest.SHA256 && said.Algorithm() != digest.SHA512 {
		return "", false, digest.ErrDigestUnsupported
	}
	if said != said.Algorithm().FromBytes(body) {
		return "", false, errors.New("the manifest is not what its digest says")
	}
	return said, true, nil
}

// missing are the blobs and manifests that a manifest names, should be here, and are not.
func (m *manifests) missing(ctx context.Context, in distribution.Repository, service distribution.ManifestService, content distribution.Manifest) ([]string, error) {
	var missing []string
	for _, one := range content.References() {
		if elsewhere[one.MediaType] {
			continue
		}
		if one.Digest.Validate() != nil {
			missing = append(missing, one.Digest.String())
			continue
		}
		known, err := service.Exists(ctx, one.Digest)
		if err == nil && !known {
			_, err = in.Blobs(ctx).Stat(ctx, one.Digest)
		}
		if errors.Is(err, distribution.ErrBlobUnknown) {
			missing = append(missing, one.Digest.String())
		} else if err != nil {
			return nil, err
		}
	}
	return missing, nil
}

// remove answers `DELETE /v2/NAME/manifests/DIGEST`: the manifest goes under every digest that it has, with its tags.
func (m *manifests) remove(w http.ResponseWriter, r *http.Request, repository string, asked digest.Digest) {
	ctx := r.Context()
	found, service, err := m.of(ctx, repository)
	if err != nil {
		refuse(w, http.StatusBadRequest, "NAME_INVALID", err.Error())
		return
	}
	canonical, err := m.names.canonical(repository, revisions, asked)
	var content distribution.Manifest
	if err == nil {
		content, err = service.Get(ctx, canonical)
	}
	if unknown := (distribution.ErrManifestUnknownRevision{}); errors.Is(err, os.ErrNotExist) || errors.As(err, &unknown) {
		refuse(w, http.StatusNotFound, "MANIFEST_UNKNOWN", "manifest unknown")
		return
	} else if err != nil {
		m.failed(w, err)
		return
	}
	_, body, err := content.Payload()
	if err != nil {
		m.failed(w, err)
		return
	}
	// What is served by a name goes after its name.
	named, err := found.Tags(ctx).Lookup(ctx, v1.Descriptor{Digest: canonical})
	if err != nil {
		m.failed(w, err)
		return
	}
	for _, tag := range named {
		if err := found.Tags(ctx).Untag(ctx, tag); err != nil {
			m.log.Warn("registry.untag.failed", "error", err.Error())
		}
	}
	other := sha512.Sum512(body)
	m.names.forget(repository, revisions, digest.NewDigestFromEncoded(digest.SHA512, hex.EncodeToString(other[:])))
	if err := service.Delete(ctx, canonical); err != nil {
		m.failed(w, err)
		return
	}
	if referrer := newReferrer(canonical, content, body); referrer != nil {
		m.names.forgetReferrer(repository, referrer)
	}
	w.WriteHeader(http.StatusAccepted)
}

// rejected says what the store has against a manifest.
func (m *manifests) rejected(w http.ResponseWriter, err error) {
	if several := (distribution.ErrManifestVerification{}); errors.As(err, &several) {
		refuse(w, http.StatusBadRequest, "MANIFEST_INVALID", err.Error())
		return
	}
	if strings.Contains(err.Error(), "schema version") {
		refuse(w, http.StatusBadRequest, "MANIFEST_INVALID", err.Error())
		return
	}
	m.failed(w, err)
}

func (m *manifests) failed(w http.ResponseWriter, err error) {
	m.log.Error("registry.manifest.failed", "error", err.Error())
	refuse(w, http.StatusInternalServerError, "UNKNOWN", "the registry could not do that")
}

func refuseEach(w http.ResponseWriter, status int, code, message string, details []string) {
	said := make([]map[string]any, len(details))
	for at, detail := range details {
		said[at] = map[string]any{"code": code, "message": message, "detail": map[string]string{"digest": detail}}
	}
	answer(w, status, map[string]any{"errors": said})
}

// kinds of links in a repository of the engine's store.
const (
	layers    = "_layers"
	revisions = "_manifests/revisions"
)

// names is the engine's store as files: which digests a repository's blobs and manifests have. A link is a file that holds the SHA-256
// digest of its content, by which the engine keeps it; the engine's own handlers follow links of other digests.
type names struct{ root string }

func (n names) base() string { return filepath.Join(n.root, "docker", "registry", "v2") }

func (n names) repository(repository string) string {
	return filepath.Join(n.base(), "repositories", filepath.FromSlash(repository))
}

func (n names) link(repository, kind string, of digest.Digest) string {
	return filepath.Join(n.repository(repository), filepath.FromSlash(kind), of.Algorithm().String(), of.Encoded(), "link")
}

// canonical is the digest by which the store keeps what a repository knows by another one. *Errors*: os.ErrNotExist.
func (n names) canonical(repository, kind string, of digest.Digest) (digest.Digest, error) {
	text, err := os.ReadFile(n.link(repository, kind, of))
	if err != nil {
		return "", err
	}
	return digest.Parse(string(text))
}

// alias has a repository know content by one more digest.
func (n names) alias(repository, kind string, by, canonical digest.Digest) error {
	if by == canonical {
		return nil
	}
	return writeWhole(n.link(repository, kind, by), []byte(canonical))
}

func (n names) forget(repository, kind string, by digest.Digest) {
	_ = os.RemoveAll(filepath.Dir(n.link(repository, kind, by)))
}

// writeWhole has a file be there with all of its content, or not at all.
func writeWhole(file string, content []byte) error {
	if known, err := os.ReadFile(file); err == nil && bytes.Equal(known, content) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return err
	}
	unfinished, err := os.CreateTemp(filepath.Dir(file), ".new-*")
	if err != nil {
		return err
	}
	_, err = unfinished.Write(content)
	if err = errors.Join(err, unfinished.Sync(), unfinished.Close()); err == nil {
		err = os.Rename(unfinished.Name(), file)
	}
	if err != nil {
		_ = os.Remove(unfinished.Name())
	}
	return err
}

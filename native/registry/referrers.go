package main

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"github.com/distribution/distribution/v3"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// referrersMax keeps an answer within what clients read; what is beyond it is on the next page.
const referrersMax = 2 << 20

// Referrer is a manifest that names another one as its subject: a signature, a list of what is in an image, an attestation.
type Referrer struct {
	Subject    digest.Digest
	Descriptor v1.Descriptor
}

// newReferrer is what a manifest says of itself as a referrer, or nil.
func newReferrer(canonical digest.Digest, content distribution.Manifest, body []byte) *Referrer {
	var said struct {
		MediaType    string            `json:"mediaType"`
		ArtifactType string            `json:"artifactType"`
		Subject      *v1.Descriptor    `json:"subject"`
		Config       *v1.Descriptor    `json:"config"`
		Annotations  map[string]string `json:"annotations"`
	}
	if json.Unmarshal(body, &said) != nil || said.Subject == nil || said.Subject.Digest.Validate() != nil {
		return nil
	}
	kind, _, err := content.Payload()
	if err != nil {
		return nil
	}
	described := v1.Descriptor{
		MediaType: kind, Digest: canonical, Size: int64(len(body)), ArtifactType: said.ArtifactType, Annotations: said.Annotations,
	}
	if described.ArtifactType == "" && said.Config != nil {
		described.ArtifactType = said.Config.MediaType
	}
	return &Referrer{Subject: said.Subject.Digest, Descriptor: described}
}

func (n names) referrers(repository string) string {
	return filepath.Join(n.repository(repository), "_referrers")
}

func (n names) referrersOf(repository string, subject digest.Digest) string {
	return filepath.Join(n.referrers(repository), subject.Algorithm().String(), subject.Encoded())
}

func (n names) noteReferrer(repository string, one *Referrer) error {
	text, err := json.Marshal(one.Descriptor)
	if err != nil {
		return err
	}
	return writeWhole(filepath.Join(n.referrersOf(repository, one.Subject), one.Descriptor.Digest.Encoded()), text)
}

func (n names) forgetReferrer(repository string, one *Referrer) {
	folder := n.referrersOf(repository, one.Subject)
	_ = os.Remove(filepath.Join(folder, one.Descriptor.Digest.Encoded()))
	_ = os.Remove(folder) // when it was the last one
}

// list answers `GET /v2/NAME/referrers/DIGEST`: what was pushed and is still there, in the order of digests. An unknown subject has none.
func (m *manifests) list(w http.ResponseWriter, r *http.Request, repository string, subject digest.Digest) {
	entries, err := os.ReadDir(m.names.referrersOf(repository, subject))
	if err != nil && !os.IsNotExist(err) {
		m.failed(w, err)
		return
	}
	query := r.URL.Query()
	kind, after := query.Get("artifactType"), query.Get("last")
	index := v1.Index{MediaType: v1.MediaTypeImageIndex, Manifests: []v1.Descriptor{}}
	index.SchemaVersion = 2
	size, previous := 0, ""
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), ".") || entry.Name() <= after {
			continue
		}
		text, described := m.described(repository, subject, entry.Name())
		if described == nil || kind != "" && described.ArtifactType != kind {
			continue
		}
		if size += len(text); size > referrersMax && previous != "" {
			query.Set("last", previous)
			w.Header().Set("Link", "<"+r.URL.Path+"?"+query.Encode()+`>; rel="next"`)
			break
		}
		index.Manifests = append(index.Manifests, *described)
		previous = entry.Name()
	}
	if kind != "" {
		w.Header().Set("OCI-Filters-Applied", "artifactType")
	}
	w.Header().Set("Content-Type", v1.MediaTypeImageIndex)
	w.WriteHeader(http.StatusOK)
	if r.Method != http.MethodHead {
		_ = json.NewEncoder(w).Encode(index)
	}
}

// described is what is noted of a referrer whose manifest is still there.
func (m *manifests) described(repository string, subject digest.Digest, encoded string) ([]byte, *v1.Descriptor) {
	text, err := os.ReadFile(filepath.Join(m.names.referrersOf(repository, subject), encoded))
	if err != nil {
		return nil, nil
	}
	var described v1.Descriptor
	if json.Unmarshal(text, &described) != nil || described.Digest.Validate() != nil {
		return nil, nil
	}
	if _, err := os.Stat(m.names.link(repository, revisions, described.Digest)); err != nil {
		return nil, nil
	}
	return text, &described
}

// sweep removes notes of referrers that are gone, and links by other digests to content that is. It answers how many there were.
func (n names) sweep(dryRun bool) (int, error) {
	gone := 0
	base := filepath.Join(n.base(), "repositories")
	err := filepath.WalkDir(base, func(path string, entry os.DirEntry, err error) error {
		if err != nil || !entry.IsDir() || !strings.HasPrefix(entry.Name(), "_") {
			return ignoreMissing(err)
		}
		repository, err := filepath.Rel(base, filepath.Dir(path))
		if err != nil {
			return err
		}
		switch entry.Name() {
		case "_referrers":
			gone += n.sweepReferrers(repository, path, dryRun)
		case "_layers":
			gone += n.sweepAliases(filepath.Join(path, "sha512"), dryRun)
		case "_manifests":
			gone += n.sweepAliases(filepath.Join(path, "revisions", "sha512"), dryRun)
		}
		return filepath.SkipDir
	})
	return gone, ignoreMissing(err)
}

func (n names) sweepReferrers(repository, folder string, dryRun bool) int {
	gone := 0
	notes, _ := filepath.Glob(filepath.Join(folder, "*", "*", "*"))
	for _, note := range notes {
		manifest := digest.NewDigestFromEncoded(digest.SHA256, filepath.Base(note))
		if _, err := os.Stat(n.link(repository, revisions, manifest)); !os.IsNotExist(err) {
			continue
		}
		gone++
		if !dryRun {
			_ = os.Remove(note)
			_ = os.Remove(filepath.Dir(note))
		}
	}
	return gone
}

// sweepAliases removes links by other digests whose content's own link is gone.
func (n names) sweepAliases(folder string, dryRun bool) int {
	gone := 0
	links, _ := filepath.Glob(filepath.Join(folder, "*", "link"))
	for _, link := range links {
		text, err := os.ReadFile(link)
		if err != nil {
			continue
		}
		own := filepath.Join(filepath.Dir(folder), "sha256", strings.TrimPrefix(string(text), "sha256:"), "link")
		if _, err := os.Stat(own); !os.IsNotExist(err) {
			continue
		}
		gone++
		if !dryRun {
			_ = os.RemoveAll(filepath.Dir(link))
		}
	}
	return gone
}

func ignoreMissing(err error) error {
	if os.IsNotExist(err) {
		return nil
	}
	return err
}

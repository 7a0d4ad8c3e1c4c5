package main

import (
	"crypto/sha512"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

func (w *world) manifest(name string, body []byte) *http.Response {
	w.t.Helper()
	made := w.do("PUT", "/v2/team/app/manifests/"+name, manifestKind, body)
	if made.StatusCode != http.StatusCreated {
		w.t.Fatalf("manifest %s: %d", name, made.StatusCode)
	}
	return made
}

// about is a manifest of a kind of artifact, with a subject.
func (w *world) about(subject, kind string) []byte {
	config := w.blob("{}")
	return fmt.Appendf(nil, `{"schemaVersion":2,"mediaType":"%s","artifactType":"%s","config":{"mediaType":"application/vnd.oci.empty.v1+json",`+
		`"digest":"%s","size":2},"layers":[],"subject":{"mediaType":"%s","digest":"%s","size":7},"annotations":{"of":"%s"}}`,
		manifestKind, kind, config, manifestKind, subject, kind)
}

func (w *world) referrers(subject, query string) (v1.Index, http.Header) {
	w.t.Helper()
	said := httptest.NewRecorder()
	w.server.Config.Handler.ServeHTTP(said, httptest.NewRequestWithContext(w.t.Context(), "GET", "/v2/team/app/referrers/"+subject+query, nil))
	var index v1.Index
	if err := json.Unmarshal(said.Body.Bytes(), &index); err != nil || said.Code != http.StatusOK || index.MediaType != v1.MediaTypeImageIndex {
		w.t.Fatalf("referrers: %d %s", said.Code, said.Body)
	}
	return index, said.Header()
}

func TestReferrersAreListedByKindAndGoWithTheirManifests(t *testing.T) {
	w := newWorld(t, nil)
	image := manifest(w.blob("image"), 5)
	subject := w.manifest("one", image).Header.Get("Docker-Content-Digest")
	if found, _ := w.referrers(subject, ""); len(found.Manifests) != 0 || found.Manifests == nil {
		t.Fatalf("of nobody: %+v", found)
	}
	made := w.manifest(sum(w.about(subject, "a/signature")), w.about(subject, "a/signature"))
	if said := made.Header.Get("OCI-Subject"); said != subject {
		t.Fatalf("OCI-Subject: %q", said)
	}
	list := w.about(subject, "a/list")
	w.manifest("listed", list)
	found, _ := w.referrers(subject, "")
	if len(found.Manifests) != 2 || found.Manifests[0].Annotations["of"] == "" || found.Manifests[0].Size == 0 {
		t.Fatalf("both: %+v", found)
	}
	filtered, header := w.referrers(subject, "?artifactType=a/list")
	if len(filtered.Manifests) != 1 || filtered.Manifests[0].Digest.String() != sum(list) || header.Get("OCI-Filters-Applied") != "artifactType" {
		t.Fatalf("filtered: %+v %v", filtered, header)
	}
	// A referrer keeps what it needs; what is deleted is listed no more, and its note goes.
	w.age()
	if done := w.collect(false); len(done.Blobs) != 0 || done.Links != 0 {
		t.Fatalf("a referrer's blobs were taken: %+v", done)
	}
	if gone := w.do("DELETE", "/v2/team/app/manifests/"+sum(list), "", nil); gone.StatusCode != http.StatusAccepted {
		t.Fatalf("delete: %d", gone.StatusCode)
	}
	if left, _ := w.referrers(subject, ""); len(left.Manifests) != 1 || left.Manifests[0].ArtifactType != "a/signature" {
		t.Fatalf("left: %+v", left)
	}
	if said := w.do("GET", "/v2/team/app/referrers/nonsense", "", nil); said.StatusCode != http.StatusBadRequest {
		t.Fatalf("nonsense: %d", said.StatusCode)
	}
}

func TestANoteOfAReferrerThatIsGoneIsCollected(t *testing.T) {
	w := newWorld(t, nil)
	body := w.about("sha256:"+strings.Repeat("1", 64), "a/signature")
	w.manifest("one", body)
	// As a kill between the two steps of a deletion leaves it.
	w.touched.names.forget("team/app", revisions, digest.FromBytes(body))
	if found, _ := w.referrers("sha256:"+strings.Repeat("1", 64), ""); len(found.Manifests) != 0 {
		t.Fatalf("still listed: %+v", found)
	}
	if done := w.collect(true); done.Links != 1 {
		t.Fatalf("dry: %+v", done)
	}
	if done := w.collect(false); done.Links != 1 {
		t.Fatalf("first: %+v", done)
	}
	if done := w.collect(false); done.Links != 0 {
		t.Fatalf("twice: %+v", done)
	}
}

func TestManyReferrersComeInPages(t *testing.T) {
	w := newWorld(t, nil)
	subject := "sha256:" + strings.Repeat("2", 64)
	var all []string
	for at := range 5 {
		body := w.about(subject, "a/"+strings.Repeat(fmt.Sprint(at), 500_000))
		w.manifest(fmt.Sprintf("t%d", at), body)
		all = append(all, sum(body))
	}
	slices.Sort(all)
	var got []string
	for query, pages := "", 0; ; pages++ {
		found, header := w.referrers(subject, query)
		for _, one := range found.Manifests {
			got = append(got, one.Digest.String())
		}
		next := header.Get("Link")
		if next == "" {
			if pages == 0 || !slices.Equal(all, got) {
				t.Fatalf("%d pages, %v instead of %v", pages, got, all)
			}
			return
		}
		query = next[strings.IndexByte(next, '?'):strings.IndexByte(next, '>')]
	}
}

func sum512(content []byte) string {
	whole := sha512.Sum512(content)
	return "sha512:" + hex.EncodeToString(whole[:])
}

func (w *world) blob512(content string) string {
	w.t.Helper()
	begun := w.do("POST", "/v2/team/app/blobs/uploads/", "", nil)
	done := w.do("PUT", begun.Header.Get("Location")+"&digest="+sum512([]byte(content)), "application/octet-stream", []byte(content))
	if done.StatusCode != http.StatusCreated || done.Header.Get("Docker-Content-Digest") != sum512([]byte(content)) {
		w.t.Fatalf("upload: %d %v", done.StatusCode, done.Header)
	}
	return sum512([]byte(content))
}

func TestContentByAnotherDigestIsKeptAsLongAsItIsNamed(t *testing.T) {
	w := newWorld(t, nil)
	used, loose := w.blob512("used"), w.blob512("loose")
	body := manifest(used, 4)
	made := w.manifest(sum512(body), body)
	if made.Header.Get("Docker-Content-Digest") != sum512(body) {
		t.Fatalf("digest: %v", made.Header)
	}
	w.age()
	if done := w.collect(false); len(done.Blobs) != 1 || done.Blobs[0] != sum([]byte("loose")) {
		t.Fatalf("collection: %+v", done)
	}
	if said := w.do("HEAD", "/v2/team/app/blobs/"+loose, "", nil); said.StatusCode != http.StatusNotFound {
		t.Fatalf("loose: %d", said.StatusCode)
	}
	for _, path := range []string{"blobs/" + used, "manifests/" + sum512(body), "manifests/" + sum(body)} {
		if said := w.do("GET", "/v2/team/app/"+path, "", nil); said.StatusCode != http.StatusOK {
			t.Fatalf("%s: %d", path, said.StatusCode)
		}
	}
	// Gone by one name is gone by the other.
	if gone := w.do("DELETE", "/v2/team/app/manifests/"+sum(body), "", nil); gone.StatusCode != http.StatusAccepted {
		t.Fatalf("delete: %d", gone.StatusCode)
	}
	for _, path := range []string{"manifests/" + sum512(body), "manifests/" + sum(body)} {
		if said := w.do("GET", "/v2/team/app/"+path, "", nil); said.StatusCode != http.StatusNotFound {
			t.Fatalf("%s after its end: %d", path, said.StatusCode)
		}
	}
	w.age()
	if done := w.collect(false); len(done.Blobs) != 2 {
		t.Fatalf("what only it had named, and itself: %+v", done)
	}
}

func TestABlobIsMountedByAnotherDigest(t *testing.T) {
	w := newWorld(t, nil)
	known := w.blob512("known")
	for from, want := range map[string]int{"team/app": http.StatusCreated, "team/none": http.StatusAccepted} {
		said := w.do("POST", "/v2/team/other/blobs/uploads/?from="+from+"&mount="+known, "", nil)
		if said.StatusCode != want {
			t.Fatalf("mount from %s: %d", from, said.StatusCode)
		}
	}
	if said := w.do("GET", "/v2/team/other/blobs/"+known, "", nil); said.StatusCode != http.StatusOK {
		t.Fatalf("mounted: %d", said.StatusCode)
	}
}

func TestAManifestThatNamesWhatIsNotThereIsRefused(t *testing.T) {
	w := newWorld(t, nil)
	config := w.blob("{}")
	with := func(kind string) []byte {
		return fmt.Appendf(nil, `{"schemaVersion":2,"mediaType":"%s","config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"%s","size":2},`+
			`"layers":[{"mediaType":"%s","digest":"sha256:%s","size":3}]}`, manifestKind, config, kind, strings.Repeat("3", 64))
	}
	for kind, want := range map[string]int{
		"application/vnd.oci.image.layer.v1.tar":                    http.StatusBadRequest,
		"application/vnd.oci.image.layer.nondistributable.v1.tar":   http.StatusCreated,
		"application/vnd.docker.image.rootfs.foreign.diff.tar.gzip": http.StatusCreated,
	} {
		if said := w.do("PUT", "/v2/team/app/manifests/one", manifestKind, with(kind)); said.StatusCode != want {
			t.Fatalf("%s: %d", kind, said.StatusCode)
		}
	}
	for _, name := range []string{"sha256:" + strings.Repeat("4", 64), "sha384:" + strings.Repeat("4", 96), "sha256:4", "-x"} {
		if said := w.do("PUT", "/v2/team/app/manifests/"+name, manifestKind, manifest(config, 2)); said.StatusCode != http.StatusBadRequest {
			t.Fatalf("%s: %d", name, said.StatusCode)
		}
	}
}

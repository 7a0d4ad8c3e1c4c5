package main

import (
	"context"
	"net/http"
	"slices"
	"strings"

	"github.com/distribution/distribution/v3"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// renamed is the engine's answer about a blob that the client knows by another digest than the engine's.
type renamed struct {
	http.ResponseWriter
	by digest.Digest
}

func (a *renamed) WriteHeader(status int) {
	header := a.Header()
	if engines := header.Get("Docker-Content-Digest"); engines != "" {
		header.Set("Docker-Content-Digest", a.by.String())
		if where := header.Get("Location"); where != "" {
			header.Set("Location", strings.Replace(where, engines, a.by.String(), 1))
		}
	}
	a.ResponseWriter.WriteHeader(status)
}

// Unwrap lets the engine send files as fast as it can.
func (a *renamed) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// by wraps an answer where a client asks by another digest than the engine's.
func by(w http.ResponseWriter, asked string) http.ResponseWriter {
	if known, err := digest.Parse(asked); err == nil && known.Algorithm() != digest.Canonical {
		return &renamed{w, known}
	}
	return w
}

// mounted leads a mount by another digest to the blob as the engine keeps it; what is returned notes the digest where it was mounted.
func (g *guard) mounted(r *http.Request, repository string) func(status int) {
	query := r.URL.Query()
	asked, err := digest.Parse(query.Get("mount"))
	if err != nil || asked.Algorithm() == digest.Canonical || query.Get("from") == "" {
		return func(int) {}
	}
	canonical, err := g.names.canonical(query.Get("from"), layers, asked)
	if err != nil {
		// There is nothing to mount: the client sends it.
		query.Del("mount")
		r.URL.RawQuery = query.Encode()
		return func(int) {}
	}
	query.Set("mount", canonical.String())
	r.URL.RawQuery = query.Encode()
	return func(status int) {
		if status == http.StatusCreated {
			_ = g.names.alias(repository, layers, asked, canonical)
		}
	}
}

// seen is an answer whose status somebody wants to know.
type seen struct {
	http.ResponseWriter
	status int
}

func (a *seen) WriteHeader(status int) {
	a.status = status
	a.ResponseWriter.WriteHeader(status)
}

func (a *seen) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// canonically is the store as the engine's collection sees it: manifests name what they need by the digests that the store keeps it by.
type canonically struct {
	distribution.Namespace
	names names
}

func (c canonically) Enumerate(ctx context.Context, take func(string) error) error {
	return c.Namespace.(distribution.RepositoryEnumerator).Enumerate(ctx, take)
}

func (c canonically) Repository(ctx context.Context, name reference.Named) (distribution.Repository, error) {
	found, err := c.Namespace.Repository(ctx, name)
	if err != nil {
		return nil, err
	}
	return canonicalRepository{found, c.names}, nil
}

type canonicalRepository struct {
	distribution.Repository
	names names
}

func (c canonicalRepository) Manifests(ctx context.Context, options ...distribution.ManifestServiceOption) (distribution.ManifestService, error) {
	found, err := c.Repository.Manifests(ctx, options...)
	if err != nil {
		return nil, err
	}
	return canonicalManifests{found, c.names, c.Named().Name()}, nil
}

type canonicalManifests struct {
	distribution.ManifestService
	names      names
	repository string
}

func (c canonicalManifests) Enumerate(ctx context.Context, take func(digest.Digest) error) error {
	return c.ManifestService.(distribution.ManifestEnumerator).Enumerate(ctx, take)
}

func (c canonicalManifests) Get(ctx context.Context, of digest.Digest, options ...distribution.ManifestServiceOption) (distribution.Manifest, error) {
	found, err := c.ManifestService.Get(ctx, of, options...)
	if err != nil {
		return nil, err
	}
	return canonicalManifest{found, c}, nil
}

type canonicalManifest struct {
	distribution.Manifest
	in canonicalManifests
}

func (c canonicalManifest) References() []v1.Descriptor {
	named := slices.Clone(c.Manifest.References())
	for at := range named {
		for _, kind := range []string{revisions, layers} {
			if canonical, err := c.in.names.canonical(c.in.repository, kind, named[at].Digest); err == nil {
				named[at].Digest = canonical
				break
			}
		}
	}
	return named
}

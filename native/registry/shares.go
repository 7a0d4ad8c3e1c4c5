package main

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
)

// countedFor is how long what a team keeps is not counted anew; what it sends meanwhile is added.
const countedFor = 10 * time.Second

// limitCode is what a team is told that keeps as much as it may. It never changes.
const limitCode = "TEAM_STORAGE_LIMIT"

// Share is how much a team may keep, as control has said in the token: in all of its repositories, with what is being sent.
type Share struct {
	Team  string `json:"team"`
	Bytes *int64 `json:"storage_bytes"` // nil: as much as there is room for
}

// shareOf reads a token that was verified before; nothing of it: there is no limit.
func shareOf(r *http.Request) Share {
	var said struct {
		Atoll Share `json:"atoll"`
	}
	parts := strings.Split(strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "), ".")
	if len(parts) == 3 {
		if text, err := base64.RawURLEncoding.DecodeString(parts[1]); err == nil {
			_ = json.Unmarshal(text, &said)
		}
	}
	return said.Atoll
}

// shares counts what teams keep.
type shares struct {
	names   names
	gate    sync.Mutex
	counted map[string]*counted
}

type counted struct {
	gate  sync.Mutex
	bytes int64
	at    time.Time
}

func newShares(names names) *shares { return &shares{names: names, counted: map[string]*counted{}} }

// portion is what one request may add to what its team keeps.
type portion struct {
	its   *counted // nil: as much as there is room for
	limit int64
}

// add says whether so much more still fits; what fits is counted. Of several at once none is counted on what another has taken.
func (p portion) add(bytes int64) bool {
	if p.its == nil {
		return true
	}
	p.its.gate.Lock()
	defer p.its.gate.Unlock()
	if p.its.bytes+bytes > p.limit {
		return false
	}
	p.its.bytes += bytes
	return true
}

// of is what a team may still send; ok is false when a body of that length (-1: nobody says) does not fit.
func (s *shares) of(share Share, length int64) (portion, bool) {
	if share.Bytes == nil || share.Team == "" {
		return portion{}, true
	}
	s.gate.Lock()
	its := s.counted[share.Team]
	if its == nil {
		its = &counted{}
		s.counted[share.Team] = its
	}
	s.gate.Unlock()
	its.gate.Lock()
	defer its.gate.Unlock()
	if time.Since(its.at) > countedFor {
		its.bytes, its.at = s.kept(share.Team), time.Now()
	}
	return portion{its, *share.Bytes}, its.bytes < *share.Bytes && its.bytes+max(length, 0) <= *share.Bytes
}

// kept counts each blob of a team's repositories once, and what was sent of those that are not whole yet.
func (s *shares) kept(team string) int64 {
	blobs := map[string]bool{}
	var bytes int64
	for _, folder := range s.names.ofTeam(team) {
		_ = filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return nil
			}
			switch {
			case entry.Name() == "link" && (strings.Contains(path, "/_layers/sha256/") || strings.Contains(path, "/_manifests/revisions/sha256/")):
				blobs[filepath.Base(filepath.Dir(path))] = true
			case entry.Name() == "data" && strings.Contains(path, "/_uploads/"):
				if info, err := entry.Info(); err == nil {
					bytes += info.Size()
				}
			}
			return nil
		})
	}
	for hex := range blobs {
		if digest.NewDigestFromEncoded(digest.SHA256, hex).Validate() != nil {
			continue
		}
		if info, err := os.Stat(filepath.Join(s.names.base(), "blobs", "sha256", hex[:2], hex, "data")); err == nil {
			bytes += info.Size()
		}
	}
	return bytes
}

// others are repositories outside of a team's own directory that it has made: E2B's names. Who made one is kept in it.
const others = "e2b/custom-envs"

// ofTeam are the directories of a team's repositories.
func (n names) ofTeam(team string) []string {
	if !nameable(team) {
		return nil
	}
	found := []string{n.repository(team)}
	made, _ := os.ReadDir(n.repository(others))
	for _, one := range made {
		folder := filepath.Join(n.repository(others), one.Name())
		if _, err := os.Lstat(filepath.Join(folder, "_team", team)); err == nil {
			found = append(found, folder)
		}
	}
	return found
}

// nameable says whether a team's name can be a file's.
func nameable(team string) bool {
	return team != "" && team != "." && team != ".." && !strings.ContainsAny(team, "/\x00")
}

// teams are those that keep anything.
func (n names) teams() []string {
	found := map[string]bool{}
	own, _ := os.ReadDir(filepath.Join(n.base(), "repositories"))
	for _, one := range own {
		found[one.Name()] = one.Name() != filepath.Dir(others)
	}
	notes, _ := filepath.Glob(filepath.Join(n.repository(others), "*", "_team", "*"))
	for _, note := range notes {
		found[filepath.Base(note)] = true
	}
	var named []string
	for team, is := range found {
		if is {
			named = append(named, team)
		}
	}
	slices.Sort(named)
	return named
}

// ServeHTTP answers `GET /-/usage`: what each team keeps, in bytes. *Cost*: a walk over all links.
func (s *shares) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	teams := map[string]int64{}
	for _, team := range s.names.teams() {
		teams[team] = s.kept(team)
	}
	answer(w, http.StatusOK, map[string]any{"teams": teams})
}

func (n names) noteTeam(repository, team string) error {
	if !nameable(team) || !strings.HasPrefix(repository, others+"/") {
		return nil
	}
	folder := filepath.Join(n.repository(repository), "_team")
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(folder, team), nil, 0o600)
}

// errFull ends a body that goes on beyond what its team may keep, and errDisk one beyond what the disk may.
var (
	errFull = errors.New("the team keeps as much as it may")
	errDisk = errors.New("the disk is full")
)

// lookBytes are how much of a body is taken between two looks at the disk: its length may not have been said, and others write there, too.
const lookBytes = 8 << 20

// measured is a body of which no more is taken than its team may keep, and the disk has room for.
type measured struct {
	io.ReadCloser
	portion  portion
	spare    func() bool
	unlooked int64
	full     bool
	disk     bool
}

func (m *measured) Read(into []byte) (int, error) {
	n, err := m.ReadCloser.Read(into)
	if n > 0 && !m.portion.add(int64(n)) {
		m.full = true
		return 0, errFull
	}
	if m.unlooked += int64(n); m.unlooked >= lookBytes {
		m.unlooked = 0
		if !m.spare() {
			m.disk = true
			return 0, errDisk
		}
	}
	return n, err
}

// limited says of a body that was cut why that is, and of one that could not be written that the disk is full: the engine only knows
// that something broke off.
type limited struct {
	http.ResponseWriter
	body *measured
	mute bool
}

func (l *limited) WriteHeader(status int) {
	switch {
	case l.body.full && status >= http.StatusBadRequest:
		l.mute = true
		refuseShare(l.ResponseWriter)
	case l.body.disk && status >= http.StatusBadRequest, status >= http.StatusInternalServerError && !l.body.spare():
		l.mute = true
		refuseDisk(l.ResponseWriter)
	default:
		l.ResponseWriter.WriteHeader(status)
	}
}

func (l *limited) Write(content []byte) (int, error) {
	if l.mute {
		return len(content), nil
	}
	return l.ResponseWriter.Write(content)
}

func refuseShare(w http.ResponseWriter) {
	w.Header().Del("Content-Length")
	refuse(w, http.StatusForbidden, limitCode, "the team keeps as much in the registry as it may: delete images, and ask an operator to collect (atoll registry gc), or for more (limits.team.registry)")
}

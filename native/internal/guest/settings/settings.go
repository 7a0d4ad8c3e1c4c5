// Package settings holds what the latest init gave this guest: environment, access token and defaults.
//
// Values are immutable once stored. A request reads one snapshot and works with it to its end, so an init that
// comes in the middle of a request never mixes two generations of settings.
package settings

import (
	"crypto/subtle"
	"sync/atomic"
)

// Values is one init's worth of settings.
type Values struct {
	Env            map[string]string
	AccessToken    Secret
	DefaultUser    string
	DefaultWorkdir string
	// Revision names the init: it is said again in every hello.
	Revision int64
}

// Secret is a string that never shows itself in logs or errors. The empty secret means "none is set".
type Secret string

// String hides the content.
func (Secret) String() string { return "***" }

// GoString hides the content from %#v.
func (Secret) GoString() string { return "***" }

// IsSet says whether a token was given at all.
func (s Secret) IsSet() bool { return s != "" }

// Equals compares in constant time.
func (s Secret) Equals(other string) bool {
	return subtle.ConstantTimeCompare([]byte(s), []byte(other)) == 1
}

// Reveal returns the content, for signing.
func (s Secret) Reveal() string { return string(s) }

// Store is the one mutable place: the latest values, or none before the first init and while the guest is asleep.
type Store struct {
	latest atomic.Pointer[Values]
	asleep atomic.Pointer[Values]
}

// Replace makes v the latest values. The caller must not change v afterwards.
func (s *Store) Replace(v *Values) {
	s.latest.Store(v)
	s.asleep.Store(nil)
}

// Sleep sets the values aside: until Wake or the next Replace it is as before the first init. Idempotency: said again, the same.
func (s *Store) Sleep() {
	if v := s.latest.Swap(nil); v != nil {
		s.asleep.Store(v)
	}
}

// Wake brings back what Sleep has set aside.
func (s *Store) Wake() {
	if v := s.asleep.Swap(nil); v != nil {
		s.latest.CompareAndSwap(nil, v)
	}
}

// Forget drops all values: what they were given for is another's.
func (s *Store) Forget() {
	s.latest.Store(nil)
	s.asleep.Store(nil)
}

// Latest returns the values of the last init, or nil before the first.
func (s *Store) Latest() *Values { return s.latest.Load() }

// Current returns the values of the last init, or empty values before the first.
func (s *Store) Current() *Values {
	if v := s.latest.Load(); v != nil {
		return v
	}
	return &Values{}
}

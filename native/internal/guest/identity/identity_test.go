package identity

import (
	"encoding/base64"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"atoll.local/native/internal/guest/users"
)

// TestAGroupMayStandBehindTheUser: as in an image's USER; what E2B's clients send has none.
func TestAGroupMayStandBehindTheUser(t *testing.T) {
	place := t.TempDir()
	passwd, group := filepath.Join(place, "passwd"), filepath.Join(place, "group")
	if err := os.WriteFile(passwd, []byte("user:x:1000:1000::/home/user:/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(group, []byte("user:x:1000:\ndisk:x:6:\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	asked := &Identity{Users: users.NewDirectory(passwd, group)}
	for _, one := range []struct {
		said     string
		uid, gid int
	}{
		{"user:", 1000, 1000},
		{"user:disk:", 1000, 6},
		{"1234:4321:", 1234, 4321},
		{"1234:", 1234, 0},
		// No group, but a password, which nobody asks for.
		{"user:disk", 1000, 1000},
		{"user:nowhere:", -1, -1},
		{"nobody-here:", -1, -1},
	} {
		request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/process.Process/Start", nil)
		request.Header.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(one.said)))
		found, err := asked.Caller(request)
		if checked := asked.CheckBasic(request); (checked == nil) != (err == nil) {
			t.Errorf("%s: %v is not %v", one.said, checked, err)
		}
		if one.uid < 0 {
			if err == nil {
				t.Errorf("%s is %+v", one.said, found)
			}
			continue
		}
		if err != nil || found.UID != one.uid || found.GID != one.gid {
			t.Errorf("%s is %+v, %v", one.said, found, err)
		}
	}
}

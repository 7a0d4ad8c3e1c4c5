// Package identity answers "who is asking": the user that a request acts as.
//
// Knowing the access token is what admits a request; the user name only says as whom it acts, so it needs no proof.
package identity

import (
	"net/http"
	"strings"

	"atoll.local/native/internal/guest/rpc"
	"atoll.local/native/internal/guest/settings"
	"atoll.local/native/internal/guest/users"
)

// Identity resolves user names with the defaults of the latest init.
type Identity struct {
	Users    *users.Directory
	Settings *settings.Store
}

// CheckBasic fails when the request names a user that does not exist; calls that need no user still refuse such a one.
//
// Errors: unauthenticated.
func (i *Identity) CheckBasic(r *http.Request) error {
	name, ok := named(r)
	if !ok {
		return nil
	}
	if _, err := i.Users.Lookup(name); err != nil {
		return rpc.Errorf(rpc.Unauthenticated, "invalid username: '%s'", name)
	}
	return nil
}

// Caller returns the user of an rpc: the one in `Authorization: Basic base64("user:")` or `"user:group:"`, else the default user.
//
// Errors: unauthenticated.
func (i *Identity) Caller(r *http.Request) (*users.User, error) {
	if name, ok := named(r); ok {
		user, err := i.Users.Lookup(name)
		if err != nil {
			return nil, rpc.Errorf(rpc.Unauthenticated, "invalid username: '%s'", name)
		}
		return user, nil
	}
	name := i.Settings.Current().DefaultUser
	if name == "" {
		return nil, rpc.Errorf(rpc.Unauthenticated, "no user specified")
	}
	user, err := i.Users.Lookup(name)
	if err != nil {
		return nil, rpc.Errorf(rpc.Unauthenticated, "invalid default user: '%s'", name)
	}
	return user, nil
}

// named is whom the request names: a user, whose name has no colon, and a group where one stands between two of them.
func named(r *http.Request) (string, bool) {
	name, rest, ok := r.BasicAuth()
	if group, closed := strings.CutSuffix(rest, ":"); closed && group != "" {
		name += ":" + group
	}
	return name, ok
}

package control

import (
	"crypto/ed25519"
	"errors"
	"net/http"
	"slices"
	"strings"

	"github.com/golang-jwt/jwt/v5"
)

// The scopes that a token can carry.
const (
	scopeControl = "control"
	scopeConnect = "connect"
)

// claims are what a token is signed for. There are no times: the guest's clock is not trusted, and the nonce is new for
// each placement.
type claims struct {
	Sandbox    string   `json:"sub"`
	Placement  string   `json:"plc"`
	Generation int64    `json:"gen"`
	Nonce      string   `json:"non"`
	Scopes     []string `json:"scp"`
}

// The Claims interface of the library wants the registered claims; none of them is used.
func (claims) GetExpirationTime() (*jwt.NumericDate, error) { return nil, nil }
func (claims) GetIssuedAt() (*jwt.NumericDate, error)       { return nil, nil }
func (claims) GetNotBefore() (*jwt.NumericDate, error)      { return nil, nil }
func (claims) GetIssuer() (string, error)                   { return "", nil }
func (c claims) GetSubject() (string, error)                { return c.Sandbox, nil }
func (claims) GetAudience() (jwt.ClaimStrings, error)       { return nil, nil }

var errToken = errors.New("a valid control token is required")

// authorize checks the request's bearer token against the configuration and the wanted scope.
func (c *Config) authorize(r *http.Request, scope string) error {
	got, err := c.claimed(r)
	if err != nil || !got.names(c.identity()) || !slices.Contains(got.Scopes, scope) {
		return errToken
	}
	return nil
}

// names says whether a token is for this very guest.
func (c *claims) names(who identity) bool {
	return identity{c.Sandbox, c.Placement, c.Generation, c.Nonce} == who
}

// claimed is what the request's bearer token says, once the deployment's signature holds.
func (c *Config) claimed(r *http.Request) (*claims, error) {
	scheme, token, found := strings.Cut(r.Header.Get("Authorization"), " ")
	if !found || !strings.EqualFold(scheme, "Bearer") {
		return nil, errToken
	}
	var got claims
	parser := jwt.NewParser(jwt.WithValidMethods([]string{jwt.SigningMethodEdDSA.Alg()}), jwt.WithoutClaimsValidation())
	parsed, err := parser.ParseWithClaims(strings.TrimSpace(token), &got, func(*jwt.Token) (any, error) {
		return ed25519.PublicKey(c.PublicKey), nil
	})
	if err != nil || !parsed.Valid {
		return nil, errToken
	}
	return &got, nil
}

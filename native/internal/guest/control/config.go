// Package control is the guest's side for its own host: identity, hello, init and connections to local ports.
//
// Every call carries a token that the deployment signed for exactly this placement. The guest knows only the public key
// and the nonce, so nothing inside the sandbox can make such a token.
package control

import (
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
)

// ConfigVariable is the environment variable that carries the configuration.
const ConfigVariable = "ATOLL_GUEST_CONFIG"

// Config is what the driver tells the guest when it starts it. Unknown fields are ignored.
type Config struct {
	SandboxID   string `json:"sandbox_id"`
	PlacementID string `json:"placement_id"`
	Generation  int64  `json:"generation"`
	Nonce       string `json:"nonce"`
	PublicKey   []byte `json:"-"`
	Listen      string `json:"listen"`
	// Command is the image's entrypoint, started once after the first init.
	Command []string `json:"command"`
	// CommandUser is whom it runs as, beginning in the sandbox's working directory; empty: as root, in /.
	CommandUser string `json:"command_user"`
	// Ready says by its status whether the command has got so far that the sandbox is of use; it is run, as the same user, until
	// it ends well.
	Ready []string `json:"ready"`
	// PidsMax bounds processes and threads inside, where the guest has a control group hierarchy of its own (gVisor).
	PidsMax int `json:"pids_max"`
	// PlacementFile is where the host shows, read-only, whose guest this machine is now; empty: it is never another's than at its
	// start. A guest that was restored as another sandbox's finds its new name there.
	PlacementFile string `json:"placement_file"`
	// OwnsMachine lets init set clock and host name although the guest is not PID 1 (a service in a virtual machine).
	OwnsMachine bool `json:"owns_machine"`
}

// ParseConfig reads and checks the JSON configuration.
func ParseConfig(text []byte) (*Config, error) {
	var raw struct {
		Config
		PublicKey string `json:"public_key"`
	}
	if err := json.Unmarshal(text, &raw); err != nil {
		return nil, fmt.Errorf("guest config is not valid JSON: %w", err)
	}
	c := raw.Config
	key, err := base64.StdEncoding.DecodeString(raw.PublicKey)
	if err != nil || len(key) != ed25519.PublicKeySize {
		return nil, errors.New("guest config: public_key must be 32 bytes in base64")
	}
	c.PublicKey = key
	switch {
	case c.SandboxID == "" || c.PlacementID == "" || c.Nonce == "":
		return nil, errors.New("guest config: sandbox_id, placement_id and nonce are required")
	case c.Generation < 1:
		return nil, errors.New("guest config: generation must be at least 1")
	}
	if c.Listen == "" {
		c.Listen = "0.0.0.0:49983"
	}
	if _, err := netip.ParseAddrPort(c.Listen); err != nil {
		return nil, fmt.Errorf("guest config: listen: %w", err)
	}
	return &c, nil
}

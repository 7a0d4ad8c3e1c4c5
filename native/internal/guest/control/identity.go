package control

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
)

// placementBytesMax bounds what is read of the placement file: it holds four short names.
const placementBytesMax = 4 << 10

// identity is whose guest this is: all of it must match before anybody takes it for that.
type identity struct {
	SandboxID   string `json:"sandbox_id"`
	PlacementID string `json:"placement_id"`
	Generation  int64  `json:"generation"`
	Nonce       string `json:"nonce"`
}

func (c *Config) identity() identity {
	return identity{c.SandboxID, c.PlacementID, c.Generation, c.Nonce}
}

// authorize is Config.authorize, of the guest that this is now. A token of the deployment's that is another guest's is
// the sign that this one may have been restored from that: memory says who it was, the host's file who it is.
func (c *Control) authorize(r *http.Request, scope string) error {
	got, err := c.config.Load().claimed(r)
	if err != nil {
		return err
	}
	if !got.names(c.config.Load().identity()) {
		c.lookWhoIAm()
	}
	return c.config.Load().authorize(r, scope)
}

// lookWhoIAm takes the name that the host's file shows. Under another name nothing of the last init counts any more:
// environment and access token were another sandbox's.
func (c *Control) lookWhoIAm() {
	c.initMu.Lock()
	defer c.initMu.Unlock()
	known := c.config.Load()
	now, ok := readPlacement(known.PlacementFile)
	if !ok || now == known.identity() {
		return
	}
	c.settings.Forget()
	renamed := *known
	renamed.SandboxID, renamed.PlacementID = now.SandboxID, now.PlacementID
	renamed.Generation, renamed.Nonce = now.Generation, now.Nonce
	c.config.Store(&renamed)
}

func readPlacement(path string) (identity, bool) {
	if path == "" {
		return identity{}, false
	}
	file, err := os.Open(path)
	if err != nil {
		return identity{}, false
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, placementBytesMax))
	if err != nil {
		return identity{}, false
	}
	return parsePlacement(text)
}

// parsePlacement reads a placement file; false when it does not say all that it should.
func parsePlacement(text []byte) (identity, bool) {
	var who identity
	if json.Unmarshal(text, &who) != nil {
		return identity{}, false
	}
	return who, who.SandboxID != "" && who.PlacementID != "" && who.Nonce != "" && who.Generation > 0
}

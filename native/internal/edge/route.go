package edge

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"atoll.local/native/internal/node"
)

// Route is control's word about the way to one sandbox. It is never changed once it is in the table.
type Route struct {
	SandboxID          string  `json:"sandbox_id"`
	Revision           int64   `json:"revision"`
	Generation         int64   `json:"generation"`
	PlacementID        string  `json:"placement_id"`
	HostID             string  `json:"host_id"`
	State              string  `json:"state"`
	Reach              Reach   `json:"reach"`
	GuestPort          int     `json:"guest_port"`
	PublicTraffic      bool    `json:"public_traffic"`
	TrafficTokenSHA256 *string `json:"traffic_token_sha256"`
	ConnectToken       string  `json:"connect_token"`
	AutoResume         bool    `json:"auto_resume"`
	MaskRequestHost    *string `json:"mask_request_host"`

	tokenDigest []byte // of TrafficTokenSHA256; nil when there is none
}

// Reach says how to get to a placement.
type Reach struct {
	Kind string `json:"kind"`
	IP   string `json:"ip"`
}

const (
	stateReady  = "ready"
	reachDirect = "direct"
)

// settle checks a route and fills in what has a default.
func (r *Route) settle() error {
	if !validID(r.SandboxID) {
		return errors.New("route without a valid sandbox_id")
	}
	if r.TrafficTokenSHA256 != nil {
		digest, err := hex.DecodeString(*r.TrafficTokenSHA256)
		if err != nil || len(digest) != 32 {
			return fmt.Errorf("route of %s: traffic_token_sha256 is no SHA-256", r.SandboxID)
		}
		r.tokenDigest = digest
	}
	if r.State != stateReady {
		return nil
	}
	if r.GuestPort == 0 {
		r.GuestPort = publicGuestPort
	}
	if r.GuestPort < 1 || r.GuestPort > 65535 {
		return fmt.Errorf("route of %s: guest_port out of range", r.SandboxID)
	}
	if r.Reach.Kind != reachDirect {
		return fmt.Errorf("route of %s: reach %q is not known here", r.SandboxID, r.Reach.Kind)
	}
	if _, err := netip.ParseAddr(r.Reach.IP); err != nil {
		return fmt.Errorf("route of %s: reach has no address", r.SandboxID)
	}
	return nil
}

func (r *Route) address() node.Address {
	return node.Address{
		SandboxID:    r.SandboxID,
		PlacementID:  r.PlacementID,
		Generation:   r.Generation,
		IP:           r.Reach.IP,
		GuestPort:    r.GuestPort,
		ConnectToken: r.ConnectToken,
	}
}

func parseRoute(text []byte) (*Route, error) {
	route := new(Route)
	if err := json.Unmarshal(text, route); err != nil {
		return nil, err
	}
	if err := route.settle(); err != nil {
		return nil, err
	}
	return route, nil
}

// change is one line of the stream.
type change struct {
	Type        string            `json:"type"`
	Cursor      int64             `json:"cursor"`
	Incarnation string            `json:"incarnation"`
	Routes      []json.RawMessage `json:"routes"`
	Route       json.RawMessage   `json:"route"`
	SandboxID   string            `json:"sandbox_id"`
	Revision    int64             `json:"revision"`
	Reason      string            `json:"reason"`
}

const (
	changeSnapshot = "snapshot"
	changeRoute    = "route"
	changeGone     = "gone"
	changePing     = "ping"
)

func parseChange(line []byte) (change, error) {
	var c change
	if err := json.Unmarshal(line, &c); err != nil {
		return change{}, err
	}
	switch c.Type {
	case changeGone:
		if !validID(c.SandboxID) {
			return change{}, errors.New("gone without a valid sandbox_id")
		}
	case changeRoute:
		if len(c.Route) == 0 {
			return change{}, errors.New("route line without a route")
		}
	case "":
		return change{}, errors.New("line without a type")
	}
	return c, nil
}

package node

import (
	"context"
	"net"
	"net/http"
	"strconv"
	"time"
)

// Wire is the protocol spoken to a port.
type Wire int

// What a port can be spoken to in.
const (
	HTTP1 Wire = iota
	H2C        // HTTP/2 without TLS and with prior knowledge, as gRPC servers want it
)

// pools are made on first use: an idle sandbox costs none.
type pools struct {
	guest, user, h2c *http.Transport
}

func (p pools) drop() {
	for _, pool := range []*http.Transport{p.guest, p.user, p.h2c} {
		if pool != nil {
			pool.CloseIdleConnections()
		}
	}
}

// RoundTrip sends a request to a port of the placement. The request's URL gets its scheme and host here.
//
// Errors: ErrEnded and *DialError (nothing was sent); others (something may have been).
func (p *Placement) RoundTrip(request *http.Request, port int, wire Wire) (*http.Response, error) {
	pool, err := p.pool(port, wire)
	if err != nil {
		return nil, err
	}
	request.URL.Scheme = "http"
	request.URL.Host = net.JoinHostPort(p.address.IP, strconv.Itoa(port))
	response, err := pool.RoundTrip(request)
	if err != nil && p.Ended() {
		return nil, ErrEnded
	}
	return response, err
}

func (p *Placement) pool(port int, wire Wire) (*http.Transport, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended.Load() {
		return nil, ErrEnded
	}
	slot, idle := &p.pools.user, p.options.UserIdle
	switch {
	case wire == H2C:
		slot = &p.pools.h2c
	case port == p.address.GuestPort:
		slot, idle = &p.pools.guest, p.options.GuestIdle
	}
	if *slot == nil {
		*slot = p.newTransport(wire, idle)
	}
	return *slot, nil
}

func (p *Placement) newTransport(wire Wire, idle time.Duration) *http.Transport {
	protocols := new(http.Protocols)
	if wire == H2C {
		protocols.SetUnencryptedHTTP2(true)
	} else {
		protocols.SetHTTP1(true)
	}
	return &http.Transport{
		Protocols: protocols,
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			_, text, err := net.SplitHostPort(address)
			if err != nil {
				return nil, err
			}
			port, err := strconv.Atoi(text)
			if err != nil {
				return nil, err
			}
			conn, err := p.Dial(ctx, port)
			if err != nil {
				return nil, err
			}
			return conn, nil
		},
		DisableCompression:     true,
		MaxIdleConnsPerHost:    32,
		IdleConnTimeout:        idle,
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: 256 << 10,
	}
}

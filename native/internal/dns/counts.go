package dns

import (
	"net/netip"
	"sync"
)

// counts limits what is open at once, per client and altogether.
type counts struct {
	perClient, total int

	mu       sync.Mutex
	all      int
	byClient map[netip.Addr]int
}

func newCounts(perClient, total int) *counts {
	return &counts{perClient: perClient, total: total, byClient: make(map[netip.Addr]int)}
}

func (c *counts) enter(client netip.Addr) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.all >= c.total || c.byClient[client] >= c.perClient {
		return false
	}
	c.all++
	c.byClient[client]++
	return true
}

func (c *counts) leave(client netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all--
	if c.byClient[client]--; c.byClient[client] <= 0 {
		delete(c.byClient, client)
	}
}

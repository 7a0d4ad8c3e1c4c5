package edge

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"

	"atoll.local/native/internal/node"
)

// serveSandbox carries a request to a port of a sandbox, or says why not.
func (e *Edge) serveSandbox(w http.ResponseWriter, r *http.Request, t target) {
	if r.Method == http.MethodConnect {
		writeJSON(w, http.StatusMethodNotAllowed, sandboxError{Message: "CONNECT is not served", Code: http.StatusMethodNotAllowed})
		return
	}
	found, refusal := e.resolve(r.Context(), t.sandboxID, clientAddress(r))
	if refusal != nil {
		found, refusal = e.rouse(r, t, refusal)
	}
	// Two rounds at most: what could not be reached is asked about once, and tried again only where control says
	// something new.
	carried := false
	for attempt := 0; refusal == nil; attempt++ {
		if refusal = admit(found.route, r, t); refusal != nil {
			break
		}
		var retry bool
		carried = true
		refusal, retry = e.carry(w, r, t, found)
		if refusal == nil {
			return
		}
		if !retry || attempt > 0 {
			break
		}
		fresh, verdict := e.reconsider(r.Context(), found)
		if verdict != nil {
			refusal = verdict
			break
		}
		if fresh == found || fresh.placement == found.placement {
			break
		}
		found, refusal = fresh, nil
	}
	e.metrics.refused(refusal.Code)
	if carried {
		part(w, r)
	}
	refusal.write(w, r)
}

// resolve finds the ready route of a sandbox; a miss is a question to control.
func (e *Edge) resolve(ctx context.Context, id, client string) (*entry, *sandboxError) {
	found, verdict := e.table.find(id)
	if verdict != unknown {
		return settled(id, found)
	}
	err := e.asker.ask(ctx, id, client)
	found, verdict = e.table.find(id)
	if verdict != unknown {
		return settled(id, found)
	}
	var refusal sandboxError
	switch {
	case err == nil && found != nil:
		return settled(id, found)
	case err == nil || errors.Is(err, errNotFound):
		refusal = notFound(id)
	case errors.Is(err, errRate):
		refusal = sandboxError{SandboxID: id, Message: "Too many requests for unknown sandboxes", Code: http.StatusTooManyRequests}
	default:
		// Control is silent. What it said last is better than nothing; where it never said anything, nobody knows.
		if found, verdict = e.table.lastKnown(id); verdict != unknown {
			return settled(id, found)
		}
		refusal = notYetKnown(id)
	}
	return nil, &refusal
}

func settled(id string, found *entry) (*entry, *sandboxError) {
	if found == nil || !found.ready() {
		refusal := notFound(id)
		return nil, &refusal
	}
	return found, nil
}

// reconsider asks control about a sandbox that could not be reached. Without an answer the old one stands.
func (e *Edge) reconsider(ctx context.Context, found *entry) (*entry, *sandboxError) {
	id := found.route.SandboxID
	if newer, verdict := e.table.find(id); verdict != unknown && newer != found {
		return settled(id, newer)
	}
	if err := e.asker.refresh(ctx, id); errors.Is(err, errNotFound) {
		refusal := notFound(id)
		return nil, &refusal
	}
	fresh, verdict := e.table.lastKnown(id)
	if verdict == unknown {
		return found, nil
	}
	return settled(id, fresh)
}

// admit checks what the edge answers for: routes of the guest that are not for clients, and the traffic token.
func admit(route *Route, r *http.Request, t target) *sandboxError {
	if forGuest(route, t.port) {
		if reserved(t.url.EscapedPath(), guestInternal) {
			refusal := internalRoute(t.url.Path)
			return &refusal
		}
		return nil // the guest has a token of its own
	}
	if route.PublicTraffic {
		return nil
	}
	token := r.Header.Get(headerTrafficToken)
	var refusal sandboxError
	switch {
	case token == "":
		refusal = trafficTokenMissing(route.SandboxID)
	case !tokenMatches(route.tokenDigest, token):
		refusal = trafficTokenInvalid(route.SandboxID)
	default:
		return nil
	}
	return &refusal
}

func tokenMatches(digest []byte, token string) bool {
	given := sha256.Sum256([]byte(token))
	return len(digest) == len(given) && subtle.ConstantTimeCompare(digest, given[:]) == 1
}

func forGuest(route *Route, port int) bool { return port == publicGuestPort || port == route.GuestPort }

// carry takes a request to a placement and its answer back. It returns a refusal when the client has had no answer;
// retry says that nothing was sent and that control may know better.
func (e *Edge) carry(w http.ResponseWriter, r *http.Request, t target, found *entry) (refusal *sandboxError, retry bool) {
	route, placement := found.route, found.placement
	ctx, lease, err := placement.Enter(r.Context())
	if err != nil {
		return e.explain(err, route, t.port)
	}
	e.metrics.open.Add(1)
	defer func() {
		lease.Leave()
		e.metrics.open.Add(-1)
	}()
	x := newExchange(ctx, w, r, t.url, &e.metrics.bytesOut)
	defer x.finish()
	lease.OnEnd(x.interrupt)
	port, wire := t.port, node.HTTP1
	if forGuest(route, port) {
		port = route.GuestPort
	} else {
		dress(x.out, r, route, port)
		if r.ProtoMajor == 2 && isGRPC(r.Header) {
			wire = node.H2C
			x.share()
		}
	}
	response, err := x.send(func(out *http.Request) (*http.Response, error) { return placement.RoundTrip(out, port, wire) })
	if err != nil {
		x.giveUpAlone()
		refusal, retry = e.explain(err, route, t.port)
		return refusal, retry && x.untouched()
	}
	e.metrics.carried(response.StatusCode)
	x.ending = lease.OnEnd
	if err := x.deliver(response); err != nil {
		x.giveUpAlone()
		lease.Leave()
		x.unhurried()
		if placement.Ended() {
			err = node.ErrEnded
		}
		refusal, _ = e.explain(err, route, t.port)
		return refusal, false
	}
	lease.Leave()
	x.unhurried()
	return nil, false
}

// dress makes a request fit for a server of the user's: what was meant for the edge is taken off.
func dress(out, in *http.Request, route *Route, port int) {
	for _, name := range []string{headerID, headerPort, headerTrafficToken} {
		out.Header.Del(name)
	}
	forwarded(out.Header, in)
	if mask := route.MaskRequestHost; mask != nil && *mask != "" {
		out.Host = strings.ReplaceAll(*mask, "${PORT}", strconv.Itoa(port))
	}
}

func isGRPC(header http.Header) bool {
	kind := textproto.TrimString(header.Get("Content-Type"))
	return kind == "application/grpc" || strings.HasPrefix(kind, "application/grpc+") || strings.HasPrefix(kind, "application/grpc;")
}

// explain turns a failure before the answer into what the client is told.
func (e *Edge) explain(err error, route *Route, port int) (refusal *sandboxError, retry bool) {
	var answer sandboxError
	var dial *node.DialError
	switch {
	case errors.Is(err, node.ErrEnded):
		answer, retry = notFound(route.SandboxID), true
	case errors.Is(err, node.ErrFull):
		answer = tooMany(route.SandboxID, e.config.Limits.PerSandbox)
	case errors.As(err, &dial):
		// A closed port is everyday life for a user's server, but the guest's own port never is.
		answer = portClosed(route.SandboxID, port)
		retry = forGuest(route, port) || !dial.Refused
	default:
		answer = brokenAnswer(route.SandboxID, port)
	}
	return &answer, retry
}

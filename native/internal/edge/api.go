package edge

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	headerChanged = "Atoll-Changed"

	// An answer waits so long for the table to catch up with what it says.
	holdMax = 50 * time.Millisecond

	// Below the 5 s after which control's server closes an idle connection: a request must not meet a closing one.
	controlIdle = 4 * time.Second

	// Requests wait for control to come back only when it has answered this recently: a restart, not an outage.
	restartWindow = 10 * time.Second
)

// errNoDial marks a failure before anything was sent.
type errNoDial struct{ cause error }

func (e *errNoDial) Error() string { return e.cause.Error() }
func (e *errNoDial) Unwrap() error { return e.cause }

// api carries requests to control.
type api struct {
	base      *url.URL
	transport *http.Transport
	patience  time.Duration
	patient   chan struct{}
	lastHeard atomic.Int64 // unix nanoseconds of control's last answer
}

func newAPI(base *url.URL, limits Limits) *api {
	dialer := &net.Dialer{Timeout: 2 * time.Second, KeepAlive: 30 * time.Second}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	return &api{
		base: base,
		transport: &http.Transport{
			Protocols: protocols,
			DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				conn, err := dialer.DialContext(ctx, network, address)
				if err != nil {
					return nil, &errNoDial{cause: err}
				}
				return conn, nil
			},
			DisableCompression:     true,
			MaxIdleConnsPerHost:    64,
			IdleConnTimeout:        controlIdle,
			ExpectContinueTimeout:  time.Second,
			ResponseHeaderTimeout:  time.Duration(limits.ControlAnswerS) * time.Second,
			MaxResponseHeaderBytes: 256 << 10,
		},
		patience: time.Duration(limits.ControlPatienceMS) * time.Millisecond,
		patient:  make(chan struct{}, limits.ControlPatienceMax),
	}
}

// serveAPI carries a request to control and its answer back.
func (e *Edge) serveAPI(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodConnect || reserved(r.URL.EscapedPath(), controlInternal) {
		apiError{Code: "NOT_FOUND", Message: "There is nothing here"}.write(w, http.StatusNotFound)
		return
	}
	x := newExchange(r.Context(), w, r, r.URL, &e.metrics.bytesOut)
	defer x.finish()
	x.out.URL.Scheme, x.out.URL.Host = e.api.base.Scheme, e.api.base.Host
	x.before = func(response *http.Response) { e.hold(r.Context(), response) }
	forwarded(x.out.Header, r)
	response, err := e.api.send(x)
	if err != nil {
		e.controlLost(x, err)
		return
	}
	e.api.lastHeard.Store(time.Now().UnixNano())
	e.metrics.apiCarried(response.StatusCode)
	if err := x.deliver(response); err != nil {
		e.controlLost(x, err)
	}
}

// controlLost answers in control's stead.
func (e *Edge) controlLost(x *exchange, err error) {
	x.giveUpAlone()
	e.metrics.apiFailed.Add(1)
	part(x.writer, x.in)
	e.explainControl(x.writer, x.in, err)
}

// send retries, within its patience, while control's port is closed: then nothing has been sent, and a restart of control
// is all over in a moment.
func (a *api) send(x *exchange) (*http.Response, error) {
	response, err := x.send(a.transport.RoundTrip)
	var noDial *errNoDial
	if err == nil || a.patience <= 0 || !errors.As(err, &noDial) || !a.heardLately() {
		return response, err
	}
	select {
	case a.patient <- struct{}{}:
		defer func() { <-a.patient }()
	default:
		return nil, err
	}
	deadline := time.Now().Add(a.patience)
	for pause := 20 * time.Millisecond; time.Now().Before(deadline) && errors.As(err, &noDial) && x.untouched(); pause = min(2*pause, 200*time.Millisecond) {
		select {
		case <-time.After(pause):
		case <-x.out.Context().Done():
			return nil, x.out.Context().Err()
		}
		x.again()
		if response, err = x.send(a.transport.RoundTrip); err == nil {
			return response, nil
		}
	}
	return nil, err
}

func (a *api) heardLately() bool {
	return time.Since(time.Unix(0, a.lastHeard.Load())) < restartWindow
}

// explainControl says what is known: whether control has had the request or not.
func (e *Edge) explainControl(w http.ResponseWriter, r *http.Request, err error) {
	var noDial *errNoDial
	harmless := r.Method == http.MethodGet || r.Method == http.MethodHead || r.Method == http.MethodOptions
	if errors.As(err, &noDial) || harmless {
		w.Header().Set("Retry-After", "1")
		w.Header().Set("Should-Retry", "true")
		apiError{
			Code: "CONTROL_UNAVAILABLE", Message: "Control cannot be reached now; nothing has happened",
			Hint: "Try again in a second; sandboxes that run are not affected",
		}.write(w, http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Should-Retry", "false")
	apiError{
		Code: "CONTROL_OUTCOME_UNKNOWN", Message: "Control took the request and broke off before it answered",
		Hint: "Look whether it has happened before you try again, or repeat it with the same Idempotency-Key",
	}.write(w, http.StatusBadGateway)
}

// hold keeps an answer back until the table knows what the answer says, so that the client's next request finds it so.
func (e *Edge) hold(ctx context.Context, response *http.Response) {
	values := response.Header[headerChanged]
	if len(values) == 0 {
		return
	}
	response.Header.Del(headerChanged)
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, holdMax)
	defer cancel()
	var waits sync.WaitGroup
	for id, revision := range changes(values) {
		waits.Go(func() { e.catchUp(ctx, id, revision) })
	}
	waits.Wait()
	e.metrics.held(time.Since(began))
}

// catchUp waits for the stream or, where it is broken, asks; what cannot be had in time is asked for with the next use.
func (e *Edge) catchUp(ctx context.Context, id string, revision int64) {
	if !e.table.isSynced() {
		_ = e.asker.refresh(ctx, id)
	}
	if e.table.await(ctx, id, revision) {
		return
	}
	e.metrics.holdsMissed.Add(1)
	e.asker.forget(id)
	e.table.want(id, revision)
}

// changes reads `<sandbox>:<revision>` pairs, separated by commas; what it cannot read it leaves out.
func changes(values []string) map[string]int64 {
	pairs := make(map[string]int64)
	for _, value := range values {
		for pair := range strings.SplitSeq(value, ",") {
			id, text, found := strings.Cut(strings.TrimSpace(pair), ":")
			revision, err := strconv.ParseInt(text, 10, 64)
			if found && err == nil && revision >= 0 && validID(id) && len(pairs) < 256 {
				pairs[id] = max(pairs[id], revision)
			}
		}
	}
	return pairs
}

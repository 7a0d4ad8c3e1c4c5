package edge

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"atoll.local/native/internal/version"
)

// metrics are counters of fixed number: no label is ever a client's word.
type metrics struct {
	started time.Time

	connections        atomic.Int64
	connectionsRefused atomic.Int64
	requests           atomic.Int64
	requestsRefused    atomic.Int64
	open               atomic.Int64 // of requests, those that a sandbox has
	bytesOut           atomic.Int64
	sandboxByClass     [6]atomic.Int64 // by the first digit of the guest's status
	apiByClass         [6]atomic.Int64
	refusedByStatus    [600]atomic.Int64
	apiFailed          atomic.Int64
	panics             atomic.Int64

	wakes, wakesFailed                               atomic.Int64
	asksFound, asksNotFound, asksFailed, asksRefused atomic.Int64

	cursor       atomic.Int64
	streamBreaks atomic.Int64
	badRoutes    atomic.Int64

	holds, holdsMissed, holdNanos atomic.Int64
}

func class(status int) int {
	if status < 100 || status > 599 {
		return 0
	}
	return status / 100
}

func (m *metrics) carried(status int)    { m.sandboxByClass[class(status)].Add(1) }
func (m *metrics) apiCarried(status int) { m.apiByClass[class(status)].Add(1) }

func (m *metrics) refused(status int) {
	if class(status) > 0 {
		m.refusedByStatus[status].Add(1)
	}
}

func (m *metrics) held(duration time.Duration) {
	m.holds.Add(1)
	m.holdNanos.Add(int64(duration))
}

// page writes Prometheus' text format.
type page struct{ *bufio.Writer }

func (p page) head(name, kind, help string) {
	_, _ = fmt.Fprintf(p, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind)
}

func (p page) one(name, kind, help string, value any) {
	p.head(name, kind, help)
	_, _ = fmt.Fprintf(p, "%s %v\n", name, value)
}

func (p page) labelled(name, label, value string, count int64) {
	_, _ = fmt.Fprintf(p, "%s{%s=%q} %d\n", name, label, value, count)
}

func (e *Edge) writeMetrics(w io.Writer) {
	m := e.metrics
	p := page{bufio.NewWriter(w)}
	defer func() { _ = p.Flush() }()
	p.head("atoll_edge_info", "gauge", "The program's version.")
	p.labelled("atoll_edge_info", "version", version.Version, 1)
	p.one("atoll_edge_routes", "gauge", "Sandboxes in the table.", e.table.size())
	p.one("atoll_edge_synced", "gauge", "1 while control's stream of routes is followed.", number(e.table.isSynced()))
	p.one("atoll_edge_stream_cursor", "gauge", "Position of the last line of the stream.", m.cursor.Load())
	p.one("atoll_edge_stream_breaks_total", "counter", "Streams of routes that ended or did not begin.", m.streamBreaks.Load())
	p.one("atoll_edge_routes_refused_total", "counter", "Routes that could not be used.", m.badRoutes.Load())
	p.one("atoll_edge_connections", "gauge", "Client connections, with upgraded ones.", m.connections.Load())
	p.one("atoll_edge_connections_refused_total", "counter", "Client connections above the limit.", m.connectionsRefused.Load())
	p.one("atoll_edge_requests_open", "gauge", "Requests that are open, with streams.", m.requests.Load())
	p.one("atoll_edge_requests_refused_total", "counter", "Requests above the limit.", m.requestsRefused.Load())
	p.one("atoll_edge_sandbox_requests_open", "gauge", "Requests and streams that sandboxes have open.", m.open.Load())
	p.one("atoll_edge_answer_bytes_total", "counter", "Bytes of answers carried to clients.", m.bytesOut.Load())
	p.classes("atoll_edge_sandbox_requests_total", "Requests that a sandbox answered, by class of status.", &m.sandboxByClass)
	p.classes("atoll_edge_api_requests_total", "Requests that control answered, by class of status.", &m.apiByClass)
	p.one("atoll_edge_api_failed_total", "counter", "API requests that control did not answer.", m.apiFailed.Load())
	p.head("atoll_edge_refused_total", "counter", "Sandbox requests that the edge answered itself, by status.")
	for status := range m.refusedByStatus {
		if count := m.refusedByStatus[status].Load(); count > 0 {
			p.labelled("atoll_edge_refused_total", "status", strconv.Itoa(status), count)
		}
	}
	p.head("atoll_edge_wakes_total", "counter", "Sandboxes that traffic had resumed, by result.")
	p.labelled("atoll_edge_wakes_total", "result", "asked", m.wakes.Load())
	p.labelled("atoll_edge_wakes_total", "result", "failed", m.wakesFailed.Load())
	p.head("atoll_edge_asks_total", "counter", "Look-ups at control, by result.")
	p.labelled("atoll_edge_asks_total", "result", "found", m.asksFound.Load())
	p.labelled("atoll_edge_asks_total", "result", "not_found", m.asksNotFound.Load())
	p.labelled("atoll_edge_asks_total", "result", "failed", m.asksFailed.Load())
	p.labelled("atoll_edge_asks_total", "result", "refused", m.asksRefused.Load())
	p.head("atoll_edge_hold_seconds", "summary", "Time that answers of the API were held for the table.")
	_, _ = fmt.Fprintf(p, "atoll_edge_hold_seconds_sum %g\natoll_edge_hold_seconds_count %d\n",
		time.Duration(m.holdNanos.Load()).Seconds(), m.holds.Load())
	p.one("atoll_edge_holds_missed_total", "counter", "Answers let go before the table had caught up.", m.holdsMissed.Load())
	p.one("atoll_edge_panics_total", "counter", "Requests that ended in a fault of the edge.", m.panics.Load())
	p.one("process_start_time_seconds", "gauge", "Unix time at which the process started.", m.started.Unix())
	p.one("process_resident_memory_bytes", "gauge", "Resident memory.", residentBytes())
	p.one("go_goroutines", "gauge", "Goroutines.", runtime.NumGoroutine())
}

func (p page) classes(name, help string, counts *[6]atomic.Int64) {
	p.head(name, "counter", help)
	for digit := 1; digit < len(counts); digit++ {
		p.labelled(name, "class", strconv.Itoa(digit)+"xx", counts[digit].Load())
	}
}

func number(yes bool) int {
	if yes {
		return 1
	}
	return 0
}

func residentBytes() int64 {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0
	}
	pages, _ := strconv.ParseInt(fields[1], 10, 64)
	return pages * int64(os.Getpagesize())
}

// adminHandler answers health and metrics.
func (e *Edge) adminHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, struct {
			Name    string `json:"name"`
			Version string `json:"version"`
			Healthy bool   `json:"healthy"`
			Routes  int    `json:"routes"`
			Synced  bool   `json:"synced"`
		}{"edge", version.Version, !e.draining.Load(), e.table.size(), e.table.isSynced()})
	})
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		e.writeMetrics(w)
	})
	return mux
}

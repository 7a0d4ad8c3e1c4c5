package dns

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"time"

	"atoll.local/native/internal/version"
)

// ServeAdmin answers /healthz and /metrics on an address until stop is called.
func (f *Forwarder) ServeAdmin(address string) (stop func(), err error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		_ = json.NewEncoder(w).Encode(map[string]any{
			"name": "dns", "version": version.Version, "healthy": true,
			"resolving": !f.failing.Load(), "upstreams": len(f.upstreams.current()),
		})
	})
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_, _ = fmt.Fprint(w, "# HELP atoll_dns_questions_total Questions by what became of them.\n# TYPE atoll_dns_questions_total counter\n")
		for result, count := range map[string]int64{
			"answered": f.stats.Answered.Load(), "failed": f.stats.Failed.Load(),
			"refused": f.stats.Refused.Load(), "malformed": f.stats.Malformed.Load(),
		} {
			_, _ = fmt.Fprintf(w, "atoll_dns_questions_total{result=%q} %d\n", result, count)
		}
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, MaxHeaderBytes: 16 << 10}
	go func() { _ = server.Serve(listener) }()
	return func() { _ = server.Close() }, nil
}

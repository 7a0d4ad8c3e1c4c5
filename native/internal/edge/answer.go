package edge

import (
	"encoding/json"
	"fmt"
	"html/template"
	"net/http"
	"strconv"
	"strings"
)

// sandboxError is an answer that the edge gives in a sandbox's stead. The SDKs look for these very texts, and their
// field order is the one that E2B's proxy writes.
type sandboxError struct {
	SandboxID       string `json:"sandboxId,omitempty"`
	Message         string `json:"message"`
	Path            string `json:"path,omitempty"`
	Port            int    `json:"port,omitempty"`
	Code            int    `json:"code"`
	ConnectionLimit int    `json:"connectionLimit,omitempty"`
}

func notFound(id string) sandboxError {
	return sandboxError{SandboxID: id, Message: "The sandbox was not found", Code: http.StatusBadGateway}
}

func portClosed(id string, port int) sandboxError {
	return sandboxError{
		SandboxID: id, Message: "The sandbox is running but port is not open", Port: port, Code: http.StatusBadGateway,
	}
}

func brokenAnswer(id string, port int) sandboxError {
	return sandboxError{
		SandboxID: id, Message: "The server in the sandbox closed the connection without an answer", Port: port,
		Code: http.StatusBadGateway,
	}
}

func tooMany(id string, limit int) sandboxError {
	return sandboxError{
		SandboxID: id, ConnectionLimit: limit, Code: http.StatusTooManyRequests,
		Message: fmt.Sprintf("The sandbox has too many concurrent incoming connections (limit: %d)", limit),
	}
}

func internalRoute(path string) sandboxError {
	return sandboxError{
		Message: "This endpoint is reserved for the host and is not reachable through the sandbox URL",
		Path:    path, Code: http.StatusNotFound,
	}
}

func trafficTokenMissing(id string) sandboxError {
	return sandboxError{
		SandboxID: id, Code: http.StatusForbidden,
		Message: "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing",
	}
}

func trafficTokenInvalid(id string) sandboxError {
	return sandboxError{
		SandboxID: id, Code: http.StatusForbidden,
		Message: "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is invalid",
	}
}

func notAwake(id string) sandboxError {
	return sandboxError{SandboxID: id, Code: http.StatusServiceUnavailable, Message: "The sandbox is paused and cannot be resumed now; try again"}
}

func notYetKnown(id string) sandboxError {
	return sandboxError{
		SandboxID: id, Code: http.StatusServiceUnavailable,
		Message: "Control cannot be asked for the sandbox now; try again",
	}
}

var errorPage = template.Must(template.New("error").Parse(`<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{.Status}}</title><style>
body{font:16px/1.5 system-ui,sans-serif;margin:0;min-height:100vh;display:grid;place-items:center;background:#f6f8fa;color:#1f2328}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}
main{max-width:34rem;padding:2rem}h1{font-size:1.4rem}dl{display:grid;grid-template-columns:auto 1fr;gap:.2rem 1rem}
dt{opacity:.65}dd{margin:0;font-family:ui-monospace,monospace;overflow-wrap:anywhere}
</style></head><body><main><h1>{{.Error.Message}}</h1><dl>
{{- with .Error.SandboxID}}<dt>Sandbox</dt><dd>{{.}}</dd>{{end -}}
{{- with .Error.Port}}<dt>Port</dt><dd>{{.}}</dd>{{end -}}
<dt>Status</dt><dd>{{.Status}}</dd></dl>{{with .Hint}}<p>{{.}}</p>{{end}}</main></body></html>
`))

var hints = map[int]string{
	http.StatusTooManyRequests:    "Close some connections to it and load the page again.",
	http.StatusServiceUnavailable: "Load the page again in a moment.",
}

func (e sandboxError) hint() string {
	switch {
	case e.Port != 0:
		return "Start a server on this port in the sandbox, then load the page again."
	case e.Code == http.StatusBadGateway:
		return "It may have ended, or be paused."
	}
	return hints[e.Code]
}

// write answers a page to a browser and JSON to everybody else.
func (e sandboxError) write(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("Cache-Control", "no-store")
	// The guest would allow it, and without it a page in a browser cannot read why it failed.
	header.Set("Access-Control-Allow-Origin", "*")
	if e.Code == http.StatusServiceUnavailable || e.Code == http.StatusTooManyRequests {
		header.Set("Retry-After", "1")
	}
	if e.Code == http.StatusServiceUnavailable {
		header.Set("Should-Retry", "true")
	}
	if wantsPage(r) {
		header.Set("Content-Type", "text/html; charset=utf-8")
		w.WriteHeader(e.Code)
		status := strconv.Itoa(e.Code) + " " + http.StatusText(e.Code)
		_ = errorPage.Execute(w, map[string]any{"Error": e, "Status": status, "Hint": e.hint()})
		return
	}
	writeJSON(w, e.Code, e)
}

func wantsPage(r *http.Request) bool {
	for _, value := range r.Header["Accept"] {
		if strings.Contains(strings.ToLower(value), "text/html") {
			return true
		}
	}
	return false
}

// apiError is an answer in control's stead. Code is one of control's stable codes.
type apiError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

func (e apiError) write(w http.ResponseWriter, status int) {
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, status, e)
}

func writeJSON(w http.ResponseWriter, status int, value any) {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // plain structs of strings and numbers
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.Header().Set("Content-Length", strconv.Itoa(len(text)))
	w.WriteHeader(status)
	_, _ = w.Write(text)
}

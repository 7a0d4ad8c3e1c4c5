package edge

import (
	"net"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"strings"
)

// publicGuestPort is the port under which clients address the guest's own services.
const publicGuestPort = 49983

const (
	headerID           = "E2b-Sandbox-Id"
	headerPort         = "E2b-Sandbox-Port"
	headerTrafficToken = "E2b-Traffic-Access-Token"
	pathPrefix         = "/atoll/sandbox/"
)

// aim is what kind of thing a request is for.
type aim int

const (
	aimAPI     aim = iota // control
	aimSandbox            // a port of a sandbox
	aimSigned             // a signed file URL that doesn't say whose
	aimInvalid            // addressed to a sandbox, in a way that cannot be one
)

// target is where a request is to go.
type target struct {
	aim       aim
	sandboxID string
	port      int
	url       *url.URL // without the prefix that addressed the sandbox
	complaint string   // of aimInvalid
}

func invalid(complaint string) target { return target{aim: aimInvalid, complaint: complaint} }

// findTarget reads, in this order: the E2B headers, the host name, the path. It looks at nothing else and does no I/O.
func findTarget(r *http.Request, domain string) target {
	if values, ok := r.Header[headerID]; ok {
		return targetOfHeaders(r, values, domain)
	}
	if id, port, ok, complaint := parseHost(r.Host, domain); complaint != "" {
		return invalid(complaint)
	} else if ok {
		return target{aim: aimSandbox, sandboxID: id, port: port, url: r.URL}
	}
	if rest, ok := strings.CutPrefix(r.URL.EscapedPath(), pathPrefix); ok {
		return targetOfPath(r.URL, rest)
	}
	if r.URL.Path == "/files" && r.URL.Query().Get("signature") != "" {
		return target{aim: aimSigned, port: publicGuestPort, url: r.URL}
	}
	return target{aim: aimAPI, url: r.URL}
}

func targetOfHeaders(r *http.Request, ids []string, domain string) target {
	if len(ids) != 1 {
		return invalid("Invalid sandbox ID")
	}
	id, ok := cutID(ids[0])
	if !ok {
		return invalid("Invalid sandbox ID")
	}
	port := publicGuestPort
	if values, given := r.Header[headerPort]; given {
		if len(values) != 1 {
			return invalid("Invalid sandbox port")
		}
		if port, ok = parsePort(values[0]); !ok {
			return invalid("Invalid sandbox port")
		}
	} else if hostID, hostPort, ok, _ := parseHost(r.Host, domain); ok && hostID == id {
		port = hostPort
	}
	return target{aim: aimSandbox, sandboxID: id, port: port, url: r.URL}
}

// targetOfPath takes what follows /atoll/sandbox/ in the escaped path: {id}/{port}/...
func targetOfPath(original *url.URL, rest string) target {
	idText, rest, _ := strings.Cut(rest, "/")
	portText, rest, _ := strings.Cut(rest, "/")
	id, ok := cutID(idText)
	if !ok {
		return invalid("Invalid sandbox ID")
	}
	port, ok := parsePort(portText)
	if !ok {
		return invalid("Invalid sandbox port")
	}
	escaped := "/" + rest
	plain, err := url.PathUnescape(escaped)
	if err != nil {
		return invalid("Invalid path")
	}
	stripped := *original
	stripped.Path, stripped.RawPath = plain, escaped
	return target{aim: aimSandbox, sandboxID: id, port: port, url: &stripped}
}

// parseHost reads {port}-{id}.{domain}, and the same below any name under localhost. A host whose first label starts
// like an address of a sandbox but isn't one is a complaint; every other host is simply not a sandbox's.
func parseHost(host, domain string) (id string, port int, ok bool, complaint string) {
	name := hostName(host)
	label, parent, found := strings.Cut(name, ".")
	if !found || parent != domain && parent != "localhost" && !strings.HasSuffix(parent, ".localhost") {
		return "", 0, false, ""
	}
	portText, idText, found := strings.Cut(label, "-")
	if !found || !isDigits(portText) {
		return "", 0, false, ""
	}
	if port, ok = parsePort(portText); !ok {
		return "", 0, false, "Invalid sandbox port"
	}
	if id, ok = cutID(idText); !ok {
		return "", 0, false, "Invalid sandbox ID"
	}
	return id, port, true, ""
}

// hostName is the lower-case name in a Host header or a configured domain, without port and final dot.
func hostName(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

// cutID takes an id, or the older form {id}-{client}, of which the second part means nothing here.
func cutID(text string) (string, bool) {
	id, client, composite := strings.Cut(text, "-")
	if composite && !validID(client) {
		return "", false
	}
	return id, validID(id)
}

func validID(id string) bool {
	if id == "" || len(id) > 63 {
		return false
	}
	for _, c := range []byte(id) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return true
}

func isDigits(text string) bool {
	return text != "" && strings.Trim(text, "0123456789") == ""
}

func parsePort(text string) (int, bool) {
	if !isDigits(text) || len(text) > 5 {
		return 0, false
	}
	port, err := strconv.Atoi(text)
	return port, err == nil && port >= 1 && port <= 65535
}

// guestInternal are the first segments of the guest's routes that are for the host alone.
var guestInternal = map[string]bool{
	"init": true, "upgrade": true, "freeze": true, "unfreeze": true, "collapse": true, "fsfreeze": true, "fsthaw": true,
	"atoll": true,
}

// controlInternal are the first segments of control's routes that are for hosts and edges alone.
var controlInternal = map[string]bool{"internal": true, "agent": true}

// reserved says whether a path could be read, by whoever serves it, as one whose first segment is in the set: as it is,
// with its escapes resolved once or more often, with dot segments and empty ones resolved or just skipped.
func reserved(escaped string, set map[string]bool) bool {
	text := escaped
	for range 4 {
		slashed := strings.ReplaceAll(text, `\`, "/")
		if set[firstSegment(slashed)] || set[firstSegment(path.Clean("/"+slashed))] {
			return true
		}
		plain, err := url.PathUnescape(text)
		if err != nil || plain == text {
			return false
		}
		text = plain
	}
	// Escaped more than four times: no server reads it as anything, and no client means well.
	return true
}

func firstSegment(text string) string {
	text = strings.TrimLeft(text, "/")
	for strings.HasPrefix(text, "./") || strings.HasPrefix(text, "../") {
		_, text, _ = strings.Cut(text, "/")
		text = strings.TrimLeft(text, "/")
	}
	if end := strings.IndexAny(text, "/;?#"); end >= 0 {
		text = text[:end]
	}
	return strings.ToLower(strings.TrimFunc(text, func(c rune) bool { return c <= ' ' || c == 0x7f }))
}

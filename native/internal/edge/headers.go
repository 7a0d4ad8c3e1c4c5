package edge

import (
	"net"
	"net/http"
	"strings"
)

// hopByHop are the headers that mean one connection only (RFC 9110, section 7.6.1), with the customary ones.
var hopByHop = []string{
	"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer",
	"Transfer-Encoding", "Upgrade",
}

// onward copies a request's headers for the next hop. An upgrade and the wish for trailers are renewed for it.
func onward(header http.Header) (copied http.Header, upgrade string) {
	copied = header.Clone()
	if copied == nil {
		copied = make(http.Header)
	}
	upgrade = upgradeOf(header)
	trailers := hasToken(header["Te"], "trailers")
	dropHopByHop(copied)
	if upgrade != "" {
		copied.Set("Connection", "Upgrade")
		copied.Set("Upgrade", upgrade)
	}
	if trailers {
		copied.Set("Te", "trailers")
	}
	// Without this the transport would add its own.
	if _, ok := copied["User-Agent"]; !ok {
		copied["User-Agent"] = nil
	}
	return copied, upgrade
}

func dropHopByHop(header http.Header) {
	for _, value := range header["Connection"] {
		for name := range strings.SplitSeq(value, ",") {
			if name = strings.TrimSpace(name); name != "" {
				header.Del(name)
			}
		}
	}
	for _, name := range hopByHop {
		header.Del(name)
	}
}

func upgradeOf(header http.Header) string {
	if !hasToken(header["Connection"], "upgrade") {
		return ""
	}
	return header.Get("Upgrade")
}

// hasToken looks for a word in a header that holds a list of words, perhaps with parameters.
func hasToken(values []string, token string) bool {
	for _, value := range values {
		for item := range strings.SplitSeq(value, ",") {
			word, _, _ := strings.Cut(item, ";")
			if strings.EqualFold(strings.TrimSpace(word), token) {
				return true
			}
		}
	}
	return false
}

// forwarded says who asked, for whom, and how. Nothing here decides by these headers.
func forwarded(header http.Header, r *http.Request) {
	if client := clientAddress(r); client != "" {
		chain := append(append([]string(nil), header["X-Forwarded-For"]...), client)
		header.Set("X-Forwarded-For", strings.Join(chain, ", "))
	}
	if header.Get("X-Forwarded-Host") == "" {
		header.Set("X-Forwarded-Host", r.Host)
	}
	if header.Get("X-Forwarded-Proto") == "" {
		header.Set("X-Forwarded-Proto", "http")
	}
}

func clientAddress(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return ""
	}
	return host
}

func copyHeader(to, from http.Header) {
	for name, values := range from {
		to[name] = append(to[name], values...)
	}
}

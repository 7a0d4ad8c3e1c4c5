package files

import (
	"errors"
	"fmt"
	"sort"
	"strconv"
	"strings"
)

const gzipEncoding = "gzip"

var errNotAcceptable = errors.New("no acceptable encoding found, supported: [identity, gzip]")

// acceptedEncoding picks "gzip" or "" (identity) for an Accept-Encoding header.
//
// Source: RFC 9110 section 12.5.3; identity is acceptable unless it is refused with q=0.
func acceptedEncoding(header string) (string, error) {
	if strings.TrimSpace(header) == "" {
		return "", nil
	}
	type choice struct {
		name    string
		quality float64
	}
	var choices []choice
	refusesIdentity := false
	named := map[string]bool{}
	for _, item := range strings.Split(header, ",") {
		name, quality := parseCoding(item)
		if name == "" {
			continue
		}
		named[name] = true
		if quality == 0 {
			refusesIdentity = refusesIdentity || name == "identity"
			continue
		}
		choices = append(choices, choice{name, quality})
	}
	sort.SliceStable(choices, func(i, j int) bool { return choices[i].quality > choices[j].quality })
	for _, c := range choices {
		switch c.name {
		case gzipEncoding:
			return gzipEncoding, nil
		case "identity":
			return "", nil
		case "*":
			if !refusesIdentity {
				return "", nil
			}
			if !named[gzipEncoding] {
				return gzipEncoding, nil
			}
		}
	}
	if refusesIdentity || (strings.Contains(header, "*") && starRefused(header) && !named["identity"]) {
		return "", errNotAcceptable
	}
	return "", nil
}

// starRefused says whether the header has "*;q=0", which refuses everything that is not named.
func starRefused(header string) bool {
	for _, item := range strings.Split(header, ",") {
		if name, quality := parseCoding(item); name == "*" && quality == 0 {
			return true
		}
	}
	return false
}

func parseCoding(item string) (name string, quality float64) {
	name, parameters, _ := strings.Cut(item, ";")
	quality = 1
	for _, parameter := range strings.Split(parameters, ";") {
		key, value, found := strings.Cut(strings.TrimSpace(parameter), "=")
		if found && strings.EqualFold(strings.TrimSpace(key), "q") {
			if q, err := strconv.ParseFloat(strings.TrimSpace(value), 64); err == nil && q >= 0 && q <= 1 {
				quality = q
			}
		}
	}
	return strings.ToLower(strings.TrimSpace(name)), quality
}

// contentEncoding reads the Content-Encoding of an upload: "gzip" or "" (identity).
func contentEncoding(header string) (string, error) {
	switch name, _ := parseCoding(header); name {
	case "", "identity":
		return "", nil
	case gzipEncoding:
		return gzipEncoding, nil
	default:
		return "", fmt.Errorf("unsupported Content-Encoding: %s, supported: [gzip]", header)
	}
}

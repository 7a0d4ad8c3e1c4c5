package entry

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	"golang.org/x/sys/unix"
)

// Metadata that users attach to files lives in extended attributes below this prefix.
const attributePrefix = "user.e2b."

const (
	metadataHeader = "X-Metadata-"
	// keyBytesMax is the kernel's limit of 255 for an attribute's name, less the prefix.
	keyBytesMax = 246
	// metadataBytesMax counts keys with their prefix and values, per file.
	metadataBytesMax = 4096
)

// ParseMetadata reads the X-Metadata-<key> headers of an upload; of a repeated one the first value counts.
func ParseMetadata(header http.Header) (map[string]string, error) {
	var metadata map[string]string
	total := 0
	for name, values := range header {
		if len(name) < len(metadataHeader) || !strings.EqualFold(name[:len(metadataHeader)], metadataHeader) {
			continue
		}
		key := strings.ToLower(name[len(metadataHeader):])
		value := ""
		if len(values) > 0 {
			value = values[0]
		}
		switch {
		case key == "":
			return nil, errors.New("metadata key must not be empty")
		case len(key) > keyBytesMax:
			return nil, fmt.Errorf("metadata key is longer than %d bytes", keyBytesMax)
		case !printable(key):
			return nil, fmt.Errorf("metadata key %q must be printable US-ASCII", key)
		case !printable(value):
			return nil, fmt.Errorf("metadata value of %q must be printable US-ASCII", key)
		}
		total += len(attributePrefix) + len(key) + len(value)
		if total > metadataBytesMax {
			return nil, fmt.Errorf("metadata is larger than %d bytes in total", metadataBytesMax)
		}
		if metadata == nil {
			metadata = make(map[string]string)
		}
		metadata[key] = value
	}
	return metadata, nil
}

func printable(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] < 0x20 || s[i] > 0x7e {
			return false
		}
	}
	return true
}

// ReadMetadata returns the metadata of the file at path, nil when there is none or the file system has no attributes.
func ReadMetadata(path string) map[string]string {
	var metadata map[string]string
	for _, name := range attributes(path) {
		value := make([]byte, metadataBytesMax)
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			continue
		}
		if metadata == nil {
			metadata = make(map[string]string)
		}
		metadata[strings.TrimPrefix(name, attributePrefix)] = string(value[:n])
	}
	return metadata
}

// ReplaceMetadata makes the file at path carry exactly this metadata. It touches nothing when nothing changes, because
// each change is an event for whoever watches the file.
func ReplaceMetadata(path string, metadata map[string]string) error {
	for _, name := range attributes(path) {
		if _, kept := metadata[strings.TrimPrefix(name, attributePrefix)]; !kept {
			if err := unix.Removexattr(path, name); err != nil && !errors.Is(err, unix.ENODATA) {
				return err
			}
		}
	}
	for key, value := range metadata {
		if err := unix.Setxattr(path, attributePrefix+key, []byte(value), 0); err != nil {
			return err
		}
	}
	return nil
}

// attributes lists the names below our prefix.
func attributes(path string) []string {
	size, err := unix.Llistxattr(path, nil)
	if err != nil || size <= 0 {
		return nil
	}
	list := make([]byte, size+256)
	if size, err = unix.Llistxattr(path, list); err != nil {
		return nil
	}
	var names []string
	for _, name := range strings.Split(string(list[:size]), "\x00") {
		if strings.HasPrefix(name, attributePrefix) {
			names = append(names, name)
		}
	}
	return names
}

package entry

import (
	"net/http"
	"strings"
	"testing"
)

func FuzzMetadata(f *testing.F) {
	f.Add("X-Metadata-Author", "mish", "X-Metadata-B")
	f.Add("x-METADATA-", "", "X-Metadata")
	f.Add("X-Metadata-K", "ü", "Other")
	f.Fuzz(func(t *testing.T, name, value, second string) {
		metadata, err := ParseMetadata(http.Header{name: {value, "other"}, second: nil})
		if err != nil {
			return
		}
		total := 0
		for key, value := range metadata {
			total += len(attributePrefix) + len(key) + len(value)
			if key == "" || len(key) > keyBytesMax || strings.ToLower(key) != key || !printable(key) || !printable(value) {
				t.Fatalf("%q: %q", key, value)
			}
		}
		if total > metadataBytesMax {
			t.Fatal(total)
		}
	})
}

func TestMetadataHeaders(t *testing.T) {
	h := http.Header{}
	h.Add("X-Metadata-Two-Words", "a")
	h.Add("X-Metadata-Two-Words", "b")
	h.Add("X-Metadata", "no")
	h.Add("Content-Type", "no")
	metadata, err := ParseMetadata(h)
	if err != nil || len(metadata) != 1 || metadata["two-words"] != "a" {
		t.Fatalf("%v %v", metadata, err)
	}
	if metadata, err := ParseMetadata(http.Header{}); metadata != nil || err != nil {
		t.Fatalf("%v %v", metadata, err)
	}
}

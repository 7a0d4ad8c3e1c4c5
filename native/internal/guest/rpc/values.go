package rpc

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// Bytes is a proto3 `bytes` field: written as standard base64, read in either alphabet, padded or not.
type Bytes []byte

// MarshalJSON writes standard base64.
func (b Bytes) MarshalJSON() ([]byte, error) {
	out := make([]byte, 0, base64.StdEncoding.EncodedLen(len(b))+2)
	out = append(out, '"')
	out = base64.StdEncoding.AppendEncode(out, b)
	return append(out, '"'), nil
}

// UnmarshalJSON reads base64 as the proto3 JSON mapping allows it.
func (b *Bytes) UnmarshalJSON(text []byte) error {
	if bytes.Equal(text, []byte("null")) {
		*b = nil
		return nil
	}
	var s string
	if err := json.Unmarshal(text, &s); err != nil {
		return err
	}
	encoding := base64.RawStdEncoding
	if strings.ContainsAny(s, "-_") {
		encoding = base64.RawURLEncoding
	}
	decoded, err := encoding.DecodeString(strings.TrimRight(s, "="))
	if err != nil {
		return err
	}
	*b = decoded
	return nil
}

// Uint32 is a proto3 `uint32` field: read as a number or as a string of digits.
type Uint32 uint32

// UnmarshalJSON reads a number, also in quotes, also with an empty fraction (1.0) as JavaScript may write it.
func (u *Uint32) UnmarshalJSON(text []byte) error {
	s := strings.Trim(string(text), `"`)
	if s == "null" {
		*u = 0
		return nil
	}
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		f, floatErr := strconv.ParseFloat(s, 64)
		if floatErr != nil || f < 0 || f > 1<<32-1 || f != float64(uint32(f)) {
			return fmt.Errorf("invalid uint32 %s", s)
		}
		n = uint64(f)
	}
	*u = Uint32(n)
	return nil
}

// Int64 is a proto3 `int64` field: written as a string.
type Int64 int64

// MarshalJSON writes a quoted number.
func (i Int64) MarshalJSON() ([]byte, error) {
	return []byte(`"` + strconv.FormatInt(int64(i), 10) + `"`), nil
}

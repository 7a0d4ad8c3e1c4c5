// Package unpack applies an image's layers to a root file system.
//
// Theory of operation. A layer is a tar made by nobody we know. Every name in it is looked up from the root's descriptor with
// openat2(RESOLVE_IN_ROOT): the kernel follows links inside the tree only, so there is no moment between looking and acting
// that a link could use. Names with `..` or a leading slash are refused, not mended. Files are always made anew (an old one is
// unlinked first), so nothing is ever written through a link. Device nodes are left out: a sandbox has its own /dev, and what
// an unprivileged tree cannot have, no tree of ours has. Of extended attributes, those that mean something to the host's
// overlay or security modules are left out, too. A layer is right when its bytes, compressed and not, have the digests that
// were said. Limits hold on bytes, entries and how much a layer may grow. Source: OCI image-spec, layer.md.
package unpack

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
)

// Stable codes of what goes wrong here.
const (
	CodeRefused  = "IMAGE_REFUSED"
	CodeCorrupt  = "IMAGE_CORRUPT"
	CodeDiskFull = "HOST_DISK_FULL"
	codeInternal = "INTERNAL"
)

// Error is a failure with a stable code.
type Error struct {
	Code  string
	Text  string
	Cause error
}

func (e *Error) Error() string {
	if e.Cause != nil {
		return e.Text + ": " + e.Cause.Error()
	}
	return e.Text
}

func (e *Error) Unwrap() error { return e.Cause }

func refuse(format string, values ...any) error {
	return &Error{Code: CodeRefused, Text: fmt.Sprintf(format, values...)}
}

func corrupt(cause error, format string, values ...any) error {
	var known *Error
	if errors.As(cause, &known) {
		return cause
	}
	return &Error{Code: CodeCorrupt, Text: fmt.Sprintf(format, values...), Cause: cause}
}

// failed says what the file system answered for an entry of a layer.
func failed(cause error, name string) error {
	var known *Error
	switch {
	case errors.As(cause, &known):
		return cause
	case errors.Is(cause, syscall.ENOSPC), errors.Is(cause, syscall.EDQUOT):
		return &Error{Code: CodeDiskFull, Text: fmt.Sprintf("%.200q cannot be unpacked", name), Cause: cause}
	case errors.Is(cause, syscall.ELOOP), errors.Is(cause, syscall.ENOTDIR), errors.Is(cause, syscall.ENOENT),
		errors.Is(cause, syscall.EXDEV), errors.Is(cause, syscall.ENAMETOOLONG), errors.Is(cause, syscall.EMLINK), errors.Is(cause, syscall.EFBIG),
		errors.Is(cause, syscall.EPERM), errors.Is(cause, syscall.EINVAL), errors.Is(cause, syscall.E2BIG), errors.Is(cause, syscall.ERANGE):
		return &Error{Code: CodeRefused, Text: fmt.Sprintf("%.200q cannot be unpacked", name), Cause: cause}
	}
	return &Error{Code: codeInternal, Text: fmt.Sprintf("%.200q cannot be unpacked", name), Cause: cause}
}

// Limits bound what one image may cost.
type Limits struct {
	// Bytes of all files' content, holes included.
	Bytes int64
	// Entries of all layers together.
	Entries int64
	// Growth is how many times larger than its compressed form a layer may be, once it is larger than GrowthFrom bytes.
	Growth     int64
	GrowthFrom int64
}

// DefaultLimits fit every image that people use: deflate reaches a factor of 1032 with zeros only.
var DefaultLimits = Limits{Bytes: 32 << 30, Entries: 2_000_000, Growth: 200, GrowthFrom: 256 << 20}

// Stats is what unpacking has seen.
type Stats struct {
	Bytes   int64 `json:"bytes"`
	Entries int64 `json:"entries"`
	// Devices and Attributes were left out.
	Devices    int64 `json:"devices"`
	Attributes int64 `json:"attributes"`
}

// Compression of a layer.
type Compression int

// What layers come in.
const (
	Plain Compression = iota
	Gzip
	Zstd
)

// CompressionOf reads a layer's media type. Errors: IMAGE_REFUSED for what is no layer.
func CompressionOf(mediaType string) (Compression, error) {
	switch mediaType {
	case "application/vnd.oci.image.layer.v1.tar", "application/vnd.docker.image.rootfs.diff.tar",
		"application/vnd.oci.image.layer.nondistributable.v1.tar":
		return Plain, nil
	case "application/vnd.oci.image.layer.v1.tar+gzip", "application/vnd.docker.image.rootfs.diff.tar.gzip",
		"application/vnd.oci.image.layer.nondistributable.v1.tar+gzip":
		return Gzip, nil
	case "application/vnd.oci.image.layer.v1.tar+zstd", "application/vnd.docker.image.rootfs.diff.tar.zstd",
		"application/vnd.oci.image.layer.nondistributable.v1.tar+zstd":
		return Zstd, nil
	}
	return Plain, refuse("%.120q is no media type of a layer", mediaType)
}

// attributeBytesSafe fit on every file system that keeps attributes.
const attributeBytesSafe = 1 << 10

// Xattrs of other names belong to the host's overlay and security modules.
func keepsAttribute(name string) bool {
	return name == "security.capability" || (strings.HasPrefix(name, "user.") && !strings.HasPrefix(name, "user.overlay."))
}

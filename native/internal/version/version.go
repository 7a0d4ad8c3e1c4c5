// Package version carries the release that the linker stamps into every native program.
package version

// Version is set with -ldflags "-X atoll.local/native/internal/version.Version=...".
var Version = "dev"

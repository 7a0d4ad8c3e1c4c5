//go:build !linux

package dns

import "syscall"

func freeBind(string, string, syscall.RawConn) error { return nil }

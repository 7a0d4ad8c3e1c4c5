// Package rpc speaks the Connect protocol with its JSON codec over HTTP/1.1: unary calls, server streams and client
// streams, without generated code.
//
// It knows no method: rooms register plain http handlers that read and write messages through it.
// Read errors.go, unary.go, then stream.go.
package rpc

import (
	"errors"
	"fmt"
	"net/http"
)

// Code is a Connect error code as it stands on the wire.
type Code string

// The codes that the guest answers with.
const (
	Canceled           Code = "canceled"
	Unknown            Code = "unknown"
	InvalidArgument    Code = "invalid_argument"
	DeadlineExceeded   Code = "deadline_exceeded"
	NotFound           Code = "not_found"
	AlreadyExists      Code = "already_exists"
	PermissionDenied   Code = "permission_denied"
	ResourceExhausted  Code = "resource_exhausted"
	Unimplemented      Code = "unimplemented"
	Internal           Code = "internal"
	Unavailable        Code = "unavailable"
	FailedPrecondition Code = "failed_precondition"
	Unauthenticated    Code = "unauthenticated"
)

// statuses maps codes to the HTTP status of a unary error (Connect protocol, "Error codes").
var statuses = map[Code]int{
	Canceled:           499,
	Unknown:            http.StatusInternalServerError,
	InvalidArgument:    http.StatusBadRequest,
	DeadlineExceeded:   http.StatusGatewayTimeout,
	NotFound:           http.StatusNotFound,
	AlreadyExists:      http.StatusConflict,
	PermissionDenied:   http.StatusForbidden,
	ResourceExhausted:  http.StatusTooManyRequests,
	Unimplemented:      http.StatusNotImplemented,
	Internal:           http.StatusInternalServerError,
	FailedPrecondition: http.StatusBadRequest,
	Unavailable:        http.StatusServiceUnavailable,
	Unauthenticated:    http.StatusUnauthorized,
}

// Error is what a call fails with; it travels as {"code","message"}.
type Error struct {
	Code    Code   `json:"code"`
	Message string `json:"message"`
}

func (e *Error) Error() string { return string(e.Code) + ": " + e.Message }

// Errorf makes an Error with a formatted message.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// AsError gives any error its Connect form; what is not an Error is `unknown`.
func AsError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return &Error{Code: Unknown, Message: err.Error()}
}

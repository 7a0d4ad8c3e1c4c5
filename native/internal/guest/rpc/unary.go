package rpc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"strconv"
	"time"
)

// MessageBytesMax bounds an ordinary request message.
const MessageBytesMax = 4 << 20

// InputBytesMax bounds a message that carries bytes for a process: about 12 MiB of input in base64.
const InputBytesMax = 16 << 20

const (
	unaryType  = "application/json"
	streamType = "application/connect+json"
)

// bodyPatience is how long a client may take to send one request message.
const bodyPatience = 60 * time.Second

// Unary makes an http handler of one call: it decodes the request, applies the caller's timeout and encodes the answer.
func Unary[Req, Resp any](limit int64, call func(context.Context, *http.Request, *Req) (*Resp, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		req := new(Req)
		if !ReadUnary(w, r, limit, req) {
			return
		}
		ctx, cancel, err := WithTimeout(r)
		if err != nil {
			WriteError(w, err)
			return
		}
		defer cancel()
		resp, err := call(ctx, r, req)
		if err != nil {
			WriteError(w, err)
			return
		}
		body, err := Encode(resp)
		if err != nil {
			WriteError(w, Errorf(Internal, "cannot encode the answer: %v", err))
			return
		}
		w.Header().Set("Content-Type", unaryType)
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		_, _ = w.Write(body)
	}
}

// ReadUnary decodes the request of a unary call. When it returns false it has already answered.
func ReadUnary(w http.ResponseWriter, r *http.Request, limit int64, into any) bool {
	if !accepts(w, r, unaryType) {
		return false
	}
	if encoding := r.Header.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
		WriteError(w, Errorf(Unimplemented, "unknown compression %q: supported encodings are identity", encoding))
		return false
	}
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(bodyPatience))
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	_ = control.SetReadDeadline(time.Time{})
	if err != nil {
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			WriteError(w, Errorf(ResourceExhausted, "message is larger than configured max %d", limit))
		} else {
			WriteError(w, Errorf(InvalidArgument, "cannot read the request: %v", err))
		}
		return false
	}
	if err := Decode(body, into); err != nil {
		WriteError(w, err)
		return false
	}
	return true
}

// Decode parses one JSON message; an empty body is the empty message.
func Decode(body []byte, into any) error {
	if len(bytes.TrimSpace(body)) == 0 {
		return nil
	}
	if err := json.Unmarshal(body, into); err != nil {
		return Errorf(InvalidArgument, "cannot decode the message: %v", err)
	}
	return nil
}

// Encode writes one JSON message without HTML escapes.
func Encode(message any) ([]byte, error) {
	var buffer bytes.Buffer
	encoder := json.NewEncoder(&buffer)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(message); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(buffer.Bytes(), []byte("\n")), nil
}

// WriteError answers a unary call with an error.
func WriteError(w http.ResponseWriter, err error) {
	e := AsError(err)
	status, ok := statuses[e.Code]
	if !ok {
		status = http.StatusInternalServerError
	}
	body, _ := Encode(e)
	w.Header().Set("Content-Type", unaryType)
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

// Refuse answers with err in whichever form the request's protocol wants: unary error or ended stream.
func Refuse(w http.ResponseWriter, r *http.Request, err error) {
	if mediaType(r) == streamType {
		newStream(w).End(err)
		return
	}
	WriteError(w, err)
}

// WithTimeout returns the request's context bounded by Connect-Timeout-Ms.
func WithTimeout(r *http.Request) (context.Context, context.CancelFunc, error) {
	timeout, err := Timeout(r.Header)
	if err != nil {
		return nil, nil, err
	}
	if timeout == 0 {
		return r.Context(), func() {}, nil
	}
	ctx, cancel := context.WithTimeout(r.Context(), timeout)
	return ctx, cancel, nil
}

// Timeout reads Connect-Timeout-Ms: zero means that the caller set no limit.
//
// Source: the protocol allows at most ten digits.
func Timeout(header http.Header) (time.Duration, error) {
	text := header.Get("Connect-Timeout-Ms")
	if text == "" {
		return 0, nil
	}
	if len(text) > 10 {
		return 0, Errorf(InvalidArgument, "timeout has more than 10 digits")
	}
	ms, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, Errorf(InvalidArgument, "invalid Connect-Timeout-Ms %q", text)
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// Keepalive reads Keepalive-Ping-Interval in seconds; absent or senseless values mean 90.
func Keepalive(header http.Header) time.Duration {
	seconds, err := strconv.Atoi(header.Get("Keepalive-Ping-Interval"))
	if err != nil || seconds < 1 || seconds > 24*3600 {
		seconds = 90
	}
	return time.Duration(seconds) * time.Second
}

func accepts(w http.ResponseWriter, r *http.Request, want string) bool {
	if mediaType(r) == want {
		return true
	}
	w.Header().Set("Accept-Post", want)
	w.WriteHeader(http.StatusUnsupportedMediaType)
	return false
}

func mediaType(r *http.Request) string {
	media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return ""
	}
	return media
}

package rpc

import (
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"time"
)

const (
	flagCompressed = 1
	flagEnd        = 2
	headerBytes    = 5
)

// writePatience bounds one write to a peer that takes nothing: after it the connection is given up.
const writePatience = 60 * time.Second

// Reader takes length-prefixed messages from a stream of untrusted bytes.
type Reader struct {
	from  io.Reader
	limit uint32
}

// NewReader reads messages of at most limit bytes.
func NewReader(from io.Reader, limit uint32) *Reader { return &Reader{from: from, limit: limit} }

// Next returns the next message, or io.EOF after the last one.
func (r *Reader) Next() ([]byte, error) {
	var header [headerBytes]byte
	if _, err := io.ReadFull(r.from, header[:]); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, io.EOF
		}
		return nil, Errorf(InvalidArgument, "protocol error: incomplete envelope: %v", err)
	}
	size := binary.BigEndian.Uint32(header[1:])
	switch {
	case header[0]&flagCompressed != 0:
		return nil, Errorf(Internal, "protocol error: sent compressed message without compression support")
	case header[0]&flagEnd != 0:
		// A client may close its side with an end message; nothing in it concerns us.
		return nil, io.EOF
	case header[0] != 0:
		return nil, Errorf(Internal, "protocol error: invalid envelope flags %08b", header[0])
	case size > r.limit:
		return nil, Errorf(ResourceExhausted, "message size %d is larger than configured max %d", size, r.limit)
	}
	// Reading through a growing buffer, not make(size): a liar about the size pays for the bytes itself.
	body, err := io.ReadAll(io.LimitReader(r.from, int64(size)))
	if err != nil {
		return nil, Errorf(InvalidArgument, "protocol error: cannot read message: %v", err)
	}
	if uint32(len(body)) != size {
		return nil, Errorf(InvalidArgument, "protocol error: promised %d bytes in enveloped message, got %d bytes", size, len(body))
	}
	return body, nil
}

// Stream is the server's half of a stream. It is used by one goroutine at a time.
type Stream struct {
	w       http.ResponseWriter
	control *http.ResponseController
	started bool
}

// OpenServer reads the one request message of a server stream. When it returns nil it has already answered.
func OpenServer(w http.ResponseWriter, r *http.Request, into any) *Stream {
	reader, stream := OpenClient(w, r, MessageBytesMax)
	if stream == nil {
		return nil
	}
	_ = stream.control.SetReadDeadline(time.Now().Add(bodyPatience))
	body, err := reader.Next()
	if err == nil {
		err = Decode(body, into)
	}
	if err == nil {
		if _, extra := reader.Next(); extra != io.EOF {
			err = Errorf(InvalidArgument, "protocol error: more than one request message")
		}
	} else if err == io.EOF {
		err = Errorf(InvalidArgument, "protocol error: the request message is missing")
	}
	_ = stream.control.SetReadDeadline(time.Time{})
	if err != nil {
		stream.End(err)
		return nil
	}
	return stream
}

// OpenClient prepares a stream whose request messages the caller reads one by one. When the stream is nil it has
// already answered.
func OpenClient(w http.ResponseWriter, r *http.Request, limit uint32) (*Reader, *Stream) {
	if !accepts(w, r, streamType) {
		return nil, nil
	}
	if encoding := r.Header.Get("Connect-Content-Encoding"); encoding != "" && encoding != "identity" {
		newStream(w).End(Errorf(Unimplemented, "unknown compression %q: supported encodings are identity", encoding))
		return nil, nil
	}
	return NewReader(r.Body, limit), newStream(w)
}

func newStream(w http.ResponseWriter) *Stream {
	return &Stream{w: w, control: http.NewResponseController(w)}
}

// Send writes one message and flushes it.
func (s *Stream) Send(message any) error {
	body, err := Encode(message)
	if err != nil {
		return err
	}
	return s.WriteFrames(AppendFrame(nil, 0, body))
}

// WriteFrames writes finished frames and flushes once.
func (s *Stream) WriteFrames(frames ...[]byte) error {
	s.start()
	_ = s.control.SetWriteDeadline(time.Now().Add(writePatience))
	for _, frame := range frames {
		if _, err := s.w.Write(frame); err != nil {
			return err
		}
	}
	return s.control.Flush()
}

// Cut breaks a write that is under way and every later one: for a subscriber that takes nothing. It may be called
// from another goroutine.
func (s *Stream) Cut() { _ = s.control.SetWriteDeadline(time.Unix(1, 0)) }

// Interrupt breaks a read of the request that is under way and every later one.
func (s *Stream) Interrupt() { _ = s.control.SetReadDeadline(time.Unix(1, 0)) }

// End closes the stream, with an error or well.
func (s *Stream) End(err error) {
	end := struct {
		Error *Error `json:"error,omitempty"`
	}{}
	if err != nil {
		end.Error = AsError(err)
	}
	body, _ := Encode(end)
	_ = s.WriteFrames(AppendFrame(nil, flagEnd, body))
	// The connection may carry another request: it must not inherit this stream's deadline.
	_ = s.control.SetWriteDeadline(time.Time{})
}

func (s *Stream) start() {
	if !s.started {
		s.started = true
		s.w.Header().Set("Content-Type", streamType)
		s.w.WriteHeader(http.StatusOK)
	}
}

// AppendFrame appends one enveloped message to dst.
func AppendFrame(dst []byte, flags byte, body []byte) []byte {
	dst = append(dst, flags)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(body)))
	return append(dst, body...)
}

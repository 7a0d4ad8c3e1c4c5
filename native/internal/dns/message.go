package dns

import (
	"encoding/binary"
	"errors"
	"strings"

	"golang.org/x/net/dns/dnsmessage"
)

const (
	headerBytes   = 12
	queryBytesMax = 4096
)

// query is a question as the client sent it.
type query struct {
	text     []byte
	header   dnsmessage.Header
	question dnsmessage.Question
}

// parseQuery reads a client's message. With an error, the code is what to answer; without a code, nothing is answered.
func parseQuery(text []byte) (query, *dnsmessage.RCode, error) {
	var parser dnsmessage.Parser
	header, err := parser.Start(text)
	if err != nil {
		return query{}, nil, err
	}
	q := query{text: text, header: header}
	if header.Response {
		return q, nil, errors.New("an answer, not a question") // answering it could go round in circles
	}
	if header.OpCode != 0 {
		code := dnsmessage.RCodeNotImplemented
		return q, &code, errors.New("not a standard query")
	}
	malformed := dnsmessage.RCodeFormatError
	if questions := binary.BigEndian.Uint16(text[4:6]); questions != 1 {
		return q, &malformed, errors.New("not one question")
	}
	question, err := parser.Question()
	if err != nil {
		return q, &malformed, err
	}
	q.question = question
	// Zone transfers are nothing that a guest needs, and the largest answers there are.
	if question.Type == dnsmessage.TypeAXFR || question.Type == 251 {
		code := dnsmessage.RCodeRefused
		return q, &code, errors.New("zone transfer")
	}
	return q, nil, nil
}

// answers says whether a message is an answer to the question under an id.
func (q query) answers(text []byte, id uint16) bool {
	var parser dnsmessage.Parser
	header, err := parser.Start(text)
	if err != nil || !header.Response || header.ID != id || header.OpCode != 0 {
		return false
	}
	question, err := parser.Question()
	if err != nil {
		// Some servers leave the question out when they refuse.
		return errors.Is(err, dnsmessage.ErrSectionDone) && header.RCode != dnsmessage.RCodeSuccess
	}
	return question.Type == q.question.Type && question.Class == q.question.Class &&
		strings.EqualFold(question.Name.String(), q.question.Name.String())
}

// withID returns a copy of a message under another id.
func withID(text []byte, id uint16) []byte {
	copied := append([]byte(nil), text...)
	binary.BigEndian.PutUint16(copied, id)
	return copied
}

// failure is the answer that says that there is none.
func (q query) failure(code dnsmessage.RCode) []byte {
	header := dnsmessage.Header{
		ID: q.header.ID, Response: true, OpCode: q.header.OpCode, RecursionDesired: q.header.RecursionDesired,
		RecursionAvailable: true, RCode: code,
	}
	message := dnsmessage.Message{Header: header}
	if q.question.Name.Length > 0 {
		message.Questions = []dnsmessage.Question{q.question}
	}
	text, err := message.Pack()
	if err != nil {
		message.Questions = nil
		text, _ = message.Pack()
	}
	return text
}

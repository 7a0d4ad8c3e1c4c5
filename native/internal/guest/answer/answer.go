// Package answer writes the plain JSON answers of the REST side, and its errors {"code","message"}.
package answer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
)

// JSON writes one JSON document.
func JSON(w http.ResponseWriter, status int, document any) {
	var buffer bytes.Buffer
	encoder := json.NewEncoder(&buffer)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(document); err != nil {
		Error(w, http.StatusInternalServerError, "cannot encode the answer: %v", err)
		return
	}
	body := bytes.TrimSuffix(buffer.Bytes(), []byte("\n"))
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

// Error writes {"code": status, "message": ...}.
func Error(w http.ResponseWriter, status int, format string, args ...any) {
	JSON(w, status, struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{status, fmt.Sprintf(format, args...)})
}

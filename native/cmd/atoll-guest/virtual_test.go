package main

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
)

func TestConnectionsThatAKernelCannotEndAreSpokenOf(t *testing.T) {
	var said bytes.Buffer
	log := slog.New(slog.NewJSONHandler(&said, nil))
	endConnections(func() (int, error) { return 3, nil }, log)
	if said.Len() != 0 {
		t.Fatal(said.String())
	}
	endConnections(func() (int, error) { return 1, errors.New("operation not supported") }, log)
	if text := said.String(); !strings.Contains(text, "guest.connections.left") || !strings.Contains(text, "operation not supported") {
		t.Fatal(text)
	}
}

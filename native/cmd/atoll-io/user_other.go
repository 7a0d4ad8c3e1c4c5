//go:build !linux

package main

import "errors"

func become(string) error { return errors.New("changing the user is for Linux") }

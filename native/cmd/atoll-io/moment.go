package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"atoll.local/native/internal/moments"
	"atoll.local/native/internal/objects"

	"golang.org/x/sys/unix"
)

const momentUsage = `usage: atoll-io moment COMMAND

commands:
  upload      have what is saved of a guest in the artifact store
  describe    say what is to be known of a moment of the store
  fetch       have the files of a moment in a new directory

What to do is JSON on standard input: upload {of, directory, files, facts, bases, work}, describe {moment},
fetch {moment, directory, spare_bytes}; each with objects {"control": {urls, credential, authority}} or {"folder": DIR}.
The answer is a JSON line on standard output, with "event": "done", or "failed" with a stable code.
`

// momentWish is what the moment commands are told.
type momentWish struct {
	moments.Wish
	Moment     string `json:"moment"`
	SpareBytes int64  `json:"spare_bytes"`
	Objects    struct {
		Control *objects.ControlSettings `json:"control"`
		Folder  string                   `json:"folder"`
	} `json:"objects"`
}

func (w *momentWish) remote() (moments.Remote, error) {
	if w.Objects.Control != nil {
		return moments.OpenControl(*w.Objects.Control)
	}
	if w.Objects.Folder == "" {
		return nil, errors.New("it is not said where the store is")
	}
	return moments.OpenFolder(w.Objects.Folder), nil
}

// endWithParent lets nothing go on that its agent has forgotten: the next run begins it anew, and two would be in each other's way.
func endWithParent() error {
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return err
	}
	if os.Getppid() == 1 {
		return errors.New("whoever started this has ended")
	}
	return nil
}

func runMoment(ctx context.Context, args []string) error {
	if len(args) != 1 {
		fmt.Fprint(os.Stderr, momentUsage)
		return errUsage
	}
	known := map[string]func(context.Context, moments.Remote, momentWish) (any, error){
		"upload": func(ctx context.Context, to moments.Remote, wish momentWish) (any, error) {
			return moments.Upload(ctx, to, wish.Wish)
		},
		"describe": func(ctx context.Context, from moments.Remote, wish momentWish) (any, error) {
			return moments.Describe(ctx, from, wish.Moment)
		},
		"fetch": func(ctx context.Context, from moments.Remote, wish momentWish) (any, error) {
			return moments.Fetch(ctx, from, wish.Moment, wish.Directory, wish.SpareBytes)
		},
	}[args[0]]
	if known == nil {
		fmt.Fprint(os.Stderr, momentUsage)
		return errUsage
	}
	// Never repeats what it could not read: it holds a credential.
	content, err := io.ReadAll(io.LimitReader(os.Stdin, optionsBytesMax))
	var wish momentWish
	if err != nil || json.Unmarshal(content, &wish) != nil {
		return errors.New("what to do is not JSON of the known form")
	}
	if err := endWithParent(); err != nil {
		return err
	}
	remote, err := wish.remote()
	if err == nil {
		var found any
		if found, err = known(ctx, remote, wish); err == nil {
			say(map[string]any{"event": "done", "moment": found})
			return nil
		}
	}
	say(map[string]any{"event": "failed", "code": moments.CodeOf(err), "message": err.Error()})
	return errSaid
}

package edge

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"time"
)

const (
	backoffMin = 50 * time.Millisecond
	backoffMax = 2 * time.Second

	// Control pings every 15 s; after two and a half of them the stream is dead, whatever TCP says.
	silenceMax = 40 * time.Second

	// One line holds the snapshot: 64 MiB are some 100,000 routes.
	lineBytesMax = 64 << 20
)

var errLineTooLong = errors.New("line of the stream is too long")

// follower keeps the table up to date along control's stream.
type follower struct {
	table   *table
	control *controlClient
	asker   *asker
	metrics *metrics
	log     *slog.Logger
	silence time.Duration
}

// run follows until ctx ends. A broken stream is opened again, at first at once, then less and less often.
func (f *follower) run(ctx context.Context) {
	wait := backoffMin
	wasSynced, told := false, false
	for ctx.Err() == nil {
		synced, err := f.once(ctx)
		f.table.lost()
		if ctx.Err() != nil {
			return
		}
		f.metrics.streamBreaks.Add(1)
		if synced {
			wait = backoffMin
		}
		if synced || !told {
			// Said once per loss, not once per attempt.
			f.log.Warn("edge.routes.lost", "error", errText(err), "had_been_synced", synced || wasSynced)
			told = true
		}
		wasSynced = wasSynced || synced
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait/2 + rand.N(wait/2+1)):
		}
		wait = min(wait*2, backoffMax)
	}
}

// once follows one stream to its end; synced says whether a snapshot came.
func (f *follower) once(ctx context.Context) (synced bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watchdog := time.AfterFunc(f.silence, func() { cancel(errors.New("the stream fell silent")) })
	defer watchdog.Stop()
	since := time.Now()
	body, err := f.control.stream(ctx)
	if err != nil {
		return false, cause(ctx, err)
	}
	defer func() { _ = body.Close() }()
	reader := bufio.NewReaderSize(body, 16<<10)
	for {
		line, err := readLine(reader, lineBytesMax)
		if err != nil {
			return synced, cause(ctx, err)
		}
		watchdog.Reset(f.silence)
		if len(line) == 0 {
			continue
		}
		c, err := parseChange(line)
		if err != nil {
			return synced, fmt.Errorf("stream of routes: %w", err)
		}
		if !synced && c.Type != changeSnapshot {
			if c.Type == changePing {
				continue
			}
			return false, fmt.Errorf("stream of routes began with %q", c.Type)
		}
		f.apply(ctx, c, since)
		synced = true
	}
}

func (f *follower) apply(ctx context.Context, c change, since time.Time) {
	f.metrics.cursor.Store(c.Cursor)
	switch c.Type {
	case changeSnapshot:
		routes := make([]*Route, 0, len(c.Routes))
		for _, text := range c.Routes {
			if route := f.parse(text); route != nil {
				routes = append(routes, route)
			}
		}
		doubtful := f.table.snapshot(c.Incarnation, routes, since)
		f.log.Info("edge.routes.synced", "routes", len(routes), "cursor", c.Cursor, "doubtful", len(doubtful))
		for _, id := range doubtful {
			go func() { _ = f.asker.refresh(ctx, id) }()
		}
	case changeRoute:
		if route := f.parse(c.Route); route != nil {
			f.asker.forget(route.SandboxID)
			f.table.put(route)
		}
	case changeGone:
		f.asker.forget(c.SandboxID)
		f.table.remove(c.SandboxID, c.Revision, c.Reason)
	}
	// Other types are for readers newer than this one.
}

// parse drops a route that cannot be used: one bad row must not cost the edge all others.
func (f *follower) parse(text []byte) *Route {
	route, err := parseRoute(text)
	if err != nil {
		f.metrics.badRoutes.Add(1)
		f.log.Error("edge.route.refused", "error", errText(err))
		return nil
	}
	return route
}

// readLine returns the next line without its end. The memory of a long line is not kept.
func readLine(reader *bufio.Reader, limit int) ([]byte, error) {
	var long []byte
	for {
		part, err := reader.ReadSlice('\n')
		if len(long)+len(part) > limit {
			return nil, errLineTooLong
		}
		switch {
		case err == nil && long == nil:
			return part[:len(part)-1], nil
		case err == nil:
			long = append(long, part...)
			return long[:len(long)-1], nil
		case errors.Is(err, bufio.ErrBufferFull):
			long = append(long, part...)
		case errors.Is(err, io.EOF):
			return nil, io.ErrUnexpectedEOF
		default:
			return nil, err
		}
	}
}

func cause(ctx context.Context, err error) error {
	if reason := context.Cause(ctx); reason != nil {
		return reason
	}
	return err
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

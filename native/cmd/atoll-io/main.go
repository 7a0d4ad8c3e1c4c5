// Command atoll-io carries traffic: the edge with its node proxy, the guests' DNS forwarder, images. It decides nothing.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"

	"atoll.local/native/internal/dns"
	"atoll.local/native/internal/edge"
	"atoll.local/native/internal/version"
)

const usage = `usage: atoll-io COMMAND [options]

commands:
  edge --config FILE                      serve the API and the sandboxes on one address
  dns --listen ADDR:53 [--upstream IP:53] [--user NAME]
                                          forward the guests' DNS questions
  image pull|inspect|unpack               fetch container images and make root file systems of them
  moment upload|describe|fetch            bring what is saved of guests to the artifact store, and back
  version                                 print the version

Options may be repeated or hold lists separated by commas where they name addresses.
ATOLL_LOG_LEVEL (debug, info, warn, error) sets what is logged, as JSON lines on standard error.
`

// errUsage ends the program with status 2; what is wrong has been said.
var errUsage = errors.New("usage")

func main() {
	// What is asked of the kernel for this thread (to end with the parent) holds as long as the thread does.
	runtime.LockOSThread()
	tuneMemory()
	log := slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: logLevel()}))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	err := run(ctx, os.Args[1:], log)
	switch {
	case errors.Is(err, errUsage):
		os.Exit(2)
	case errors.Is(err, errSaid):
		os.Exit(1)
	case err != nil:
		log.Error("io.failed", "error", err.Error())
		os.Exit(1)
	}
}

// tuneMemory trades processor time for memory: the heap is small, and what streams need is pooled.
func tuneMemory() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
}

func logLevel() slog.Level {
	var level slog.Level
	if err := level.UnmarshalText([]byte(os.Getenv("ATOLL_LOG_LEVEL"))); err != nil {
		return slog.LevelInfo
	}
	return level
}

func run(ctx context.Context, args []string, log *slog.Logger) error {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		return errUsage
	}
	switch args[0] {
	case "edge":
		return runEdge(ctx, args[1:], log)
	case "dns":
		return runDNS(ctx, args[1:], log)
	case "image":
		return runImage(ctx, args[1:])
	case "moment":
		return runMoment(ctx, args[1:])
	case "version", "--version":
		fmt.Println(version.Version)
		return nil
	case "help", "-h", "--help":
		fmt.Print(usage)
		return nil
	}
	fmt.Fprintf(os.Stderr, "atoll-io: unknown command %q\n\n%s", args[0], usage)
	return errUsage
}

func runEdge(ctx context.Context, args []string, log *slog.Logger) error {
	flags := flag.NewFlagSet("atoll-io edge", flag.ContinueOnError)
	file := flags.String("config", "", "configuration `FILE` (JSON)")
	if err := flags.Parse(args); err != nil {
		return errUsage
	}
	if *file == "" || flags.NArg() > 0 {
		flags.Usage()
		return errUsage
	}
	config, err := edge.LoadConfig(*file)
	if err != nil {
		return err
	}
	e, err := edge.New(config, log.With("program", "edge", "edge_id", config.EdgeID))
	if err != nil {
		return err
	}
	return e.Run(ctx)
}

// list is an option that may be repeated, and hold several values separated by commas.
type list []string

func (l *list) String() string { return strings.Join(*l, ",") }

// Set adds values.
func (l *list) Set(text string) error {
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item != "" {
			*l = append(*l, item)
		}
	}
	return nil
}

func runDNS(ctx context.Context, args []string, log *slog.Logger) error {
	var config dns.Config
	flags := flag.NewFlagSet("atoll-io dns", flag.ContinueOnError)
	flags.Var((*list)(&config.Listen), "listen", "`ADDR:PORT` to answer on; it need not exist yet")
	flags.Var((*list)(&config.Upstreams), "upstream", "`IP[:PORT]` of a resolver; default: those of the resolv.conf")
	flags.StringVar(&config.ResolvConf, "resolv-conf", "/etc/resolv.conf", "`FILE` with the resolvers, read again as it changes")
	admin := flags.String("admin", "", "loopback `ADDR:PORT` for /healthz and /metrics")
	flags.IntVar(&config.Limits.PerClient, "per-client", 0, "open questions of one address (default 64)")
	account := flags.String("user", "", "`NAME` to become once the addresses are bound")
	if err := flags.Parse(args); err != nil {
		return errUsage
	}
	if len(config.Listen) == 0 || flags.NArg() > 0 {
		flags.Usage()
		return errUsage
	}
	log = log.With("program", "dns")
	forwarder, err := dns.New(config, log)
	if err != nil {
		return err
	}
	if *admin != "" {
		stop, err := forwarder.ServeAdmin(*admin)
		if err != nil {
			forwarder.Close()
			return err
		}
		defer stop()
	}
	if *account != "" {
		if err := become(*account); err != nil {
			forwarder.Close()
			return err
		}
	}
	return forwarder.Run(ctx)
}

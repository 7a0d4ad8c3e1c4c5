// Command atoll-guest is the agent inside a sandbox: as PID 1 of a container, or as a service of a machine.
//
// Its whole configuration comes in the environment variable ATOLL_GUEST_CONFIG. It mounts nothing and raises no limits.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"
	"time"

	"atoll.local/native/internal/guest"
	"atoll.local/native/internal/guest/control"
	"atoll.local/native/internal/version"
)

// procsMax bounds the threads that run Go code: the guest moves bytes, the sandbox's cores are its user's.
const procsMax = 4

func main() {
	if len(os.Args) == 2 && os.Args[1] == "--version" {
		fmt.Println(version.Version)
		return
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "atoll-guest:", err)
		os.Exit(1)
	}
}

func run() error {
	text := os.Getenv(control.ConfigVariable)
	if err := os.Unsetenv(control.ConfigVariable); err != nil {
		return err
	}
	config, err := control.ParseConfig([]byte(text))
	if err != nil {
		return err
	}
	debug.SetGCPercent(50)
	runtime.GOMAXPROCS(min(runtime.GOMAXPROCS(0), procsMax))
	syscall.Umask(0o022)
	isInit := os.Getpid() == 1
	if isInit {
		shieldInit()
	}
	var machine control.Machine = control.NoMachine{}
	if isInit || config.OwnsMachine {
		machine = control.OwnMachine{}
	}
	listener, err := guest.Listen(context.Background(), config.Listen)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	return guest.New(guest.Options{
		Config:         config,
		Machine:        machine,
		PasswdPath:     "/etc/passwd",
		GroupPath:      "/etc/group",
		ReapEverything: isInit,
		Now:            time.Now,
		Log:            log,
	}).Serve(listener)
}

// shieldInit makes PID 1 deaf to every signal that it may be deaf to: the machine ends when its host says so. The
// signals are caught, not ignored, because a child would inherit it if they were ignored.
func shieldInit() {
	deaf := make(chan os.Signal, 1)
	for number := syscall.Signal(1); number < 65; number++ {
		switch number {
		case syscall.SIGKILL, syscall.SIGSTOP, syscall.SIGCHLD, syscall.SIGURG, syscall.SIGPROF:
			// The first two cannot be caught, the reaper needs the third, the runtime the others.
		case syscall.SIGSEGV, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGILL, syscall.SIGTRAP, syscall.SIGSYS:
			// A fault in our own code must not become an endless loop.
		default:
			signal.Notify(deaf, number)
		}
	}
	go func() {
		for range deaf {
		}
	}()
}

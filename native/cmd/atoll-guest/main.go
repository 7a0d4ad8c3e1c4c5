// Command atoll-guest is the agent inside a sandbox: as PID 1 of a container or of a virtual machine, or as a service of a machine.
//
// Its whole configuration comes in the environment variable ATOLL_GUEST_CONFIG; in that case it mounts nothing and raises no
// limits. As the init of a kernel's first file system it makes the machine first, and is told by a disk (internal/guest/boot).
package main

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"atoll.local/native/internal/guest"
	"atoll.local/native/internal/guest/boot"
	"atoll.local/native/internal/guest/control"
	"atoll.local/native/internal/guest/group"
	"atoll.local/native/internal/guest/reap"
	"atoll.local/native/internal/guest/threads"
	"atoll.local/native/internal/version"
)

// procsMax bounds the threads that run Go code: the guest moves bytes, the sandbox's cores are its user's.
const procsMax = 4

// threadsReserved covers the slots, the threads that run Go code, and the runtime's own few.
const threadsReserved = guest.KernelSlots + procsMax

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

// configuration is what this guest was told, and whether it has made the machine that it is in.
func configuration() (text []byte, machine bool, err error) {
	if boot.IsMachine() {
		text, err = boot.Machine()
		return text, true, err
	}
	text = []byte(os.Getenv(control.ConfigVariable))
	if err := os.Unsetenv(control.ConfigVariable); err != nil {
		return nil, false, err
	}
	wipeEnvironment()
	return text, false, nil
}

func run() error {
	text, virtual, err := configuration()
	if err != nil {
		return err
	}
	config, err := control.ParseConfig(text)
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
	// Beside the first answers, not before them: making threads takes milliseconds, and no user runs anything yet.
	go func() {
		threads.Reserve(threadsReserved)
		if isInit && !virtual {
			limitProcesses(config.PidsMax)
		}
	}()
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	var users reap.Group
	if virtual {
		made, err := group.Make("/sys/fs/cgroup", config.PidsMax)
		if err != nil {
			return err
		}
		users = made
		if err := listen(made, config.PlacementFile, log); err != nil {
			return err
		}
	}
	return guest.New(guest.Options{
		Config:         config,
		Group:          users,
		Machine:        machine,
		PasswdPath:     "/etc/passwd",
		GroupPath:      "/etc/group",
		ReapEverything: isInit,
		Now:            time.Now,
		Log:            log,
	}).Serve(listener)
}

// limitProcesses bounds everything inside by the sandbox's own control group. Under gVisor the host cannot do it: its limit
// counts other things, and reaching it ends the whole sandbox. Where the host's limit counts, the group is not ours to write.
func limitProcesses(count int) {
	if count > 0 {
		_ = os.WriteFile("/sys/fs/cgroup/pids/pids.max", []byte(strconv.Itoa(count)), 0)
	}
}

// wipeEnvironment clears what /proc/self/environ shows: the memory that the kernel handed the environment over in. The
// runtime has its own copy. Where it cannot be done, other root processes of the sandbox can read the configuration,
// which holds nothing that would let them in.
func wipeEnvironment() {
	text, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return
	}
	// proc(5): env_start and env_end are fields 50 and 51; the name in brackets, field 2, may hold spaces.
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	if len(fields) < 49 {
		return
	}
	start, startErr := strconv.ParseInt(fields[47], 10, 64)
	end, endErr := strconv.ParseInt(fields[48], 10, 64)
	if startErr != nil || endErr != nil || start <= 0 || end <= start || end-start > 4<<20 {
		return
	}
	memory, err := os.OpenFile("/proc/self/mem", os.O_WRONLY, 0)
	if err != nil {
		return
	}
	defer memory.Close()
	_, _ = memory.WriteAt(make([]byte, end-start), start)
}

// shieldInit makes PID 1 deaf to every signal that it may be deaf to: the machine ends when its host says so. The
// signals are caught, not ignored, because a child would inherit it if they were ignored.
func shieldInit() {
	deaf := make(chan os.Signal, 1)
	for number := syscall.Signal(1); number < 65; number++ {
		switch number {
		case syscall.SIGKILL, syscall.SIGSTOP, syscall.SIGCHLD, syscall.SIGURG, syscall.SIGPROF:
			// The first two cannot be caught, the reaper needs the third, the runtime the others.
		default:
			// SIGSEGV and its like too: only those that somebody sends come here, a fault of our own still ends us.
			signal.Notify(deaf, number)
		}
	}
	go func() {
		for range deaf {
		}
	}()
}

package process

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"syscall"

	"atoll.local/native/internal/guest/paths"
	"atoll.local/native/internal/guest/reap"
	"atoll.local/native/internal/guest/rpc"
	"atoll.local/native/internal/guest/settings"
	"atoll.local/native/internal/guest/users"
)

// defaultPath is what a process gets when the guest itself was started without PATH.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// oomScore makes the kernel take a user's process before the guest (envd's value).
const oomScore = "100"

// plan is everything needed to start one process, checked.
type plan struct {
	path   string
	argv   []string
	env    []string
	dir    string
	user   *users.User
	config processConfig
	tag    *string
}

// makePlan checks a request against the file system and the settings. Errors are ready for the wire.
func makePlan(config processConfig, tag *string, user *users.User, now *settings.Values) (*plan, error) {
	if config.Cmd == "" {
		return nil, rpc.Errorf(rpc.InvalidArgument, "error starting process: no command")
	}
	if tag != nil && *tag == systemTag {
		return nil, rpc.Errorf(rpc.InvalidArgument, "tag '%s' is reserved", systemTag)
	}
	cwd := ""
	if config.Cwd != nil {
		cwd = *config.Cwd
	}
	dir, err := paths.Resolve(cwd, user, now.DefaultWorkdir)
	if err != nil {
		return nil, rpc.Errorf(rpc.InvalidArgument, "%v", err)
	}
	info, err := os.Stat(dir)
	switch {
	case err != nil && (errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)):
		return nil, rpc.Errorf(rpc.InvalidArgument, "cwd '%s' does not exist", dir)
	case err == nil && !info.IsDir():
		return nil, rpc.Errorf(rpc.InvalidArgument, "cwd '%s' is not a directory", dir)
	}
	env, searchPath, err := environment(user, now.Env, config.Envs)
	if err != nil {
		return nil, err
	}
	command := shellFor(config.Cmd)
	path, err := lookPath(command, searchPath)
	if err != nil {
		return nil, startError(config, err)
	}
	return &plan{
		path:   path,
		argv:   append([]string{command}, config.Args...),
		env:    env,
		dir:    dir,
		user:   user,
		config: config,
		tag:    tag,
	}, nil
}

// environment builds PATH, HOME, USER, LOGNAME, then the sandbox's variables, then the request's; a later one wins.
func environment(user *users.User, sandbox, request map[string]string) (env []string, searchPath string, err error) {
	path := os.Getenv("PATH")
	if path == "" {
		path = defaultPath
	}
	env = []string{"PATH=" + path, "HOME=" + user.Home, "USER=" + user.Name, "LOGNAME=" + user.Name}
	position := map[string]int{"PATH": 0, "HOME": 1, "USER": 2, "LOGNAME": 3}
	for _, layer := range []map[string]string{sandbox, request} {
		names := make([]string, 0, len(layer))
		for name := range layer {
			names = append(names, name)
		}
		sort.Strings(names)
		for _, name := range names {
			if name == "" || strings.ContainsAny(name, "=\x00") || strings.Contains(layer[name], "\x00") {
				return nil, "", rpc.Errorf(rpc.InvalidArgument, "invalid environment variable %q", name)
			}
			line := name + "=" + layer[name]
			if at, ok := position[name]; ok {
				env[at] = line
				continue
			}
			position[name] = len(env)
			env = append(env, line)
		}
	}
	return env, strings.TrimPrefix(env[0], "PATH="), nil
}

// shellFor is the command itself, but /bin/sh for a /bin/bash that is not there: E2B's clients run every line with that, and
// small images have no bash.
func shellFor(command string) string {
	if command != "/bin/bash" {
		return command
	}
	if _, err := os.Stat(command); errors.Is(err, os.ErrNotExist) {
		return "/bin/sh"
	}
	return command
}

// lookPath finds a command the way a shell would, in the PATH that the process itself will have.
func lookPath(command, searchPath string) (string, error) {
	if strings.Contains(command, "/") {
		return command, nil
	}
	for _, dir := range filepath.SplitList(searchPath) {
		if dir == "" {
			dir = "."
		}
		candidate := filepath.Join(dir, command)
		if info, err := os.Stat(candidate); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return candidate, nil
		}
	}
	return "", fmt.Errorf("exec: %q: executable file not found in $PATH", command)
}

// startError gives a failed start its code: what may pass by itself is resource_exhausted, the rest the caller's fault.
func startError(config processConfig, err error) error {
	code := rpc.InvalidArgument
	for _, passing := range []error{syscall.EAGAIN, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE, syscall.ENOSPC} {
		if errors.Is(err, passing) {
			code = rpc.ResourceExhausted
		}
	}
	line := strings.Join(append([]string{config.Cmd}, config.Args...), " ")
	if len(line) > 256 {
		line = line[:256] + "..."
	}
	return rpc.Errorf(code, "error starting process '%s': %v", line, err)
}

// fork starts the planned process on the given descriptors, in a session of its own.
func (p *plan) fork(reaper *reap.Reaper, stdin, stdout, stderr *os.File, isTerminal bool) (*reap.Child, error) {
	attr := &syscall.ProcAttr{
		Dir:   p.dir,
		Env:   p.env,
		Files: []uintptr{stdin.Fd(), stdout.Fd(), stderr.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true, Setctty: isTerminal, Ctty: 0},
	}
	if os.Geteuid() == 0 {
		attr.Sys.Credential = &syscall.Credential{
			Uid:    uint32(p.user.UID),
			Gid:    uint32(p.user.GID),
			Groups: p.user.Groups,
		}
	} else if p.user.UID != os.Geteuid() {
		return nil, fmt.Errorf("cannot become user '%s': %w", p.user.Name, syscall.EPERM)
	}
	child, err := reaper.Start(p.path, p.argv, attr)
	if err != nil {
		return nil, &os.PathError{Op: "fork/exec", Path: p.path, Err: err}
	}
	// gVisor and some containers refuse it; the process is no worse off then.
	score, err := os.OpenFile("/proc/"+strconv.Itoa(child.PID)+"/oom_score_adj", os.O_WRONLY, 0)
	if err == nil {
		_, _ = score.WriteString(oomScore)
		_ = score.Close()
	}
	return child, nil
}

package main

import (
	"fmt"
	"os/user"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// become makes the whole process another user, for good, and gives up every capability with it.
//
// The kernel forgets by it that this process ends with its parent; who had asked for that has it asked again.
func become(name string) error {
	account, err := user.Lookup(name)
	if err != nil {
		return fmt.Errorf("user %q: %w", name, err)
	}
	uid, uidErr := strconv.Atoi(account.Uid)
	gid, gidErr := strconv.Atoi(account.Gid)
	if uidErr != nil || gidErr != nil || uid == 0 {
		return fmt.Errorf("user %q is none to become", name)
	}
	var signal int32
	if err := unix.Prctl(unix.PR_GET_PDEATHSIG, uintptr(unsafe.Pointer(&signal)), 0, 0, 0); err != nil {
		return fmt.Errorf("read the parent's death signal: %w", err)
	}
	parent := unix.Getppid()
	if err := syscall.Setgroups([]int{gid}); err != nil {
		return fmt.Errorf("set groups: %w", err)
	}
	if err := syscall.Setgid(gid); err != nil {
		return fmt.Errorf("set group: %w", err)
	}
	if err := syscall.Setuid(uid); err != nil {
		return fmt.Errorf("set user: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("give up new privileges: %w", err)
	}
	if signal == 0 {
		return nil
	}
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(signal), 0, 0, 0); err != nil {
		return fmt.Errorf("set the parent's death signal: %w", err)
	}
	if unix.Getppid() != parent {
		return fmt.Errorf("the parent ended meanwhile")
	}
	return nil
}

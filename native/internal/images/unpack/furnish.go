package unpack

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	accountFileMax = 4 << 20
	userName       = "user"
	userIDFrom     = 1000
	userIDTo       = 60000
	sudoRule       = userName + " ALL=(ALL:ALL) NOPASSWD: ALL\n"
)

// Furnish adds what a guest needs and an image may lack: places to mount on, the accounts root and user with a home, and
// user's right to become root where the image has sudo. What the image has stays as it is.
func (t *Tree) Furnish() error {
	for _, name := range []string{"proc", "sys", "dev", "run", "tmp", "etc", ".atoll", "home"} {
		mode := uint32(0o755)
		if name == "tmp" {
			mode = 0o1777
		}
		if err := t.directory(name, mode); err != nil {
			return failed(err, name)
		}
	}
	// A runtime would make these in the tree itself, which all sandboxes share; and a link would have it mount elsewhere.
	for _, name := range []string{".atoll/guest", "etc/resolv.conf"} {
		if err := t.plainFile(name); err != nil {
			return failed(err, name)
		}
	}
	if err := t.accounts(); err != nil {
		return failed(err, "etc/passwd")
	}
	return nil
}

// MakeDirectory has a directory of an image's configuration, which no layer need have made: root's, 0755.
func (t *Tree) MakeDirectory(name string) error {
	inside, err := cleaned(strings.TrimLeft(path.Clean("/"+name), "/"))
	if err != nil || inside == "" {
		return err
	}
	made, err := t.makeDirectories(inside)
	if err != nil {
		return failed(err, name)
	}
	return unix.Close(made)
}

// directory has a real directory of that name in the root; a link or a file in its place goes.
func (t *Tree) directory(name string, mode uint32) error {
	var there unix.Stat_t
	err := unix.Fstatat(t.root, name, &there, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && there.Mode&unix.S_IFMT == unix.S_IFDIR {
		return nil
	}
	if err == nil {
		if name == "etc" || name == "home" {
			// Programs of the image may count on where it leads.
			found, err := t.open(name)
			if err == nil {
				unix.Close(found)
			}
			return err
		}
		if err := unix.Unlinkat(t.root, name, 0); err != nil {
			return err
		}
	} else if !errors.Is(err, unix.ENOENT) {
		return err
	}
	if err := unix.Mkdirat(t.root, name, 0o755); err != nil {
		return err
	}
	return unix.Fchmodat(t.root, name, mode, 0)
}

// plainFile has a regular file of that name.
func (t *Tree) plainFile(name string) error {
	directory, base := split(name)
	parent, err := t.open(directory)
	if err != nil {
		return err
	}
	defer unix.Close(parent)
	var there unix.Stat_t
	err = unix.Fstatat(parent, base, &there, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && there.Mode&unix.S_IFMT == unix.S_IFREG {
		return nil
	}
	if err == nil {
		if err := remove(parent, base, func(int, string) bool { return false }); err != nil {
			return err
		}
	} else if !errors.Is(err, unix.ENOENT) {
		return err
	}
	return create(parent, base, nil, 0o644)
}

func create(parent int, name string, content []byte, mode uint32) error {
	file, err := unix.Openat(parent, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer unix.Close(file)
	if err := writeAll(file, content, 0); err != nil {
		return err
	}
	return unix.Fchmod(file, mode)
}

// accounts adds root and user to the account files, and user's home.
func (t *Tree) accounts() error {
	etc, err := t.open("etc")
	if err != nil {
		return err
	}
	defer unix.Close(etc)
	passwd, err := t.read(etc, "passwd")
	if err != nil {
		return err
	}
	group, err := t.read(etc, "group")
	if err != nil {
		return err
	}
	shell := t.shell()
	if !hasAccount(passwd, "root") {
		passwd += fmt.Sprintf("root:x:0:0:root:/root:%s\n", shell)
	}
	if !hasAccount(group, "root") {
		group += "root:x:0:\n"
	}
	if hasAccount(passwd, userName) {
		return errors.Join(t.replace(etc, "passwd", passwd), t.replace(etc, "group", group))
	}
	id := freeID(passwd, group)
	passwd += fmt.Sprintf("%s:x:%d:%d::/home/%s:%s\n", userName, id, id, userName, shell)
	if !hasAccount(group, userName) {
		group += fmt.Sprintf("%s:x:%d:\n", userName, id)
	}
	if err := errors.Join(t.replace(etc, "passwd", passwd), t.replace(etc, "group", group)); err != nil {
		return err
	}
	return errors.Join(t.shadow(etc), t.home(id), t.sudo())
}

// shadow has the user in etc/shadow, where the image has one: whom PAM does not find there it takes for locked out, also for sudo. No
// password is theirs. The file stays whose it was.
func (t *Tree) shadow(etc int) error {
	var there unix.Stat_t
	if err := unix.Fstatat(etc, "shadow", &there, unix.AT_SYMLINK_NOFOLLOW); err != nil || there.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil
	}
	known, err := t.read(etc, "shadow")
	if err != nil || hasAccount(known, userName) {
		return err
	}
	if err := t.replace(etc, "shadow", known+userName+":*::0:99999:7:::\n"); err != nil {
		return err
	}
	if t.owned {
		if err := unix.Fchownat(etc, "shadow", int(there.Uid), int(there.Gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
	}
	return unix.Fchmodat(etc, "shadow", there.Mode&0o777, 0)
}

func (t *Tree) shell() string {
	for _, shell := range []string{"bin/bash", "usr/bin/bash"} {
		how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS}
		if found, err := unix.Openat2(t.root, shell, &how); err == nil {
			unix.Close(found)
			return "/" + shell
		}
	}
	return "/bin/sh"
}

func (t *Tree) home(id int) error {
	home, err := t.open("home")
	if err != nil {
		return err
	}
	defer unix.Close(home)
	err = unix.Mkdirat(home, userName, 0o755)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	if err == nil {
		err = unix.Fchmodat(home, userName, 0o755, 0) // whatever the umask
	}
	if err != nil || !t.owned {
		return err
	}
	return unix.Fchownat(home, userName, id, id, unix.AT_SYMLINK_NOFOLLOW)
}

func (t *Tree) sudo() error {
	rules, err := t.open("etc/sudoers.d")
	if err != nil {
		return nil // no sudo here
	}
	defer unix.Close(rules)
	if err := create(rules, "atoll-user", []byte(sudoRule), 0o440); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}

// read returns a file of the image, wherever inside its root a link leads; "" when there is none. It ends in a newline.
func (t *Tree) read(directory int, name string) (string, error) {
	how := unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NONBLOCK | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS,
	}
	found, err := unix.Openat2(directory, name, &how)
	if err != nil {
		if errors.Is(err, unix.ENOENT) {
			return "", nil
		}
		return "", err
	}
	file := os.NewFile(uintptr(found), name)
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() {
		return "", refuse("%q is no file", name)
	}
	content, err := io.ReadAll(io.LimitReader(file, accountFileMax+1))
	if err != nil {
		return "", err
	}
	if len(content) > accountFileMax {
		return "", refuse("%q has more than %d bytes", name, accountFileMax)
	}
	text := string(content)
	if text != "" && !strings.HasSuffix(text, "\n") {
		text += "\n"
	}
	return text, nil
}

// replace puts a file in the place of what has its name.
func (t *Tree) replace(directory int, name, content string) error {
	unfinished, mode := ".atoll-"+name, uint32(0o644)
	if name == "shadow" {
		mode = 0o600
	}
	_ = unix.Unlinkat(directory, unfinished, 0)
	if err := create(directory, unfinished, []byte(content), mode); err != nil {
		return err
	}
	return unix.Renameat(directory, unfinished, directory, name)
}

func hasAccount(text, name string) bool {
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, name+":") {
			return true
		}
	}
	return false
}

// freeID is the first number that neither file has.
func freeID(texts ...string) int {
	taken := make(map[int]struct{})
	for _, text := range texts {
		for line := range strings.Lines(text) {
			if fields := strings.Split(strings.TrimSpace(line), ":"); len(fields) > 2 {
				if id, err := strconv.Atoi(fields[2]); err == nil {
					taken[id] = struct{}{}
				}
			}
		}
	}
	for id := userIDFrom; id < userIDTo; id++ {
		if _, found := taken[id]; !found {
			return id
		}
	}
	return userIDFrom
}

// Package users looks up accounts in the guest's own passwd and group files.
//
// The guest is a static binary, so there is no NSS: the two files are the whole truth, as they are for any image that
// Atoll starts. Parsed files are cached until their size, time or inode changes.
package users

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// fileBytesMax bounds how much of an account file is read: untrusted content must not cost us memory.
const fileBytesMax = 4 << 20

// User is one account with the groups it belongs to.
type User struct {
	Name   string
	UID    int
	GID    int
	Home   string
	Groups []uint32
}

// UnknownError says that no account has this name.
type UnknownError struct{ Name string }

func (e UnknownError) Error() string { return "user: unknown user " + e.Name }

// Directory answers look-ups from a passwd and a group file.
type Directory struct {
	passwdPath string
	groupPath  string

	mu     sync.Mutex
	passwd cached[[]account]
	group  cached[[]group]
}

// NewDirectory reads accounts from the given files; the usual ones are /etc/passwd and /etc/group.
func NewDirectory(passwdPath, groupPath string) *Directory {
	return &Directory{passwdPath: passwdPath, groupPath: groupPath}
}

type account struct {
	name string
	uid  int
	gid  int
	home string
}

type group struct {
	name    string
	gid     int
	members []string
}

// Lookup returns the account called name with its supplementary groups. As an image's USER may, a name can be a number,
// which needs no account, and be followed by `:group`, which then is the only group.
//
// Errors: UnknownError when there is none.
func (d *Directory) Lookup(name string) (*User, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	accounts, err := d.passwd.load(d.passwdPath, parsePasswd)
	if err != nil {
		return nil, fmt.Errorf("user: %w", err)
	}
	wanted, group, hasGroup := strings.Cut(name, ":")
	found, known := find(accounts, wanted)
	if !known {
		return nil, UnknownError{name}
	}
	if !hasGroup {
		return &User{Name: found.name, UID: found.uid, GID: found.gid, Home: found.home, Groups: d.groupsOf(found)}, nil
	}
	gid, known := d.groupID(group)
	if !known {
		return nil, UnknownError{name}
	}
	return &User{Name: found.name, UID: found.uid, GID: gid, Home: found.home, Groups: []uint32{uint32(gid)}}, nil
}

// find looks for a name first: there are accounts whose name is a number.
func find(accounts []account, wanted string) (account, bool) {
	for _, a := range accounts {
		if a.name == wanted {
			return a, true
		}
	}
	id, err := parseID(wanted)
	if err != nil {
		return account{}, false
	}
	for _, a := range accounts {
		if a.uid == id {
			return a, true
		}
	}
	return account{name: wanted, uid: id, gid: 0, home: "/"}, true
}

func (d *Directory) groupID(wanted string) (int, bool) {
	groups, _ := d.group.load(d.groupPath, parseGroup)
	for _, g := range groups {
		if g.name == wanted {
			return g.gid, true
		}
	}
	id, err := parseID(wanted)
	return id, err == nil
}

// UserName returns the name of uid, or the number itself where no account has it.
func (d *Directory) UserName(uid uint32) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	accounts, _ := d.passwd.load(d.passwdPath, parsePasswd)
	for _, a := range accounts {
		if a.uid == int(uid) {
			return a.name
		}
	}
	return strconv.FormatUint(uint64(uid), 10)
}

// GroupName returns the name of gid, or the number itself where no group has it.
func (d *Directory) GroupName(gid uint32) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	groups, _ := d.group.load(d.groupPath, parseGroup)
	for _, g := range groups {
		if g.gid == int(gid) {
			return g.name
		}
	}
	return strconv.FormatUint(uint64(gid), 10)
}

func (d *Directory) groupsOf(a account) []uint32 {
	ids := []uint32{uint32(a.gid)}
	groups, _ := d.group.load(d.groupPath, parseGroup)
	for _, g := range groups {
		if g.gid == a.gid {
			continue
		}
		for _, member := range g.members {
			if member == a.name {
				ids = append(ids, uint32(g.gid))
				break
			}
		}
	}
	return ids
}

// cached is a parsed file together with what identified its content when it was read.
type cached[T any] struct {
	size    int64
	changed time.Time
	inode   uint64
	valid   bool
	value   T
}

func (c *cached[T]) load(path string, parse func(io.Reader) T) (T, error) {
	info, err := os.Stat(path)
	if err != nil {
		var none T
		return none, err
	}
	var inode uint64
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		inode = st.Ino
	}
	if c.valid && c.size == info.Size() && c.changed.Equal(info.ModTime()) && c.inode == inode {
		return c.value, nil
	}
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		var none T
		return none, err
	}
	defer file.Close()
	value := parse(io.LimitReader(file, fileBytesMax))
	*c = cached[T]{size: info.Size(), changed: info.ModTime(), inode: inode, valid: true, value: value}
	return value, nil
}

// parsePasswd reads name:password:uid:gid:comment:home:shell lines and skips whatever is not one.
func parsePasswd(r io.Reader) []account {
	var accounts []account
	eachLine(r, func(line string) {
		f := strings.Split(line, ":")
		if len(f) < 6 || f[0] == "" {
			return
		}
		uid, uidErr := parseID(f[2])
		gid, gidErr := parseID(f[3])
		if uidErr != nil || gidErr != nil {
			return
		}
		home := f[5]
		if !strings.HasPrefix(home, "/") {
			home = "/"
		}
		accounts = append(accounts, account{name: f[0], uid: uid, gid: gid, home: home})
	})
	return accounts
}

// parseGroup reads name:password:gid:member,member lines and skips whatever is not one.
func parseGroup(r io.Reader) []group {
	var groups []group
	eachLine(r, func(line string) {
		f := strings.Split(line, ":")
		if len(f) < 4 || f[0] == "" {
			return
		}
		gid, err := parseID(f[2])
		if err != nil {
			return
		}
		g := group{name: f[0], gid: gid}
		for _, member := range strings.Split(f[3], ",") {
			if member = strings.TrimSpace(member); member != "" {
				g.members = append(g.members, member)
			}
		}
		groups = append(groups, g)
	})
	return groups
}

// parseID accepts 0..2^32-2: the last value means "no change" to the kernel's set*id calls.
func parseID(s string) (int, error) {
	id, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return 0, err
	}
	if id == 1<<32-1 {
		return 0, strconv.ErrRange
	}
	return int(id), nil
}

func eachLine(r io.Reader, f func(string)) {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 4096), 256<<10)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if line != "" && !strings.HasPrefix(line, "#") {
			f(line)
		}
	}
}

package users

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestLookup(t *testing.T) {
	dir := t.TempDir()
	passwd, group := filepath.Join(dir, "passwd"), filepath.Join(dir, "group")
	write(t, passwd, "# comment\nroot:x:0:0:root:/root:/bin/sh\nbroken\nbad:x:minus:1::/:\nuser:x:1000:1001:User, Name:/home/user:/bin/bash\nnohome:x:7:7:::\nuser:x:5:5::/second:\n")
	write(t, group, "root:x:0:\nuser:x:1001:\nwheel:x:10:root, user\nbad:x:x:user\ndocker:x:11:user,other\n")
	d := NewDirectory(passwd, group)
	user, err := d.Lookup("user")
	if err != nil || user.UID != 1000 || user.GID != 1001 || user.Home != "/home/user" || !slices.Equal(user.Groups, []uint32{1001, 10, 11}) {
		t.Fatalf("%+v %v", user, err)
	}
	if u, _ := d.Lookup("nohome"); u.Home != "/" {
		t.Fatalf("%+v", u)
	}
	for name, want := range map[string]User{
		"1000": {UID: 1000, GID: 1001, Home: "/home/user"}, "4000": {UID: 4000, Home: "/"}, "user:docker": {UID: 1000, GID: 11, Home: "/home/user"},
		"4000:50": {UID: 4000, GID: 50, Home: "/"},
	} {
		if u, err := d.Lookup(name); err != nil || u.UID != want.UID || u.GID != want.GID || u.Home != want.Home {
			t.Errorf("%q: %+v %v", name, u, err)
		}
	}
	for _, name := range []string{"", "ghost", "bad", "broken", ":", "user:", "user:ghost", "4294967295", "-1"} {
		if _, err := d.Lookup(name); err == nil || err.Error() != "user: unknown user "+name {
			t.Errorf("%q: %v", name, err)
		}
	}
	if d.UserName(1000) != "user" || d.UserName(99) != "99" || d.GroupName(10) != "wheel" || d.GroupName(1<<32-1) != "4294967295" {
		t.Fatal("names")
	}
	// A user made later is there, also when the file keeps its size.
	later := time.Now().Add(time.Second)
	write(t, passwd, strings.ReplaceAll("root:x:0:0:root:/root:/bin/sh\nnew:x:1:1::/:\n", "\n", "\n"))
	_ = os.Chtimes(passwd, later, later)
	if _, err := d.Lookup("new"); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Lookup("user"); err == nil {
		t.Fatal("a removed user was found")
	}
	_ = os.Remove(passwd)
	if _, err := d.Lookup("root"); err == nil {
		t.Fatal("found in no file")
	}
	if d.UserName(0) != "0" {
		t.Fatal(d.UserName(0))
	}
}

func FuzzPasswd(f *testing.F) {
	f.Add("root:x:0:0:root:/root:/bin/sh\n")
	f.Add("a:b:4294967295:1::relative:\n:::::::\n#\n")
	f.Fuzz(func(t *testing.T, text string) {
		for _, a := range parsePasswd(strings.NewReader(text)) {
			if a.name == "" || strings.ContainsAny(a.name, ":\n") || a.uid < 0 || a.uid >= 1<<32-1 || a.gid < 0 || a.gid >= 1<<32-1 || !strings.HasPrefix(a.home, "/") {
				t.Fatalf("%+v", a)
			}
		}
	})
}

func FuzzGroup(f *testing.F) {
	f.Add("wheel:x:10:root,user\n")
	f.Add("a:x:-1:,,\nb:x:1: , x\n")
	f.Fuzz(func(t *testing.T, text string) {
		for _, g := range parseGroup(strings.NewReader(text)) {
			if g.name == "" || g.gid < 0 || slices.Contains(g.members, "") {
				t.Fatalf("%+v", g)
			}
		}
	})
}

// Package boot makes a machine for one sandbox of a kernel that has only just started: this program is the kernel's init,
// in a file system that holds it, kernel modules and nothing else.
//
// Theory of operation. The host gives three disks: the image, which is only read; the sandbox's own disk; and a few bytes
// of configuration. The root is an overlay of the first two. What a container finds mounted is mounted, the network has one
// fixed address (the host translates it, so that a machine that was saved goes on anywhere), and the program goes on as
// PID 1 of that. Any failure ends the machine: the kernel panics, and its host sees it end.
package boot

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The places in the first file system, and how long a disk may take to appear.
const (
	modulesDir   = "/modules"
	imageDisk    = "/dev/vda"
	ownDisk      = "/dev/vdb"
	configDisk   = "/dev/vdc"
	imageDir     = "/image"
	diskDir      = "/disk"
	rootDir      = "/root"
	diskPatience = 20 * time.Second
	diskLook     = 2 * time.Millisecond
	configMax    = 1 << 20
	nofileMax    = 1 << 20
	nofileSoft   = 1024
)

// config is what the third disk holds.
type config struct {
	// Guest is the agent's own configuration, as a container has it in its environment.
	Guest    json.RawMessage `json:"guest"`
	Network  network         `json:"network"`
	Hostname string          `json:"hostname"`
	// TmpMiB, ShmMiB and RunMiB bound the file systems in memory; no TmpMiB: /tmp is a directory of the disk.
	TmpMiB int `json:"tmp_mib"`
	ShmMiB int `json:"shm_mib"`
	RunMiB int `json:"run_mib"`
}

// IsMachine says whether this process is the init of a kernel's first file system.
func IsMachine() bool {
	if os.Getpid() != 1 || len(os.Args) == 0 || os.Args[0] != "/init" {
		return false
	}
	info, err := os.Stat(modulesDir)
	return err == nil && info.IsDir()
}

// Machine boots, and returns the agent's configuration.
func Machine() ([]byte, error) {
	if err := limitFiles(); err != nil {
		return nil, err
	}
	if err := firstMounts(); err != nil {
		return nil, err
	}
	if err := loadModules(); err != nil {
		return nil, err
	}
	c, err := readConfig()
	if err != nil {
		return nil, err
	}
	if err := c.mountRoot(); err != nil {
		return nil, err
	}
	if err := c.mountRest(); err != nil {
		return nil, err
	}
	if err := c.writeFiles(); err != nil {
		return nil, err
	}
	if err := enter(); err != nil {
		return nil, err
	}
	if err := c.Network.configure(); err != nil {
		return nil, err
	}
	settle(c.Hostname)
	return c.Guest, nil
}

func mount(source, target, kind string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, kind, flags, data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", kind, target, err)
	}
	return nil
}

func firstMounts() error {
	for _, m := range []struct{ kind, target string }{{"devtmpfs", "/dev"}, {"proc", "/proc"}, {"sysfs", "/sys"}} {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return err
		}
		if err := mount(m.kind, m.target, m.kind, 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return err
		}
	}
	return nil
}

// loadModules loads what is there, in the order of the names. What the kernel has built in is no error.
func loadModules() error {
	entries, err := os.ReadDir(modulesDir)
	if err != nil {
		return err
	}
	names := make([]string, 0, len(entries))
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	sort.Strings(names)
	for _, name := range names {
		if err := loadModule(filepath.Join(modulesDir, name)); err != nil {
			return fmt.Errorf("module %s: %w", name, err)
		}
	}
	return nil
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}

func waitFor(path string) error {
	for deadline := time.Now().Add(diskPatience); ; time.Sleep(diskLook) {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the host gave no %s", path)
		}
	}
}

func readConfig() (*config, error) {
	if err := waitFor(configDisk); err != nil {
		return nil, err
	}
	f, err := os.Open(configDisk)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text := make([]byte, configMax)
	n := 0
	for n < len(text) {
		got, err := f.Read(text[n:])
		n += got
		if err != nil || got == 0 {
			break
		}
	}
	return parseConfig(text[:n])
}

// parseConfig reads the disk's content: JSON, filled up to whole sectors with zeros.
func parseConfig(text []byte) (*config, error) {
	c := &config{}
	if err := json.Unmarshal(bytes.TrimRight(text, "\x00"), c); err != nil {
		return nil, fmt.Errorf("the machine's configuration is not valid JSON: %w", err)
	}
	if len(c.Guest) == 0 || c.ShmMiB < 1 || c.RunMiB < 1 || c.TmpMiB < 0 {
		return nil, errors.New("the machine's configuration is not whole")
	}
	return c, c.Network.check()
}

// mountRoot lays the sandbox's disk over the image.
func (c *config) mountRoot() error {
	for _, disk := range []string{imageDisk, ownDisk} {
		if err := waitFor(disk); err != nil {
			return err
		}
	}
	for _, dir := range []string{imageDir, diskDir, rootDir} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := mount(imageDisk, imageDir, "erofs", unix.MS_RDONLY|unix.MS_NODEV, ""); err != nil {
		return err
	}
	if err := mount(ownDisk, diskDir, "ext4", unix.MS_NOATIME|unix.MS_NODEV, ""); err != nil {
		return err
	}
	upper, work := diskDir+"/upper", diskDir+"/work"
	if err := makeLike(imageDir, upper); err != nil {
		return err
	}
	if err := os.MkdirAll(work, 0o700); err != nil {
		return err
	}
	options := "lowerdir=" + imageDir + ",upperdir=" + upper + ",workdir=" + work
	return mount("overlay", rootDir, "overlay", unix.MS_NODEV, options)
}

// makeLike makes a directory with another one's owner and mode.
func makeLike(model, dir string) error {
	var st unix.Stat_t
	if err := unix.Stat(model, &st); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	if err := os.Chown(dir, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	return unix.Chmod(dir, st.Mode&0o7777)
}

func mib(n int) string { return "size=" + strconv.Itoa(n) + "m" }

// mountRest mounts what a container finds, below the new root.
func (c *config) mountRest() error {
	const quiet = unix.MS_NOSUID | unix.MS_NOEXEC | unix.MS_NODEV
	if err := moveTo("/dev", rootDir+"/dev"); err != nil {
		return err
	}
	mounts := []struct {
		target, kind string
		flags        uintptr
		data         string
	}{
		{"/proc", "proc", quiet, ""},
		{"/sys", "sysfs", quiet, ""},
		{"/sys/fs/cgroup", "cgroup2", quiet, ""},
		{"/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5"},
		{"/dev/shm", "tmpfs", quiet, "mode=1777," + mib(c.ShmMiB)},
		{"/dev/mqueue", "mqueue", quiet, ""},
		{"/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=755," + mib(c.RunMiB)},
	}
	for _, m := range mounts {
		target := rootDir + m.target
		if err := os.MkdirAll(target, 0o755); err != nil && m.kind != "cgroup2" {
			return err
		}
		if err := mount(m.kind, target, m.kind, m.flags, m.data); err != nil {
			return err
		}
	}
	links := map[string]string{"/dev/ptmx": "pts/ptmx", "/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2"}
	for name, target := range links {
		_ = os.Remove(rootDir + name)
		if err := os.Symlink(target, rootDir+name); err != nil {
			return err
		}
	}
	return c.mountTmp()
}

func (c *config) mountTmp() error {
	tmp := rootDir + "/tmp"
	if err := os.MkdirAll(tmp, 0o755); err != nil {
		return err
	}
	if c.TmpMiB == 0 {
		return unix.Chmod(tmp, 0o1777)
	}
	return mount("tmpfs", tmp, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777,"+mib(c.TmpMiB))
}

func moveTo(from, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	return mount(from, to, "", unix.MS_MOVE, "")
}

// writeFiles gives the machine its name and its resolver, where the image has an /etc. A hosts file is written once:
// afterwards it is the user's.
func (c *config) writeFiles() error {
	etc := rootDir + "/etc"
	info, err := os.Lstat(etc)
	if err != nil || !info.IsDir() {
		return nil
	}
	if c.Network.Resolver != "" {
		if err := replace(etc+"/resolv.conf", "nameserver "+c.Network.Resolver+"\n"); err != nil {
			return err
		}
	}
	note := diskDir + "/named"
	if _, err := os.Stat(note); err == nil {
		return nil
	}
	hosts := "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.1.1 " + c.Hostname + "\n"
	if err := replace(etc+"/hosts", hosts); err != nil {
		return err
	}
	return os.WriteFile(note, nil, 0o600)
}

// replace writes a file anew: in an image it may be a link that leads nowhere.
func replace(path, content string) error {
	if info, err := os.Lstat(path); err == nil && !info.Mode().IsRegular() {
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	if known, err := os.ReadFile(path); err == nil && string(known) == content {
		return nil
	}
	return os.WriteFile(path, []byte(content), 0o644)
}

// limitFiles gives programs the limits of open files that containers have. The Go runtime takes for itself all that it may have, and gives its
// children what it found when it began: so it begins again once.
func limitFiles() error {
	var found syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &found); err != nil || found.Max >= nofileMax {
		return err
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: nofileSoft, Max: nofileMax}); err != nil {
		return fmt.Errorf("limit of open files: %w", err)
	}
	return syscall.Exec(os.Args[0], os.Args, os.Environ())
}

// enter makes the new root the root. The first file system cannot be unmounted; what it holds is removed, for its memory.
func enter() error {
	for _, dir := range []string{"/proc", "/sys"} {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			return err
		}
	}
	_ = os.RemoveAll(modulesDir)
	_ = os.Remove("/init")
	if err := os.Chdir(rootDir); err != nil {
		return err
	}
	if err := mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return err
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return os.Chdir("/")
}

// settle does what a machine can do without.
func settle(hostname string) {
	_ = unix.Sethostname([]byte(hostname))
	// The kernel draws it when it is first read: without this, what is restored of one boot would be of as many as there are clones.
	_, _ = os.ReadFile("/proc/sys/kernel/random/boot_id")
	_ = syscall.Setrlimit(syscall.RLIMIT_CORE, &syscall.Rlimit{})
	for name, value := range map[string]string{
		"net/ipv4/ip_unprivileged_port_start": "0",
		"net/ipv4/ping_group_range":           "0 2147483647",
	} {
		_ = os.WriteFile("/proc/sys/"+name, []byte(value), 0)
	}
	os.Clearenv()
	_ = os.Setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	_ = os.Setenv("HOME", "/root")
}

// Restart ends the machine: what is on its disk is written, and the virtual machine's host, which was told so, ends it
// rather than starting it again.
func Restart() {
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
}

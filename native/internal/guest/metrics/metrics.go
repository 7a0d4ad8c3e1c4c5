// Package metrics says what the sandbox uses: CPU, memory and disk, by the limits that really hold it.
//
// Inside gVisor and virtual machines /proc describes the sandbox. In a shared-kernel container it describes the host,
// so the container's own cgroup is asked first, and its limits win where they are lower.
package metrics

import (
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const mib = 1 << 20

// Metrics is the answer of GET /metrics.
type Metrics struct {
	Timestamp int64   `json:"ts"`
	CPUCount  int     `json:"cpu_count"`
	CPUUsed   float64 `json:"cpu_used_pct"`
	MemTotal  uint64  `json:"mem_total"`
	MemUsed   uint64  `json:"mem_used"`
	MemCache  uint64  `json:"mem_cache"`
	MemTotalM uint64  `json:"mem_total_mib"`
	MemUsedM  uint64  `json:"mem_used_mib"`
	DiskUsed  uint64  `json:"disk_used"`
	DiskTotal uint64  `json:"disk_total"`
}

// Meter measures. CPU use is over the time since the last measurement, the first since the start.
type Meter struct {
	proc   string
	cgroup string
	disk   string
	now    func() time.Time

	mu      sync.Mutex
	before  time.Duration // CPU time used at the last measurement
	sampled time.Time
}

// New measures the machine whose trees these are: usually /proc, /sys/fs/cgroup and /.
func New(proc, cgroup, disk string, now func() time.Time) *Meter {
	m := &Meter{proc: proc, cgroup: cgroup, disk: disk, now: now, sampled: now()}
	m.before = m.cpuTime()
	return m
}

// Read measures now.
func (m *Meter) Read() (*Metrics, error) {
	memory, err := m.memory()
	if err != nil {
		return nil, err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(m.disk, &st); err != nil {
		return nil, &os.PathError{Op: "statfs", Path: m.disk, Err: err}
	}
	block := uint64(st.Bsize)
	cpus := m.cpus()
	return &Metrics{
		Timestamp: m.now().Unix(),
		CPUCount:  int(math.Ceil(cpus)),
		CPUUsed:   m.cpuUsed(cpus),
		MemTotal:  memory.total,
		MemUsed:   memory.used,
		MemCache:  memory.cache,
		MemTotalM: memory.total / mib,
		MemUsedM:  memory.used / mib,
		DiskUsed:  (st.Blocks - st.Bfree) * block,
		DiskTotal: st.Blocks * block,
	}, nil
}

// cpuUsed is the share of all cores since the last call, in percent with two decimals.
func (m *Meter) cpuUsed(cpus float64) float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	used, now := m.cpuTime(), m.now()
	spent, passed := used-m.before, now.Sub(m.sampled)
	m.before, m.sampled = used, now
	if passed <= 0 || spent <= 0 {
		return 0
	}
	percent := 100 * spent.Seconds() / passed.Seconds() / cpus
	return math.Round(min(percent, 100)*100) / 100
}

// cpus is how many cores may be used: those of the machine, or fewer by the cgroup's quota.
func (m *Meter) cpus() float64 {
	machine := float64(runtime.NumCPU())
	var quota, period float64
	if words := fields(m.cgroup, "cpu.max"); len(words) == 2 {
		quota, period = number(words[0]), number(words[1])
	} else {
		quota = number(first(m.cgroup, "cpu/cpu.cfs_quota_us"))
		period = number(first(m.cgroup, "cpu/cpu.cfs_period_us"))
	}
	if quota > 0 && period > 0 {
		return min(machine, quota/period)
	}
	return machine
}

type memory struct{ total, used, cache uint64 }

// memory prefers the cgroup where it has a limit below the machine's memory.
func (m *Meter) memory() (memory, error) {
	info, err := meminfo(filepath.Join(m.proc, "meminfo"))
	if err != nil {
		return memory{}, err
	}
	machine := memory{total: info["MemTotal"], cache: info["Cached"] + info["Buffers"]}
	if free, ok := info["MemAvailable"]; ok {
		machine.used = sub(machine.total, free)
	} else {
		machine.used = sub(machine.total, info["MemFree"]+machine.cache)
	}
	for _, v := range []struct{ limit, usage, stat, cache string }{
		{"memory.max", "memory.current", "memory.stat", "file"},
		{"memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_cache"},
	} {
		limit, usage := number(first(m.cgroup, v.limit)), number(first(m.cgroup, v.usage))
		if limit > 0 && usage >= 0 && limit < float64(machine.total) {
			cache, _ := strconv.ParseUint(keyed(m.cgroup, v.stat, v.cache), 10, 64)
			return memory{total: uint64(limit), used: sub(uint64(usage), cache), cache: cache}, nil
		}
	}
	return machine, nil
}

func sub(a, b uint64) uint64 {
	if b > a {
		return 0
	}
	return a - b
}

// cpuTime is the CPU time used so far, by the first source that counts: the cgroup, the machine, all processes.
func (m *Meter) cpuTime() time.Duration {
	if usec := number(keyed(m.cgroup, "cpu.stat", "usage_usec")); usec > 0 {
		return time.Duration(usec) * time.Microsecond
	}
	for _, name := range []string{"cpuacct/cpuacct.usage", "cpu,cpuacct/cpuacct.usage"} {
		if ns := number(first(m.cgroup, name)); ns > 0 {
			return time.Duration(ns)
		}
	}
	if ticks := machineTicks(filepath.Join(m.proc, "stat")); ticks > 0 {
		return ticks * tick
	}
	return processTicks(m.proc) * tick
}

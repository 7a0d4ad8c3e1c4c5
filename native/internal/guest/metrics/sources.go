package metrics

import (
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// tick is the kernel's USER_HZ, fixed at 100 for programs on every architecture that Atoll runs on.
const tick = 10 * time.Millisecond

const sourceBytesMax = 256 << 10

// read returns a small file, or nothing: sources that are missing are skipped.
func read(path string) string {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return ""
	}
	defer f.Close()
	text, _ := io.ReadAll(io.LimitReader(f, sourceBytesMax))
	return string(text)
}

func fields(root, name string) []string { return strings.Fields(read(filepath.Join(root, name))) }

func first(root, name string) string {
	if words := fields(root, name); len(words) > 0 {
		return words[0]
	}
	return ""
}

// keyed returns the value of a "key value" line.
func keyed(root, name, key string) string {
	for line := range strings.Lines(read(filepath.Join(root, name))) {
		if words := strings.Fields(line); len(words) == 2 && words[0] == key {
			return words[1]
		}
	}
	return ""
}

// number parses, or returns NaN, which no comparison holds for: "max" and missing files are no limits.
func number(text string) float64 {
	n, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return math.NaN()
	}
	return n
}

// meminfo returns bytes by name.
func meminfo(path string) (map[string]uint64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	values := make(map[string]uint64)
	for line := range strings.Lines(string(text)) {
		name, rest, found := strings.Cut(line, ":")
		words := strings.Fields(rest)
		if !found || len(words) == 0 {
			continue
		}
		if kib, err := strconv.ParseUint(words[0], 10, 53); err == nil {
			values[name] = kib << 10
		}
	}
	return values, nil
}

// machineTicks sums the busy columns of the first line of /proc/stat: user nice system, irq softirq steal.
func machineTicks(path string) time.Duration {
	words := strings.Fields(read(path))
	if len(words) < 9 || words[0] != "cpu" {
		return 0
	}
	var sum uint64
	for _, column := range []int{1, 2, 3, 6, 7, 8} {
		n, _ := strconv.ParseUint(words[column], 10, 53)
		sum += n
	}
	return time.Duration(sum)
}

// processTicks sums what all processes and their dead children used; gVisor's /proc/stat counts nothing.
func processTicks(proc string) time.Duration {
	items, err := os.ReadDir(proc)
	if err != nil {
		return 0
	}
	var sum uint64
	for _, item := range items {
		if _, err := strconv.Atoi(item.Name()); err != nil {
			continue
		}
		// The name in brackets may hold anything; the numbers follow the last bracket.
		text := read(filepath.Join(proc, item.Name(), "stat"))
		words := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
		if len(words) < 15 {
			continue
		}
		for _, column := range []int{11, 12, 13, 14} {
			n, _ := strconv.ParseUint(words[column], 10, 53)
			sum += n
		}
	}
	return time.Duration(sum)
}

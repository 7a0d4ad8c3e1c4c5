package moments

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// source is one file that is sent.
type source struct {
	name string
	file *os.File
	info unix.Stat_t
}

// openAll opens the files by name. Errors: CodeGone.
func openAll(directory string, names []string) (all []source, err error) {
	defer func() {
		if err != nil {
			closeAll(all)
		}
	}()
	for _, name := range names {
		if !nameForm.MatchString(name) {
			return all, failure(CodeInvalid, nil, "%.100q is no name of a saved file", name)
		}
		file, err := os.OpenFile(filepath.Join(directory, name), os.O_RDONLY|unix.O_NOFOLLOW, 0)
		if err != nil {
			return all, failure(CodeGone, err, "%s is not there", name)
		}
		one := source{name: name, file: file}
		all = append(all, one)
		if err := unix.Fstat(int(file.Fd()), &all[len(all)-1].info); err != nil {
			return all, failure(CodeGone, err, "%s cannot be read", name)
		}
	}
	return all, nil
}

func closeAll(all []source) {
	for _, one := range all {
		one.file.Close()
	}
}

// identity says which files these are, and of what: a placement that is saved again has others of the same names.
func identity(all []source, facts Facts) string {
	var text strings.Builder
	said, _ := json.Marshal(facts)
	text.Write(said)
	for _, one := range all {
		text.WriteString(one.name)
		for _, number := range []int64{int64(one.info.Dev), int64(one.info.Ino), one.info.Size, one.info.Mtim.Nano()} {
			text.WriteByte(' ')
			text.WriteString(strconv.FormatInt(number, 10))
		}
		text.WriteByte('\n')
	}
	return hashOf([]byte(text.String()))
}

// unchanged compares a file with what it was when it was opened.
func (s source) unchanged() error {
	var now unix.Stat_t
	if err := unix.Fstat(int(s.file.Fd()), &now); err != nil {
		return failure(CodeGone, err, "%s cannot be read", s.name)
	}
	if now.Size != s.info.Size || now.Mtim != s.info.Mtim || now.Nlink == 0 {
		return failure(CodeGone, nil, "%s has changed while it was read", s.name)
	}
	return nil
}

func hashOf(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// readAll reads what has at most so many bytes.
func readAll(from io.Reader, most int64) ([]byte, error) {
	content, err := io.ReadAll(io.LimitReader(from, most+1))
	if err == nil && int64(len(content)) > most {
		err = failure(CodeCorrupt, nil, "what came has more than %d bytes", most)
	}
	return content, err
}

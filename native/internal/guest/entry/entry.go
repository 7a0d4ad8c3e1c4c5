// Package entry describes a file the way the envd contract does: EntryInfo, and the metadata attached to files.
package entry

import (
	"os"
	"path/filepath"
	"syscall"
	"time"

	"atoll.local/native/internal/guest/rpc"
	"atoll.local/native/internal/guest/users"
)

// The file types on the wire. A symlink has its target's type; one that leads nowhere has none.
const (
	TypeUnspecified = "FILE_TYPE_UNSPECIFIED"
	TypeFile        = "FILE_TYPE_FILE"
	TypeDirectory   = "FILE_TYPE_DIRECTORY"
)

// Info is filesystem.EntryInfo as proto3 JSON.
type Info struct {
	Name          string            `json:"name"`
	Type          string            `json:"type"`
	Path          string            `json:"path"`
	Size          rpc.Int64         `json:"size"`
	Mode          uint32            `json:"mode"`
	Permissions   string            `json:"permissions"`
	Owner         string            `json:"owner"`
	Group         string            `json:"group"`
	ModifiedTime  time.Time         `json:"modifiedTime"`
	SymlinkTarget *string           `json:"symlinkTarget,omitempty"`
	Metadata      map[string]string `json:"metadata,omitempty"`
	IsSymlink     bool              `json:"isSymlink,omitempty"`
}

// Describe looks at path itself, not following it, and shows it under the name of shown.
func Describe(path, shown string, accounts *users.Directory) (*Info, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	described := &Info{
		Name:         filepath.Base(shown),
		Path:         shown,
		Size:         rpc.Int64(info.Size()),
		Type:         typeOf(info.Mode()),
		Mode:         uint32(info.Mode().Perm()),
		Permissions:  info.Mode().String(),
		ModifiedTime: info.ModTime().UTC(),
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		described.Owner = accounts.UserName(st.Uid)
		described.Group = accounts.GroupName(st.Gid)
	}
	if info.Mode()&os.ModeSymlink != 0 {
		described.followed(path)
	} else if info.Mode().IsRegular() || info.IsDir() {
		described.Metadata = ReadMetadata(path)
	}
	return described, nil
}

// followed fills in what a symlink leads to; a broken or cyclic one shows itself as its target.
func (i *Info) followed(path string) {
	i.IsSymlink = true
	target, err := filepath.EvalSymlinks(path)
	if err != nil {
		target = path
	}
	i.SymlinkTarget = &target
	if info, err := os.Stat(path); err == nil {
		i.Type = typeOf(info.Mode())
		i.Mode = uint32(info.Mode().Perm())
	} else {
		i.Type, i.Mode = TypeUnspecified, 0
	}
}

func typeOf(mode os.FileMode) string {
	switch {
	case mode.IsRegular():
		return TypeFile
	case mode.IsDir():
		return TypeDirectory
	default:
		return TypeUnspecified
	}
}

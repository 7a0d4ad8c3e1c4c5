package paths

import (
	"errors"
	"syscall"
)

// IsNoSpace says whether err means that the disk, the quota or the inode table is full.
func IsNoSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

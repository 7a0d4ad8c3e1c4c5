"""Programs that what is saved depends on, by what is in them: memory goes on in the very guest program, and under the very runtime, that it is of.

Theory of operation. A save holds the memory of a program whose code is in a file; with another file under the same name, such as a later
version's, what is brought back would run into nothing. And what one version of a runtime has written another does not read. So each placement
has both as hard links in its own directory, to copies that are called by their digests; what is saved or kept of it has them, too. Nothing
counts them: a copy goes when no directory has it any more. A save that is sent to the artifact store takes the guest's program along, cut into
chunks that the store has once; the runtime it names by its version, and hosts keep the one before theirs.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.drivers import versions

PROGRAMS: Final = ".programs"
"""Beside the placements' directories: copies, by name and digest."""
GUEST: Final = "guest"
RUNTIME: Final = "runsc"
"""In a placement's directory, and in that of what is saved: its programs."""
DRAFT_S: Final = 600.0
VERSION_S: Final = 10.0
DIGESTS: Final = "digests"
"""Beside the copies: of which file each is, so that what has not changed is not read again."""
_VERSION_MAX: Final = 128
_MODE: Final = 0o755


class Programs:
    """One program of one driver. `binary`: what new guests get; `spare`: how many earlier ones stay though nobody has them.

    All block. *Errors*: OSError; Refused RUNTIME_MISSING where a copy is to be made of a program that is not there.
    """

    def __init__(self, name: str, binary: Path, state_dir: Path, *, spare: int = 0) -> None:
        self.name = name
        self._binary = binary
        self._directory = state_dir / PROGRAMS
        self._spare = spare
        self._current: Path | None = None
        self._versions: dict[tuple[int, int, int], str] = {}

    def open(self) -> None:
        """Have the copy for new guests, and remove those that nobody has any more."""
        current, now = self._copy(), time.time()
        os.utime(current)
        for path in self._directory.glob(f".{self.name}-*"):
            # A draft: somebody else's, or what a killed process has left.
            if now - path.stat().st_mtime > DRAFT_S:
                path.unlink(missing_ok=True)
        idle = [path for path in self.copies() if path != current and path.stat().st_nlink == 1]
        for path in idle[self._spare :]:
            path.unlink(missing_ok=True)

    def copies(self) -> Sequence[Path]:
        """All that are here, the one that was current last first."""
        return sorted(self._directory.glob(f"{self.name}-*"), key=lambda path: path.stat().st_mtime, reverse=True)

    def give(self, directory: Path, saved: Path | None) -> Path:
        """The placement's program in its directory: that of what it begins from, else the one that new guests get.

        `saved`: the directory of what it begins from. *Idempotency*: repeatable.
        """
        place = directory / self.name
        place.unlink(missing_ok=True)
        if saved is not None and (saved / self.name).exists():
            os.link(saved / self.name, place)
            return place
        try:
            os.link(self._newest(), place)
        except OSError as error:
            if error.errno not in (errno.EMLINK, errno.ENOENT):
                raise
            # A file has so many names only, or somebody has tidied up: a fresh one takes its place.
            os.link(self._copy(afresh=True), place)
        return place

    def take_in(self, saved: Path) -> None:
        """What came with a save from elsewhere is one file with what is here, where they are the same; and may be run."""
        came = saved / self.name
        if not came.exists():
            return
        current = self._newest()
        if filecmp.cmp(came, current, shallow=False):
            with contextlib.suppress(OSError):
                came.unlink()
                os.link(current, came)
                return
        came.chmod(_MODE)

    def version_of(self, saved: Path) -> str:
        """What that of a placement or a save calls itself; where it has none, the one that new guests get. *Errors*: Refused RUNTIME_MISSING; OSError."""
        own = saved / self.name
        return self._version(own if own.exists() else self._newest())

    def versions(self) -> dict[str, Path]:
        """All copies by what they call themselves; the first is what new guests get. *Errors*: as `version_of`."""
        newest = self._newest()
        return {self._version(path): path for path in (newest, *(path for path in self.copies() if path != newest))}

    def _version(self, path: Path) -> str:
        """Asked once: whatever name of it is asked for."""
        found = path.stat()
        known = (found.st_dev, found.st_ino, found.st_size)
        if known not in self._versions:
            self._versions[known] = versions.ask(path, within_s=VERSION_S).replace(" version ", " ")[:_VERSION_MAX]
        return self._versions[known]

    def _newest(self) -> Path:
        """The copy that new guests get. *Errors*: as `_copy`."""
        return self._current or self._copy()

    def _copy(self, *, afresh: bool = False) -> Path:
        """*Errors*: OSError; Refused RUNTIME_MISSING."""
        try:
            digest = versions.noted(self._binary, self._directory / DIGESTS, self._digest)
        except OSError as error:
            raise Refused(Code.RUNTIME_MISSING, f"{self._binary} cannot be read: {error.strerror}") from error
        place = self._directory / f"{self.name}-{digest}"
        if afresh or not place.exists():
            self._directory.mkdir(exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self._directory, prefix=f".{self.name}-", delete=False) as draft:
                path = Path(draft.name)
                try:
                    with self._binary.open("rb") as file:
                        shutil.copyfileobj(file, draft, 1 << 20)
                    draft.flush()
                    os.fsync(draft.fileno())
                except BaseException:
                    path.unlink(missing_ok=True)
                    raise
            path.chmod(_MODE)
            path.rename(place)
        self._current = place
        return place

    def _digest(self) -> str:
        with self._binary.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def keep(name: str, directory: Path, draft: Path) -> None:
    """What is being saved of a placement has this program of it. Blocking. *Errors*: OSError."""
    if (directory / name).exists():
        os.link(directory / name, draft / name)

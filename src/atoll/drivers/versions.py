"""What a program says of its version, and whatever else is found of a file, once for each that there is. Blocking.

An agent that begins again on a busy host has guests to bring back at once: a program that does not find the time to say again what it has said before
must not keep them from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.images.whole import write_whole

NOTES: Final = "versions"
ASK_S: Final = 30.0
"""Where nobody has asked yet; nothing can be started before."""
_TEXT_BYTES_MAX: Final = 400


def version_of(program: Path, directory: Path, *, within_s: float = ASK_S) -> str:
    """The first line of what it says to `--version`. `directory`: root's alone; what was said is noted there, by which file said it.

    *Errors*: Refused RUNTIME_MISSING: there is none, it fails, or it has not said so yet and does not within this time.
    """
    try:
        return noted(program, directory / NOTES, lambda: ask(program, within_s=within_s))
    except OSError as error:
        raise Refused(Code.RUNTIME_MISSING, f"{program} cannot be run: {error}") from error


def ask(program: Path, *, within_s: float) -> str:
    """The first line of what it says to `--version` now. *Errors*: Refused RUNTIME_MISSING."""
    try:
        done = subprocess.run(
            [str(program), "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=within_s, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise Refused(Code.RUNTIME_MISSING, f"{program} does not say within {within_s:.0f} s which version it is") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise Refused(Code.RUNTIME_MISSING, f"{program} cannot be run: {error}") from error
    return (done.stdout.splitlines() or ["unknown"])[0].strip()[:_TEXT_BYTES_MAX]


def noted(file: Path, directory: Path, find: Callable[[], str]) -> str:
    """What was found of a file, once for each that there is: it is noted in a directory that is root's alone. *Errors*: OSError; what `find` raises."""
    note = directory / _identity(file)
    with contextlib.suppress(FileNotFoundError):
        if said := note.read_text():
            return said
    said = find()
    with contextlib.suppress(OSError):  # a full disk: it is found again
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(note, said.encode())
    return said


def _identity(program: Path) -> str:
    """Another name for any other file: what was put in its place, or was written into it."""
    found = program.stat()
    words = (os.path.realpath(program), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return hashlib.sha256(repr(words).encode()).hexdigest()[:32]

"""The directory that a template is built from: which of its files a COPY means, and by what they are known again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from atoll.base.errors import Code, Refused
from atoll.cli.dockerfile.stages import Copied

IGNORE: Final = ".dockerignore"
TEXT: Final = "utf-8-sig"
"""What Dockerfiles and their ignore files are written in: the mark that some editors put before it is none of it."""
_SIGNS: Final = re.compile(r"(\*\*/?|\*|\?|\[[^\]]+\]|\\.)")
_WORDS: Final = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


class Found(NamedTuple):
    """A file or directory as it is copied: its name below the context, and where its content is."""

    name: str
    path: Path


def chosen(context: Path, source: str, *, ignored: Callable[[str], bool] | None = None, excluded: Iterable[str] = ()) -> Iterator[Found]:
    """The files and directories that a COPY means, in order, without what is ignored. As with Docker, a link that is itself asked for means
    what it leads to; those inside a directory stay links.

    *Errors*: Refused INVALID_REQUEST of what lies outside, also by a link.
    """
    out = ignored or ignoring(context)
    without = left_out(excluded)
    roots = [context] if source in (".", "./") else sorted(context.glob(source.rstrip("/")))
    inside = context.resolve()
    for root in roots:
        meant = root.resolve()
        if root != context and not meant.is_relative_to(inside):
            raise Refused(Code.INVALID_REQUEST, f"{source[:200]!r} leads out of {context}, by a link")
        start = meant if root.is_symlink() else root
        below = sorted(start.rglob("*")) if start.is_dir() else []
        for path in [*([] if root == context else [start]), *below]:
            name = (root.relative_to(context) / path.relative_to(start)).as_posix()
            if not out(name) and not without(path.relative_to(start).as_posix() if below else root.name):
                yield Found(name, path)


def digest(files: Iterable[Found], one: Copied) -> str:
    """By what the files of a step are known again: names, modes and contents; not when they were written."""
    total = hashlib.sha256(repr((one.source, one.target)).encode())
    for name, path in files:
        info = path.lstat()
        total.update(repr((name, info.st_mode)).encode())
        if path.is_symlink():
            total.update(str(path.readlink()).encode())
        elif path.is_file():
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def ignoring(context: Path, dockerfile: Path | None = None) -> Callable[[str], bool]:
    """Whether a name is left out, by the Dockerfile's own ignore file (`NAME.dockerignore`) or the directory's.

    *Errors*: Refused INVALID_REQUEST when that is no text.
    """
    own = None if dockerfile is None else dockerfile.with_name(dockerfile.name + IGNORE)
    file = own if own is not None and own.is_file() else context / IGNORE
    try:
        lines = file.read_text(TEXT).splitlines() if file.is_file() else []
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(Code.INVALID_REQUEST, f"{file} cannot be read: {error}") from error
    return left_out(line.strip() for line in lines if not line.startswith("#"))


def left_out(texts: Iterable[str]) -> Callable[[str], bool]:
    """Whether a name is left out: the last pattern that fits it, or a directory above it, decides."""
    patterns = [(text.startswith("!"), _pattern(text.removeprefix("!").strip().strip("/"))) for text in texts if text.strip("!/ ")]

    def decided(name: str) -> bool:
        out = False
        for keeps, pattern in patterns:
            if pattern.match(name):
                out = not keeps
        return out

    return decided


def _pattern(text: str) -> re.Pattern[str]:
    made = ""
    for part in _SIGNS.split(text.removeprefix("./")):
        if part.startswith("[") and len(part) > 1:
            made += "[" + part[1:-1].replace("\\", "\\\\").replace("[", "\\[") + "]"
        elif part.startswith("\\") and len(part) > 1:
            made += re.escape(part[1:])
        else:
            made += _WORDS.get(part, re.escape(part))
    try:
        return re.compile((".*" if text == "." else made) + r"(?:/.*)?\Z")
    except re.error as error:
        raise Refused(Code.INVALID_REQUEST, f"{IGNORE}: {text[:80]!r} is no pattern: {error}") from error

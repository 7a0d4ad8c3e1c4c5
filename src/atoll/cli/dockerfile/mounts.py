"""`RUN --mount`: caches and temporary files as empty directories, `bind` as files that are there for one command."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.cli.dockerfile.stages import Mounted, Stage
from atoll.cli.dockerfile.words import Words

_OTHER_NAMES: Final = {"dst": "target", "destination": "target", "src": "source", "readwrite": "rw", "readonly": "ro"}
_KNOWN: Final = {
    "bind": frozenset({"type", "target", "source", "from", "rw", "ro"}),
    "cache": frozenset({"type", "target", "id", "sharing", "mode", "uid", "gid", "rw", "ro"}),
    "tmpfs": frozenset({"type", "target", "size"}),
}
_MODE: Final = re.compile(r"[0-7]{3,4}")


def read(stage: Stage, texts: Sequence[str], line: int) -> tuple[Mounted, ...]:
    """The mounts of one RUN. *Errors*: Refused INVALID_REQUEST, with what is not supported."""
    return tuple(_one(stage, text, line) for text in texts)


def origin(name: str, what: str) -> str:
    """The name of another stage. *Errors*: Refused INVALID_REQUEST."""
    if not name or "$" in name:
        raise Refused(
            Code.INVALID_REQUEST,
            f"{what} names a stage or an image, without variables",
            hint="A variable may stand in a FROM: `FROM image:$TAG AS name`, and then --from=name.",
        )
    return name


def _one(stage: Stage, text: str, line: int) -> Mounted:
    said: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        said[_OTHER_NAMES.get(name.strip().lower(), name.strip().lower())] = value.strip()
    kind = said.get("type", "bind")
    if kind not in _KNOWN:
        raise Refused(
            Code.INVALID_REQUEST,
            f"RUN --mount=type={kind[:40]} is not supported",
            hint="bind, cache and tmpfs are. What is secret is given to sandboxes when they are created, not to builds.",
        )
    if unknown := sorted(set(said) - _KNOWN[kind]):
        raise Refused(Code.INVALID_REQUEST, f"RUN --mount=type={kind},{unknown[0][:40]} is not supported")
    if not said.get("target"):
        raise Refused(Code.INVALID_REQUEST, f"RUN --mount=type={kind} names no target")
    target = Words(stage.scope, later=True).one(said["target"])
    if kind == "cache":
        stage.notes.append(f"line {line}: the cache {said['target']} is empty at the beginning of each build, and no part of the template")
    if kind != "bind":
        mode = said.get("mode", "").removeprefix("0o") or ("1777" if kind == "tmpfs" else "755")
        if not _MODE.fullmatch(mode):
            raise Refused(Code.INVALID_REQUEST, f"RUN --mount: {mode[:20]!r} is no octal mode")
        return Mounted(target, None, None, f"{said.get('uid') or 0}:{said.get('gid') or 0}", mode, line)
    named = origin(said["from"], "RUN --mount=from") if "from" in said else None
    source = Words(stage.scope, later=False).one(said.get("source") or ".")
    return Mounted(target, relative(source, clamped=named is not None), named, line=line)


def relative(source: str, *, clamped: bool) -> str:
    """A source without its first slash. `clamped`: below the root of a stage, where `..` leads nowhere. *Errors*: Refused INVALID_REQUEST."""
    if clamped:
        return posixpath.normpath("/" + source).lstrip("/") or "."
    path = posixpath.normpath(source.lstrip("/") or ".")
    if path == ".." or path.startswith("../"):
        raise Refused(
            Code.INVALID_REQUEST,
            f"{source[:200]!r} is outside the directory that is built from",
            hint="Files come from below that directory: build from one that holds them.",
        )
    return path

"""`RUN --mount`: what is there for one command, and in no layer."""

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
    "secret": frozenset({"type", "target", "id", "required", "mode", "uid", "gid", "env"}),
    "ssh": frozenset({"type", "target", "id", "required", "mode", "uid", "gid"}),
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
            hint=f"There are {', '.join(_KNOWN)}.",
        )
    if unknown := sorted(set(said) - _KNOWN[kind]):
        raise Refused(Code.INVALID_REQUEST, f"RUN --mount=type={kind},{unknown[0][:40]} is not supported")
    if kind in ("secret", "ssh"):
        return _secret(kind, said, line)
    if not said.get("target"):
        raise Refused(Code.INVALID_REQUEST, f"RUN --mount=type={kind} names no target")
    target = Words(stage.scope, later=True).one(said["target"])
    if kind != "bind":
        owner, mode = f"{said.get('uid') or 0}:{said.get('gid') or 0}", _mode(said, "1777" if kind == "tmpfs" else "755")
        if kind == "tmpfs":
            return Mounted(target, None, None, owner, mode, line)
        return Mounted(target, None, None, owner, mode, line, "cache", said.get("id") or target)
    named = origin(said["from"], "RUN --mount=from") if "from" in said else None
    source = Words(stage.scope, later=False).one(said.get("source") or ".")
    return Mounted(target, relative(source, clamped=named is not None), named, line=line)


def _secret(kind: str, said: dict[str, str], line: int) -> Mounted:
    """A secret, or an agent that has a key for ssh. Docker's own places and modes."""
    target, env = said.get("target", ""), said.get("env", "")
    name = said.get("id") or ("default" if kind == "ssh" else posixpath.basename(target))
    if not name:
        raise Refused(Code.INVALID_REQUEST, f"RUN --mount=type={kind} names no id")
    if "$" in name + target + env:
        raise Refused(Code.INVALID_REQUEST, f"RUN --mount=type={kind} has no variables")
    required = said.get("required", "false").lower()
    if required not in ("true", "false", ""):
        raise Refused(Code.INVALID_REQUEST, f"RUN --mount=type={kind}: required is true or false, not {required[:20]!r}")
    if kind == "ssh":
        if target:
            raise Refused(
                Code.INVALID_REQUEST, "RUN --mount=type=ssh,target is not supported", hint="SSH_AUTH_SOCK says where the agent is."
            )
        return Mounted("", line=line, kind=kind, id=name, required=True)
    owner = f"{said.get('uid') or 0}:{said.get('gid') or 0}"
    place = target or ("" if env else f"/run/secrets/{name}")
    return Mounted(place, None, None, owner, _mode(said, "400"), line, kind, name, env, required != "false")


def _mode(said: dict[str, str], otherwise: str) -> str:
    mode = said.get("mode", "").removeprefix("0o") or otherwise
    if not _MODE.fullmatch(mode):
        raise Refused(Code.INVALID_REQUEST, f"RUN --mount: {mode[:20]!r} is no octal mode")
    return mode


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

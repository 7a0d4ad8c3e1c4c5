"""`--secret` and `--ssh` of `atoll template build`: read here, sent with the build's steps, and never shown."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.cli.dockerfile.stages import Built, Ran

BYTES_MAX: Final = 500_000
_NAMES: Final = {"source": "src", "src": "src", "id": "id", "env": "env", "type": "type"}


@dataclass(frozen=True, slots=True)
class Brought:
    """What the options name."""

    values: dict[str, str] = field(repr=False)
    """What the API takes: values in base64, by id; keys for ssh by `ssh:ID`."""
    agents: frozenset[str] = frozenset()
    """Ids that `--ssh` gives an agent of this machine to, which Docker would forward, and nobody does here."""


def brought(secrets: Sequence[str], keys: Sequence[str]) -> Brought:
    """What the options name, read. *Errors*: Refused INVALID_REQUEST, in which no value is."""
    found = dict(_secret(text) for text in secrets)
    agents = set()
    for text in keys:
        name, equals, path = text.partition("=")
        if not equals and ("/" in text or Path(text).is_file()):
            name, path = "default", text
        if not path or _is_agent(path):
            # As Docker reads it: without a file it is the agent of SSH_AUTH_SOCK.
            agents.add(name)
            continue
        found[f"ssh:{name}"] = _file(path, "--ssh")
    return Brought({name: base64.b64encode(value).decode() for name, value in found.items()}, frozenset(agents))


def check(built: Built, brought: Brought) -> None:
    """Whether all that the Dockerfile mounts can be had as it was given. *Errors*: Refused INVALID_REQUEST, with the line."""
    for stage in built.stages:
        for mount in (mount for step in stage.steps if isinstance(step, Ran) for mount in step.mounts):
            if mount.kind == "ssh" and mount.id in brought.agents and f"ssh:{mount.id}" not in brought.values:
                message = f"line {mount.line}: RUN --mount=type=ssh by an agent of this machine (--ssh {mount.id[:80]}) is not supported"
                raise Refused(Code.INVALID_REQUEST, message, hint=f"Name a file with a key: --ssh {mount.id[:80]}=KEYFILE.")


def _is_agent(path: str) -> bool:
    try:
        return stat.S_ISSOCK(Path(path).expanduser().stat().st_mode)
    except OSError:
        return False


def _secret(text: str) -> tuple[str, bytes]:
    said: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or name.strip().lower() not in _NAMES:
            raise Refused(Code.INVALID_REQUEST, "--secret is id=ID,src=FILE or id=ID,env=VARIABLE")
        said[_NAMES[name.strip().lower()]] = value
    name = said.get("id", "")
    if not name or ("src" in said and "env" in said):
        raise Refused(Code.INVALID_REQUEST, "--secret is id=ID,src=FILE or id=ID,env=VARIABLE")
    if "src" in said:
        return name, _file(said["src"], f"--secret {name[:80]}")
    variable = said.get("env", name)
    if variable not in os.environ:
        raise Refused(Code.INVALID_REQUEST, f"--secret {name[:80]}: there is no variable {variable[:80]}")
    return name, os.environ[variable].encode()


def _file(path: str, what: str) -> bytes:
    place = Path(path).expanduser()
    try:
        with place.open("rb") as file:
            value = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise Refused(Code.INVALID_REQUEST, f"{what}: {path} cannot be read: {error.strerror}") from error
    if len(value) > BYTES_MAX:
        raise Refused(Code.INVALID_REQUEST, f"{what}: {path} has more than {BYTES_MAX} bytes")
    return value

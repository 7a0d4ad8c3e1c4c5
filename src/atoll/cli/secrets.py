"""`--secret` and `--ssh` of `atoll template build`: read here, sent with the build's steps, and never shown."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused

BYTES_MAX: Final = 500_000
_NAMES: Final = {"source": "src", "src": "src", "id": "id", "env": "env", "type": "type"}


def brought(secrets: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """What the API takes: values in base64, by id; keys for ssh by `ssh:ID`. *Errors*: Refused INVALID_REQUEST, in which no value is."""
    found = {}
    for text in secrets:
        name, value = _secret(text)
        found[name] = value
    for text in keys:
        name, equals, path = text.partition("=")
        name, path = (name, path) if equals else ("default", text)
        if not path:
            raise Refused(Code.INVALID_REQUEST, "--ssh names no file", hint="An agent is not forwarded to builds: --ssh default=KEYFILE.")
        found[f"ssh:{name}"] = _file(path, "--ssh")
    return {name: base64.b64encode(value).decode() for name, value in found.items()}


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
        if stat.S_ISSOCK(place.stat().st_mode):
            raise Refused(Code.INVALID_REQUEST, f"{what}: an agent is not forwarded to builds", hint="Name a file with a key.")
        with place.open("rb") as file:
            value = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise Refused(Code.INVALID_REQUEST, f"{what}: {path} cannot be read: {error.strerror}") from error
    if len(value) > BYTES_MAX:
        raise Refused(Code.INVALID_REQUEST, f"{what}: {path} has more than {BYTES_MAX} bytes")
    return value

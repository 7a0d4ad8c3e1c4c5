"""Reading what people type: durations, sizes, NAME=VALUE pairs, SANDBOX:PATH."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import typer

_UNITS_S: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_UNITS_MIB: Final = {"": 1, "m": 1, "mi": 1, "mib": 1, "mb": 1, "g": 1024, "gi": 1024, "gib": 1024, "gb": 1024}
_SANDBOX: Final = re.compile(r"i[a-z0-9]{20}")


def duration_s(text: str) -> int:
    """`90`, `90s`, `5m`, `2h`, `1d` in seconds. *Errors*: typer.BadParameter."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no duration: give 90, 90s, 5m, 2h or 1d")
    value = round(float(match[1]) * _UNITS_S[match[2]])
    if value <= 0:
        raise typer.BadParameter("it must be more than nothing")
    return value


def size_mib(text: str) -> int:
    """`512`, `512M`, `2G` in MiB. *Errors*: typer.BadParameter."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS_MIB:
        raise typer.BadParameter(f"{text!r} is no size: give 512, 512M or 2G")
    value = round(float(match[1]) * _UNITS_MIB[match[2]])
    if value <= 0:
        raise typer.BadParameter("it must be more than nothing")
    return value


def cpu_millis(text: str) -> int:
    """`1`, `0.5` (cores) or `250m` (millicores) in millicores. *Errors*: typer.BadParameter."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no amount of CPU: give cores (2, 0.5) or millicores (250m)")
    value = round(float(match[1]) * (1 if match[2] else 1000))
    if value <= 0:
        raise typer.BadParameter("it must be more than nothing")
    return value


def pairs(texts: Sequence[str] | None, *, what: str) -> dict[str, str]:
    """`NAME=VALUE` texts as a mapping. *Errors*: typer.BadParameter."""
    found: dict[str, str] = {}
    for text in texts or []:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise typer.BadParameter(f"{text!r} is no {what}: give NAME=VALUE")
        found[name] = value
    return found


def place(text: str) -> tuple[str | None, str]:
    """`SANDBOX:PATH` as (sandbox, path), a local path as (None, path). A local file that looks like it is named with `./`."""
    head, sign, path = text.partition(":")
    if sign and _SANDBOX.fullmatch(head):
        return head, path or "."
    return None, text


def after_dashes(command: Sequence[str]) -> list[str]:
    """A command without the `--` that people put before it. *Errors*: typer.BadParameter when nothing follows."""
    if command and command[0] == "--":
        command = command[1:]
        if not command:
            raise typer.BadParameter("a command must follow --")
    return list(command)


def size(text: str | None) -> dict[str, int]:
    """What differs from a template's size, from CPU,MEMORY,DISK; nothing where nothing is said. *Errors*: typer.BadParameter."""
    if text is None:
        return {}
    parts = text.split(",")
    if len(parts) != 3:
        raise typer.BadParameter(f"{text!r} is no size: give CPU,MEMORY,DISK, such as 2,1G,4G", param_hint="--size")
    return {"cpuMillis": cpu_millis(parts[0]), "memoryMib": size_mib(parts[1]), "diskMib": size_mib(parts[2])}

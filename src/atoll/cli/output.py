"""What all commands share: tables for people, exactly one JSON document on standard output for scripts, and exit codes.

With --json a failure is a document too: `{"error": {"code", "message", "hint"}}`. Messages for people go to standard error.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Annotated, Any, Final

import typer

from atoll.base.errors import AtollError, Code, OutcomeUnknown, Unavailable

JSON_KEY: Final = "atoll.json"
_NOT_FOUND: Final = frozenset(code for code in Code if code.endswith("_NOT_FOUND"))
_USAGE: Final = frozenset({Code.INVALID_REQUEST, Code.CONFIG_INVALID})


class Exit(IntEnum):
    """What scripts test for. `exec` and `shell` pass on the command's own status instead."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNAVAILABLE = 4


def _remember_json(context: typer.Context, value: bool) -> bool:
    context.meta[JSON_KEY] = value
    return value


JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document instead of text.", callback=_remember_json, is_eager=True)]


def exit_code(error: AtollError) -> Exit:
    """The status for an error."""
    if error.code in _NOT_FOUND:
        return Exit.NOT_FOUND
    if isinstance(error, Unavailable | OutcomeUnknown) or error.code is Code.NOT_RUNNING:
        return Exit.UNAVAILABLE
    return Exit.USAGE if error.code in _USAGE else Exit.FAILED


def error_of(error: AtollError) -> dict[str, str]:
    """An error as documents have it: code, message, hint."""
    return {"code": str(error.code), "message": error.message, "hint": error.hint}


def show_error(error: AtollError, *, as_json: bool) -> None:
    """Say what went wrong and what to do."""
    if as_json:
        document({"error": error_of(error)})
        return
    _say(error_of(error))


def show_items(items: Sequence[dict[str, Any]], line: Callable[[dict[str, Any]], str], *, as_json: bool) -> None:
    """What became of each of several: its line, or its `error` (as `error_of` makes it, or as the API tells it)."""
    if as_json:
        document({"items": items})
        return
    for item in items:
        if item.get("error"):
            _say(item["error"])
        else:
            print(line(item))


def _say(error: dict[str, Any]) -> None:
    print(f"error: {error['message']} [{error['code']}]", file=sys.stderr)
    if error.get("hint"):
        print(f"       {error['hint']}", file=sys.stderr)


def document(value: Any) -> None:
    """The JSON document."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def table(
    columns: Sequence[tuple[str, Callable[[dict[str, Any]], Any]]], rows: Sequence[dict[str, Any]], *, empty: str, as_json: bool = False
) -> None:
    """A table for people, `empty` instead where there are no rows; or one document with the rows, as `items`, for programs."""
    if as_json:
        document({"items": rows})
        return
    if not rows:
        print(empty)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for title, _ in columns:
        shown.add_column(title, no_wrap=title in {"ID", "STATE", "HOST"}, overflow="fold")
    for row in rows:
        shown.add_row(*[_cell(read(row)) for _, read in columns])
    console = Console(highlight=False)
    if not console.is_terminal:
        # A pipe has no width: what reads it wants whole lines.
        console.width = 1000
    console.print(shown)


def fields(pairs: Sequence[tuple[str, Any]]) -> None:
    """One object for people: a line a field, those without a value left out."""
    wanted = [(name, value) for name, value in pairs if value not in (None, "", [], {})]
    width = max((len(name) for name, _ in wanted), default=0)
    for name, value in wanted:
        print(f"{name:<{width}}  {_plain(value)}")


def _cell(value: Any) -> Any:
    from rich.text import Text

    return Text(_plain(value))


def _plain(value: Any) -> str:
    if value is None or value in ("", [], {}, ()):
        return "-"
    if isinstance(value, dict):
        text = ", ".join(f"{key}={inner}" for key, inner in value.items())
    elif isinstance(value, list | tuple):
        text = ", ".join(map(str, value))
    else:
        text = str(value)
    return printable(text)


def printable(text: str) -> str:
    """What a tenant wrote must not steer the operator's terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def moment(value: Any) -> str | None:
    """A time of the API (RFC 3339 or seconds) in this machine's zone."""
    at = seconds(value)
    return None if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def age(value: Any, *, now: float | None = None) -> str | None:
    """How long ago, or until then, in one unit."""
    at = seconds(value)
    if at is None:
        return None
    distance = (now if now is not None else time.time()) - at
    prefix, distance = ("in ", -distance) if distance < 0 else ("", distance)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if distance >= 2 * size:
            return f"{prefix}{distance / size:.0f}{unit}"
    return f"{prefix}{distance:.0f}s"


def seconds(value: Any) -> float | None:
    """A time of the API as seconds since 1970; None where there is none."""
    if value is None or value == "":
        return None
    if isinstance(value, int | float):
        return float(value)
    from datetime import datetime

    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return None

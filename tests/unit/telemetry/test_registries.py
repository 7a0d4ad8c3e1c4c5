"""Every log line in the source uses names that are in the registries."""

import ast
from collections.abc import Iterator
from pathlib import Path

import atoll
from atoll.telemetry import events, keys

SOURCE = Path(atoll.__file__).parent
METHODS = {"debug", "info", "warning", "error", "exception"}
# Given to the method itself, not to the line.
OPTIONS = {"exc_info"}


def calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in METHODS
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id.lower().strip("_") in {"log", "logger"}
            ):
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", node


def test_fields_are_registered() -> None:
    unknown = {
        f"{where} {keyword.arg}"
        for where, call in calls()
        for keyword in call.keywords
        if keyword.arg is not None and keyword.arg not in keys.KEYS | OPTIONS
    }
    assert not unknown, f"add these to telemetry/keys.py with their unit, or use a name that is there: {sorted(unknown)}"


def test_events_are_constants_or_registered() -> None:
    loose = [
        f"{where} {call.args[0].value!r}"
        for where, call in calls()
        if call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value not in events.ALL
    ]
    assert not loose, f"add these to telemetry/events.py: {loose}"


def test_it_finds_the_calls() -> None:
    assert sum(1 for _ in calls()) > 30

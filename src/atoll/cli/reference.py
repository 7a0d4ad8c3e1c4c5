"""docs/CLI.md, made from the commands themselves: `python -m atoll.cli.reference [--check]`.

The tree of commands is named, not imported, since the one that people use is put together above this package.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer

APP: Final = "atoll.programs.main:app"
FILE: Final = Path(__file__).resolve().parents[3] / "docs" / "CLI.md"
HEAD: Final = """# The command line

Made by `python -m atoll.cli.reference` from the commands themselves; a test compares.

Every command takes `--json`: standard output is then exactly one JSON document, also when it fails (`{"error": {"code", "message", "hint"}}`).

| status | means |
|---|---|
| 0 | done |
| 1 | failed or refused; the message has a stable code (docs/ERRORS.md) and says what to do |
| 2 | the command line, or a value in it, is not valid |
| 3 | there is no such sandbox, template, host or key |
| 4 | not possible now: Atoll is not running, not reachable, or has no room |
| other | `exec` and `shell` pass on the command's own status; 127: it cannot be started, 128 + n: ended by signal n |

Where to send, in this order: `ATOLL_API_URL` with `ATOLL_API_KEY`; the instance in `ATOLL_HOME` when that is set; `E2B_API_URL` with `E2B_API_KEY`,
which `atoll env` prints; the instance in /var/lib/atoll. An instance on this machine is used with its operator key (root), or with `ATOLL_API_KEY`.

Completion: `atoll --install-completion`; ids of sandboxes, keys, templates and hosts are completed, too.
"""


def text(app: str = APP) -> str:
    """The whole document."""
    module, _, name = app.partition(":")
    root: Any = typer.main.get_command(getattr(importlib.import_module(module), name))
    parts = [HEAD]
    for path, command in _walk(root, ("atoll",)):
        parts.append("\n".join(_section(path, command)))
    return "\n".join(parts)


def _walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, inner in getattr(command, "commands", {}).items():
        if inner.hidden:
            continue
        if getattr(inner, "commands", None):
            yield from _walk(inner, (*path, name))
        else:
            yield (*path, name), inner


def _section(path: tuple[str, ...], command: Any) -> Iterator[str]:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option" and parameter.name != "help"]
    usage = " ".join([*path, "[OPTIONS]", *(_shown(argument) for argument in arguments)])
    yield f"## {' '.join(path)}\n"
    yield f"`{usage}`\n"
    yield f"{' '.join((command.help or '').split())}\n"
    rows = [*(_row(_shown(argument), argument) for argument in arguments), *(_row(_flags(option), option) for option in options)]
    yield "| | |\n|---|---|"
    yield "\n".join(rows) + "\n"


def _shown(argument: Any) -> str:
    name = str(argument.metavar or argument.name.upper())
    if argument.nargs == -1 and not name.endswith("..."):
        name += "..."
    return name if argument.required else f"[{name}]"


def _flags(option: Any) -> str:
    names = ", ".join([*sorted(option.opts, key=len), *option.secondary_opts])
    return names if option.is_flag else f"{names} {option.metavar or option.name.removesuffix('_name').upper()}"


def _row(name: str, parameter: Any) -> str:
    help_text = " ".join((getattr(parameter, "help", None) or "").split())
    default = parameter.default
    if isinstance(default, str | int) and not isinstance(default, bool):
        help_text += f" Default: `{default}`."
    return f"| `{name}` | {help_text} |"


def main(arguments: list[str]) -> int:
    """Write the file, or with --check compare it."""
    wanted = text()
    if "--check" in arguments:
        if FILE.exists() and FILE.read_text() == wanted:
            return 0
        print(f"{FILE} is not what the commands say: run python -m atoll.cli.reference", file=sys.stderr)
        return 1
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

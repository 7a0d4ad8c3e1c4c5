#!/usr/bin/env python3
"""Write the documents that follow from the code: docs/STATES.md, ERRORS.md, EVENTS.md, METRICS.md, CLI.md, and the lock of error codes.

    scripts/generate_docs.py            write them
    scripts/generate_docs.py --check    say which are stale; status 1 when any is

docs/errors.lock only ever grows: a code that is in it and no longer in the code stops this program, since a code that clients
have seen is never removed or given another meaning. Run it with the project's own environment (.venv/bin/python).
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Final, TypeVar

ROOT: Final = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(ROOT / "src"))

from atoll.base import errors
from atoll.base.errors import HINTS, Code
from atoll.cli import reference
from atoll.domain import command, history, host, placement, sandbox, snapshot
from atoll.domain.deployment import WorkloadClass
from atoll.telemetry import events
from atoll.telemetry import metrics as declared
from atoll.wire.quantities import write_duration

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)

LOCK: Final = ROOT / "docs" / "errors.lock"
PRODUCED: Final = ROOT / "tests" / "errors.toml"
MADE: Final = "<!-- Made by scripts/generate_docs.py from {source}; edit that instead. -->\n"
FAMILIES: Final = ("Refused", "Unavailable", "OutcomeUnknown", "Bug")
MANY: Final = 5
"""An event with the same answer in at least this many states is drawn once, from a box that stands for all of them."""


def main() -> int:
    """Write or check every document."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--check", action="store_true", help="write nothing; status 1 when something is stale")
    check = options.parse_args().check
    removed = removed_codes()
    if removed:
        print(f"generate_docs: codes are never removed, bring them back: {', '.join(removed)}", file=sys.stderr)
        return 1
    stale = [path for path, text in documents().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(documents()[path])
    return 1 if check and stale else 0


def documents() -> dict[Path, str]:
    """Every made file and what should be in it."""
    docs = ROOT / "docs"
    return {
        docs / "STATES.md": states(),
        docs / "ERRORS.md": error_codes(),
        docs / "EVENTS.md": event_types(),
        docs / "METRICS.md": metrics(),
        reference.FILE: reference.text(),
        LOCK: lock(),
    }


# States.


def states() -> str:
    """The state machines as tables and diagrams."""
    parts = [
        "# States\n",
        MADE.format(source="the tables in src/atoll/domain"),
        "\nEach machine is one table in one file; a pair of state and event that is not in its table raises and changes nothing.\n",
        _machine("Sandbox", sandbox, sandbox.MOVES, sandbox.State, sandbox.State.PENDING),
        _terminal(sandbox.TERMINAL),
        "\nConditions stand beside the state and never change it: "
        + ", ".join(f"`{condition}`" for condition in sandbox.Condition)
        + ".\n",
        _deadlines(),
        _machine("Placement: what it holds", placement, placement.HOLDING_MOVES, placement.Holding, placement.Holding.RESERVED),
        _observed(),
        _machine("Command: what is wanted of a placement", command, command.MOVES, command.Kind, command.Kind.ENSURE_PRESENT),
        _machine("Snapshot", snapshot, snapshot.MOVES, snapshot.State, snapshot.State.TAKING),
        _terminal(snapshot.TERMINAL),
        _machine("Host: what the operator wants", host, host.MOVES, host.Admin, None),
        _health(),
    ]
    return "".join(parts)


def _machine(title: str, module: ModuleType, moves: Mapping[tuple[S, E], S], kinds: type[S], first: S | None) -> str:
    source = f"src/{module.__name__.replace('.', '/')}.py"
    text = f"\n## {title}\n\nFrom [{source}](../{source}).\n\n{theory(module)}\n\n"
    text += "| state | event | next |\n|---|---|---|\n"
    for state in kinds:
        for (at, event), after in moves.items():
            if at is state:
                text += f"| `{state}` | {event} | `{after}` |\n"
    return text + "\n```mermaid\nstateDiagram-v2\n" + "".join(f"    {line}\n" for line in _diagram(moves, kinds, first)) + "```\n"


def _diagram(moves: Mapping[tuple[S, E], S], kinds: type[S], first: S | None) -> Iterator[str]:
    origins: defaultdict[tuple[E, S], list[S]] = defaultdict(list)
    for (state, event), after in moves.items():
        origins[event, after].append(state)
    if first is not None:
        yield f"[*] --> {first}"
    for (event, after), states_before in origins.items():
        if len(states_before) >= MANY:
            yield f"any_living_state --> {after}: {event}"
            continue
        for state in states_before:
            yield f"{state} --> {after}: {event}"
    for state in kinds:
        if not any(at is state for at, _ in moves):
            yield f"{state} --> [*]"


def _terminal(terminal: frozenset[S]) -> str:
    names = ", ".join(f"`{state}`" for state in type(next(iter(terminal))) if state in terminal)
    return f"\nTerminal, and deaf to every event: {names}.\n"


def _deadlines() -> str:
    policy = WorkloadClass()
    text = (
        "\n### Sandbox: how long a state may last\n\nControl's own clocks, from the sandbox's class (`timeouts` in the deployment document). "
        "Reaching one is an event and the next plan, and frees nothing. Settled states have none.\n\n"
        "| state | while | `timeouts` | unless the class says otherwise | at zero |\n|---|---|---|---|---|\n"
    )
    for row in sandbox.DEADLINES:
        names = " + ".join(f"`{name}`" for name in row.timeouts)
        spans = " + ".join(write_duration(getattr(policy, sandbox.TIMEOUTS[name])) for name in row.timeouts)
        text += f"| `{row.state}` | {row.during} | {names} | {spans} | {row.at_zero} |\n"
    return text


def _observed() -> str:
    rows = "".join(f"| `{seen}` |\n" for seen in placement.Observed)
    return (
        "\n### Placement: what its agent saw\n\n`observed` has no table: a report is a placement's whole state, and what is refused is a "
        "stale one ("
        + ", ".join(f"`{reason}`" for reason in placement.Stale)
        + "). `absent` absorbs: no later report revives it.\n\n| observed |\n|---|\n"
        + rows
    )


def _health() -> str:
    return (
        "\nHealth follows from the age of the last poll and is never stored: `unknown` before the first, "
        f"`healthy` below {host.SUSPECT_AFTER_S:g} s, `suspect` below {host.LOST_AFTER_S:g} s, then `lost`.\n"
    )


def theory(module: ModuleType) -> str:
    """The theory of operation that a module opens with."""
    text = inspect.getdoc(module) or ""
    _, _, found = text.partition("Theory of operation. ")
    return found.strip()


# Errors.


def error_codes() -> str:
    """Every stable code with its family and hint."""
    families, proofs = raised_as(), producing_tests()
    text = (
        "# Error codes\n\n"
        + MADE.format(source="src/atoll/base/errors.py")
        + "\nCodes are stable: one is never renamed, removed or given another meaning ([errors.lock](errors.lock) keeps them all).\n\n"
        "Families say what a caller may do. **Refused**: change something, the same request gets the same answer. **Unavailable**: nothing "
        "happened, try again later. **OutcomeUnknown**: it was sent and no answer came, look before repeating. **Bug**: an invariant is "
        "broken. A code without a family is a reason that a sandbox, host or event carries.\n"
    )
    for title, codes in sections(Path(errors.__file__), "Code").items():
        text += f"\n## {title[:1].upper()}{title[1:]}\n\n| code | family | what to do | produced by |\n|---|---|---|---|\n"
        for name in codes:
            code = Code[name]
            family = ", ".join(sorted(families.get(name, ()))) or "a reason"
            text += f"| `{code}` | {family} | {HINTS[code]} | `{proofs.get(name, 'nothing')}` |\n"
    return text


def producing_tests() -> dict[str, str]:
    """Code name → the test that produces it, as tests/errors.toml says."""
    return tomllib.loads(PRODUCED.read_text())


def raised_as() -> dict[str, set[str]]:
    """Code name → the families that our code raises it with."""
    pattern = re.compile(rf"\b({'|'.join(FAMILIES)})\(\s*Code\.([A-Z_]+)")
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "src").rglob("*.py")):
        for family, name in pattern.findall(path.read_text()):
            found[name].add(family)
    return found


def sections(path: Path, class_name: str | None) -> dict[str, list[str]]:
    """Constants of a class or module, grouped by the comment lines above them."""
    source = path.read_text()
    tree: ast.Module | ast.ClassDef = ast.parse(source)
    if class_name is not None:
        tree = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    lines = source.splitlines()
    found: dict[str, list[str]] = {}
    title = ""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
        if not isinstance(target, ast.Name) or not target.id.isupper() or target.id == "ALL":
            continue
        above = lines[node.lineno - 2].strip()
        if above.startswith("# "):
            title = above[2:]
        found.setdefault(title, []).append(target.id)
    return found


def locked_codes() -> list[str]:
    """Every code that was ever published, in the order of its coming."""
    if not LOCK.exists():
        return []
    return [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]


def removed_codes() -> list[str]:
    """Published codes that the code no longer has."""
    return [code for code in locked_codes() if code not in Code.__members__]


def lock() -> str:
    """The lock with today's new codes at its end."""
    known = locked_codes()
    new = [code for code in Code.__members__ if code not in known]
    return "# Every error code ever published, one a line. Append only: scripts/generate_docs.py adds, nobody removes.\n" + "".join(
        f"{code}\n" for code in [*known, *new]
    )


# Events.


def event_types() -> str:
    """Recorded events and log events."""
    text = (
        "# Events\n\n"
        + MADE.format(source="src/atoll/domain/history.py and src/atoll/telemetry/events.py")
        + "\nNames are append-only. A *recorded* event is written in the same commit as the change that it tells of, and clients read it "
        "(`atoll sandbox events`, `/v1/sandboxes/{id}/events`; operators those of the whole deployment by `atoll events`, "
        "`/v1/operations/events`). A *log* event is a line of a program's log.\n\n## Recorded\n\n"
    )
    for names in sections(Path(history.__file__), None).values():
        text += "".join(f"- `{getattr(history, name)}`\n" for name in names)
    text += "\n## Logged\n"
    for title, names in sections(Path(events.__file__), None).items():
        text += f"\n### {title[:1].upper()}{title[1:]}\n\n" + "".join(f"- `{getattr(events, name)}`\n" for name in names)
    return text


# Metrics.

EDGE: Final = ROOT / "native" / "internal" / "edge" / "metrics.go"
_METRICS_HEAD: Final = """
In Prometheus' text format. No label holds an id or a client's word; each has few values, which are named here.

| of | where | who may read it |
|---|---|---|
| control | `GET /metrics` and `GET /v1/operations/metrics` at the API's address | operators: the key as `X-API-KEY`, or as a bearer token |
| edge | `GET /metrics` at its admin port, on loopback only (the edge's port + 2) | everybody on the machine |
| hosts and sandboxes | among control's: hosts report with their polls | as control's |

Prometheus reads control's with the key in a file that only it can read:

```yaml
scrape_configs:
  - job_name: atoll-control
    authorization: {type: Bearer, credentials_file: /etc/prometheus/atoll-operator.key}
    static_configs: [{targets: ["127.0.0.1:3000"]}]
  - job_name: atoll-edge
    static_configs: [{targets: ["127.0.0.1:3002"]}]
```

With `OTEL_EXPORTER_OTLP_ENDPOINT` (or `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`) in the environment of
`atoll up`, control also sends its metrics, and a trace of each create with its phases, by OTLP over HTTP. The other `OTEL_` variables mean what
OpenTelemetry says they do. Nothing is sent, and nothing of it is loaded, without them.
"""


def metrics() -> str:
    """Every metric with its labels."""
    text = "# Metrics\n\n" + MADE.format(source="src/atoll/telemetry/metrics.py and native/internal/edge/metrics.go") + _METRICS_HEAD
    text += "\n## Control\n\n| metric | kind | labels | what |\n|---|---|---|---|\n"
    kinds = {
        **dict.fromkeys(declared.COUNTERS, "counter"),
        **dict.fromkeys(declared.HISTOGRAMS, "histogram"),
        **dict.fromkeys(declared.GAUGES, "gauge"),
    }
    for spec, kind in kinds.items():
        labels = "; ".join(f"`{name}`: {values}" for name, values in spec.labels)
        text += f"| `{spec.name}` | {kind} | {labels} | {spec.help} |\n"
    text += "\n## Edge\n\n| metric | kind | what |\n|---|---|---|\n"
    return text + "".join(f"| `{name}` | {kind} | {said} |\n" for name, kind, said in edge_metrics())


def edge_metrics() -> list[tuple[str, str, str]]:
    """Name, kind and help of each metric that the edge writes."""
    source = EDGE.read_text()
    found = re.findall(r'\.(?:one|head)\("(\w+)", "(\w+)", "([^"]+)"', source)
    by_class = re.findall(r'\.classes\("(\w+)", "([^"]+)"', source)
    return [*found, *((name, "counter", said) for name, said in by_class)]


if __name__ == "__main__":
    sys.exit(main())

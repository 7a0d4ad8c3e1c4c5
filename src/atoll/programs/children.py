"""What the supervisor keeps alive: the command, user, environment and readiness of control, agent, edge and registry."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from atoll.programs.layout import BINARIES, PROCESSES, USER, Layout, bin_directory, repository
from atoll.programs.users import Account, closed_on_the_way

_PASSED_ON: Final = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "LD_PRELOAD", "TMPDIR")
_SECRET: Final = ("ATOLL_API_KEY",)
_READ_SETTINGS: Final = frozenset({"control", "agent"})
"""The programs that read `control.toml` when they start."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One program: how it is started. `show` is (from, to): a directory that its user can't reach, and where it sees it instead."""

    name: str
    command: tuple[str, ...]
    user: str | None = None
    show: tuple[str, str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    grace_s: float = 10.0
    """How long it may take to end after SIGTERM."""


def specs(layout: Layout, user: Account | None) -> list[ChildSpec]:
    """The programs of an instance, in the order in which they start. `user` None: everything runs as the caller."""
    base = _environment(layout)
    code, shown_to = repository(), layout.run / "code"
    hidden = user is not None and (closed_on_the_way(code, user) is not None)
    show = (str(code), str(shown_to)) if hidden else None
    as_user = USER if user is not None else None
    seen = shown_to if hidden else code
    interpreter = _seen_from(Path(sys.executable), code, seen)
    python_environment = {**base, "MALLOC_ARENA_MAX": "2"}
    control_environment = {**python_environment, "PYTHONPATH": str(seen / "src")} if hidden else python_environment
    edge = _seen_from(bin_directory() / "atoll-io", code, seen)
    registry = _seen_from(bin_directory() / "atoll-registry", code, seen)
    return [
        ChildSpec(PROCESSES[0], (str(interpreter), "-P", "-m", "atoll.programs.control_main"), as_user, show, control_environment),
        ChildSpec(PROCESSES[1], (sys.executable, "-P", "-m", "atoll.programs.agent_main"), None, None, python_environment, grace_s=20.0),
        ChildSpec(PROCESSES[2], (str(edge), "edge", "--config", str(layout.edge_config)), as_user, show, base),
        ChildSpec(
            PROCESSES[3], (str(registry), "--config", str(layout.registry_config)), as_user, show, {**base, "OTEL_TRACES_EXPORTER": "none"}
        ),
    ]


def _seen_from(path: Path, code: Path, seen: Path) -> Path:
    """`path`, where a process to which `code` is shown as `seen` finds it. Links are kept: a virtual environment is known by its link."""
    return seen / path.relative_to(code) if path.is_relative_to(code) else path


def _environment(layout: Layout) -> dict[str, str]:
    """Only what the programs need: an exported key of somebody's has no business in their environment."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_ON or (name.startswith(("ATOLL_", "OTEL_")) and name not in _SECRET)
    }
    kept.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    return {**kept, "ATOLL_HOME": str(layout.home), "HOME": "/nonexistent"}


def fingerprint() -> str:
    """Of the code and programs as they are on the disk now: names, sizes and times, not contents. Tells `up` that something was rebuilt."""
    whole = hashlib.sha256()
    code = Path(__file__).resolve().parents[1]
    files = sorted(path for path in code.rglob("*") if path.suffix in {".py", ".json", ".sql", ".mako", ".ini"})
    binaries = [bin_directory() / name for name in BINARIES]
    for path in [*files, *binaries]:
        try:
            info = path.stat()
        except FileNotFoundError:
            continue
        whole.update(f"{path} {info.st_size} {info.st_mtime_ns}\n".encode())
    return whole.hexdigest()[:16]


def mark(layout: Layout, name: str, code: str) -> str:
    """What a program that is started now is started from: `code`, as `fingerprint` says, and what it reads once of the operator's settings."""
    if name not in _READ_SETTINGS:
        return code
    try:
        settings = layout.control_config.read_bytes()
    except FileNotFoundError:
        return code
    return f"{code}-{hashlib.sha256(settings).hexdigest()[:16]}"

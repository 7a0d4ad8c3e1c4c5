"""Findings for people: tables on a terminal, and docs/PERFORMANCE.md."""

from __future__ import annotations

import datetime as dt
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from atoll.hostops import mounts
from atoll.images.cache import ImageCache
from atoll.programs.layout import bin_directory, cache_directory
from bench.findings import Finding

TARGETS: Final = "## Targets"
TARGET_COLUMNS: Final = ("target", "measured", "allowed", "verdict")


def conditions(*, quick: bool) -> dict[str, str]:
    """What the figures depend on."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    image = ImageCache(cache_directory()).current("base")
    return {
        "When": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "Commit": _first_line("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "Machine": f"{len(os.sched_getaffinity(0))} cores of {_cpu_model()}, {memory / 2**30:.0f} GiB of memory",
        "Disk": f"{_file_system(Path('/var/tmp'))}",
        "Kernel": platform.release(),
        "Control groups": "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1",
        "KVM": f"{'a device is there' if Path('/dev/kvm').exists() else 'none'}; not used, gVisor runs by systrap",
        "Runtimes": f"{_first_line(str(bin_directory() / 'runsc'), '--version')} (systrap); {_first_line('crun', '--version')}",
        "Template": f"base, {image.entries} entries, {image.size_bytes / 2**20:.0f} MiB; 1 vCPU, 512 MiB, 2 GiB disk unless said otherwise",
        "Python": platform.python_version(),
        "Load before": load(),
        "Rounds": "few (--quick)" if quick else "full; the first of each is thrown away, since it fills caches",
    }


def _file_system(path: Path) -> str:
    """The device and type of the file system that holds a path."""
    best = max((m for m in mounts.table() if path.is_relative_to(m.point)), key=lambda m: len(m.point), default=None)
    return f"{best.kind} on {best.source}" if best is not None else "unknown"


def load() -> str:
    """The load average over one, five and fifteen minutes."""
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _first_line(*command: str) -> str:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return "missing"
    return (ran.stdout or ran.stderr).partition("\n")[0].strip()


def table(console: Console, finding: Finding) -> None:
    """One finding on the terminal."""
    shown = Table(title=finding.title, title_justify="left", caption_justify="left")
    for number, column in enumerate(finding.columns):
        shown.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in finding.rows:
        shown.add_row(*row)
    console.print(shown)
    for note in finding.notes:
        console.print(f"  {note}", highlight=False)


def verdicts(console: Console, findings: Sequence[Finding]) -> None:
    """Every target of this run."""
    shown = Table(title="Targets", title_justify="left")
    for column in ("target", "measured", "allowed", ""):
        shown.add_column(column)
    for finding in findings:
        for verdict in finding.verdicts:
            shown.add_row(verdict.target, verdict.measured, verdict.allowed, "reached" if verdict.reached else "[red]missed[/red]")
    console.print(shown)


def document(about: Mapping[str, str], findings: Sequence[Finding]) -> str:
    """docs/PERFORMANCE.md, whole."""
    lines = [
        "# Performance",
        "",
        "Written by `make bench`; don't edit. Every figure of ours stands beside its baseline, measured in the same run and in turn with it,",
        "so that a busy machine is busy for both: read differences and ratios first. Times are wall-clock times seen by the client; p50, p95",
        "and p99 are medians and percentiles of n. Nothing in the test suite depends on a time that was measured.",
        "",
        "## Conditions",
        "",
        *_rows(["", ""], [[name, value] for name, value in about.items()]),
        "",
        TARGETS,
        "",
        *_rows(TARGET_COLUMNS, _verdicts(findings)),
    ]
    for finding in findings:
        lines += _section(finding)
    return "\n".join(lines) + "\n"


def added(document: str, about: Mapping[str, str], findings: Sequence[Finding]) -> str:
    """The document with parts that were measured on their own, in place of what it says of them; each says under what conditions."""
    own = f"Measured on its own: {about['When']}, commit {about['Commit']}, {about['Machine']}, load before {about['Load before']}."
    head, _, rest = document.partition(f"\n{TARGETS}\n")
    table, *sections = rest.split("\n## ")
    titles = [finding.title for finding in findings]
    sections = [section for section in sections if section.partition("\n")[0] not in titles]
    targets = {verdict.target for finding in findings for verdict in finding.verdicts}
    kept = [row for row in table.strip().splitlines() if row.split(" | ")[0].removeprefix("| ") not in targets]
    kept += _rows(TARGET_COLUMNS, _verdicts(findings))[2:]
    lines = [head.rstrip("\n"), "", TARGETS, "", *kept]
    for section in sections:
        lines += ["", f"## {section}".rstrip("\n")]
    for finding in findings:
        lines += [*_section(finding), "", own]
    return "\n".join(lines) + "\n"


def _section(finding: Finding) -> list[str]:
    lines = ["", f"## {finding.title}", ""]
    if finding.about:
        lines += [finding.about, ""]
    if finding.rows:
        lines += _rows(finding.columns, finding.rows)
    for note in finding.notes:
        lines += ["", note]
    return lines


def _verdicts(findings: Sequence[Finding]) -> list[list[str]]:
    return [
        [verdict.target, verdict.measured, verdict.allowed, "reached" if verdict.reached else "**missed**"]
        for finding in findings
        for verdict in finding.verdicts
    ]


def _rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head = f"| {' | '.join(columns)} |"
    rule = "|" + "---|" + "---:|" * (len(columns) - 1) if len(columns) > 2 else "|---|---|"
    return [head, rule, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)]

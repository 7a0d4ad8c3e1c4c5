"""What is saved on its way to the artifact store and back, by what has changed, beside `tar | zstd` of the same files."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from atoll.drivers.oci.config import RuntimeKind
from atoll.programs.layout import bin_directory
from bench.clients import TRUE
from bench.findings import Finding, Verdict
from bench.parts.rest import hold
from bench.product import CannotMeasure
from bench.stats import Sample, figure
from bench.world import PIDS_MAX, SIZE, World

DIRTY_MIB: Final = (0, 16, 64, 128)
RATIO_MAX: Final = 2.0
SHARE_MAX: Final = 1.3
BAR: Final = 40
FACTS: Final = {
    "arch": "", "cpu": [], "driver": "bench", "image": "", "isolation": "", "mode": "full", "notes": [], "runtime": "",
}  # fmt: skip


async def measure(world: World) -> Finding:
    """First saves by how much their process holds, then a second save of the same guest."""
    finding = Finding(
        name="moments",
        title="What is saved, on its way to the store and back (s)",
        columns=["", "saved MiB", "stored MiB", "sent MiB", "sent in", "`tar`, `zstd -1`", "its MiB", "fetched in", "`zstd -d`, `tar x`"],
        about=(
            "Checkpoints by runsc of a guest of 512 MiB whose process holds so many MiB that cannot be compressed; *saved* is what the files have "
            "on the disk. Sent: `atoll-io moment upload` into a folder on the same disk, on one processor as an agent has it do, until the manifest "
            "is there; `tar -S | zstd -1 -T1` of the same files into a file there, which is flushed. Fetched: `atoll-io moment fetch`, every chunk compared and the "
            "files flushed, beside `zstd -d | tar -x` and `sync`. Medians; everything is in the page cache. A second save is of the same guest, after one more command."
        ),
    )
    for mib in DIRTY_MIB:
        await _one(world, finding, mib)
    finding.notes.append(_plot(finding))
    return finding


async def _one(world: World, finding: Finding, mib: int) -> None:
    place = Path(tempfile.mkdtemp(prefix="atoll-moments.", dir="/var/tmp"))
    prepared = await world.bare.prepare(RuntimeKind.RUNSC, **SIZE, pids_max=PIDS_MAX)
    try:
        inside = await world.bare.start(prepared)
        await hold(inside, mib)
        await world.bare.keep(prepared, place / "first")
        await inside.run(TRUE)
        await world.bare.keep(prepared, place / "second")
        turns = world.count(5, 1)
        first, sent = await asyncio.to_thread(_way, place, "first", turns, ())
        _row(finding, f"{mib} MiB", first, sent)
        again, more = await asyncio.to_thread(_way, place, "second", turns, (str(sent["digest"]),))
        _row(finding, f"{mib} MiB, a second save", again, more)
    finally:
        await world.bare.remove(prepared)
        shutil.rmtree(place, ignore_errors=True)
    if mib == DIRTY_MIB[-1]:
        ratio = first["sent"].median / first["tarred"].median
        share = float(sent["stored"]) / first["tar_bytes"].median
        finding.verdicts += [
            Verdict(
                f"{mib} MiB sent: {RATIO_MAX:.0f} times `tar | zstd` at most (p50)", f"{ratio:.2f}", f"{RATIO_MAX}", ratio <= RATIO_MAX
            ),
            Verdict(f"{mib} MiB stored: {SHARE_MAX} times `tar | zstd` at most", f"{share:.2f}", f"{SHARE_MAX}", share <= SHARE_MAX),
        ]


def _row(finding: Finding, label: str, samples: dict[str, Sample], sent: dict[str, Any]) -> None:
    def mib(value: float) -> str:
        return f"{value / 2**20:.1f}"

    def seconds(name: str) -> str:
        return figure(samples[name].median)

    finding.rows.append(
        [
            label, mib(samples["saved_bytes"].median), mib(float(sent["stored"])), mib(float(sent["sent"])), seconds("sent"), seconds("tarred"),
            mib(samples["tar_bytes"].median), seconds("fetched"), seconds("untarred"),
        ]
    )  # fmt: skip
    for name, sample in samples.items():
        finding.keep(f"{label}, {name}", sample)


def _way(place: Path, name: str, turns: int, bases: tuple[str, ...]) -> tuple[dict[str, Sample], dict[str, Any]]:
    """There and back, in turn with theirs; and what the last upload said of itself."""
    names = ("saved_bytes", "tar_bytes", "sent", "tarred", "fetched", "untarred")
    samples = {one: Sample() for one in names}
    source = place / name
    files = sorted(path.name for path in source.iterdir())
    samples["saved_bytes"].add(float(sum(path.stat().st_blocks * 512 for path in source.iterdir())))
    said: dict[str, Any] = {}
    for turn in range(turns + 1):
        store = place / "store" if turn == turns else place / f"store-{turn}"
        if bases and turn < turns:
            # What the first save has is there, and nothing of the second.
            shutil.copytree(place / "store", store, copy_function=os.link)
        store.mkdir(exist_ok=True)
        began = time.perf_counter()
        wish = {
            "of": name,
            "directory": str(source),
            "files": files,
            "facts": FACTS,
            "bases": bases,
            "work": str(place / f"work-{name}-{turn}"),
        }
        said = _program("upload", wish, store)
        sent_s = time.perf_counter() - began
        tarred_s, size = _timed_tar(source, place / "theirs.tar.zst")
        began = time.perf_counter()
        _program("fetch", {"moment": said["digest"], "directory": str(place / "back"), "spare_bytes": 0}, store)
        fetched_s = time.perf_counter() - began
        untarred_s = _timed_untar(place / "theirs.tar.zst", place / "theirs")
        if turn:
            for label, value in (
                ("sent", sent_s),
                ("tarred", tarred_s),
                ("fetched", fetched_s),
                ("untarred", untarred_s),
                ("tar_bytes", size),
            ):
                samples[label].add(value)
        for gone in ("back", "theirs", *(() if turn == turns else (store.name,))):
            shutil.rmtree(place / gone)
    return samples, said


def _timed_tar(source: Path, target: Path) -> tuple[float, float]:
    began = time.perf_counter()
    _shell(f"tar -S -cf - -C '{source}' . | zstd -q -1 -T1 -f -o '{target}' && sync '{target}'")
    return time.perf_counter() - began, float(target.stat().st_size)


def _timed_untar(source: Path, target: Path) -> float:
    target.mkdir()
    began = time.perf_counter()
    _shell(f"zstd -q -d -c '{source}' | tar -xf - -C '{target}' && sync '{target}'/*")
    return time.perf_counter() - began


def _shell(script: str) -> None:
    ran = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, timeout=600, check=False)
    if ran.returncode != 0:
        raise CannotMeasure(f"{script.split(maxsplit=1)[0]} ended with {ran.returncode}: {ran.stderr[-500:]} (apt-get install zstd tar)")


def _program(verb: str, wish: dict[str, Any], store: Path) -> dict[str, Any]:
    given = json.dumps({**wish, "objects": {"folder": str(store)}})
    environment = {**os.environ, "GOMAXPROCS": "1"} if verb == "upload" else None
    ran = subprocess.run(
        [str(bin_directory() / "atoll-io"), "moment", verb],
        input=given,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if ran.returncode != 0:
        raise CannotMeasure(f"atoll-io moment {verb} ended with {ran.returncode}: {ran.stdout[-500:]}{ran.stderr[-500:]}")
    return dict(json.loads(ran.stdout.splitlines()[-1])["moment"])


def _plot(finding: Finding) -> str:
    """Size and time against what a process holds, as a figure of characters: it is read where the table is."""
    rows = [row for row in finding.rows if "second" not in row[0]]
    lines = ["```", "held      stored"]
    for column, unit in ((2, "MiB"), (4, "s")):
        most = max(float(row[column]) for row in rows) or 1.0
        if column == 4:
            lines.append("held      sent in")
        lines += [f"{row[0]:<9} {'#' * round(float(row[column]) / most * BAR):<{BAR}} {row[column]} {unit}" for row in rows]
    return "\n".join([*lines, "```"])

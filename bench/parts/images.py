"""Images: rebuilds, a pull with its unpacking beside other people's tools, and starts by number of layers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atoll.drivers.oci.config import RuntimeKind
from atoll.programs.layout import bin_directory
from bench import layers
from bench.clients import TRUE
from bench.findings import Finding, Verdict
from bench.product import CannotMeasure
from bench.stats import Sample, figure, paired
from bench.world import CLASS, SIZE, World

REBUILD_S_MAX: Final = 1.0
STEP_MORE_S_MAX: Final = 2.0
PULL_RATIO_MAX: Final = 1.3
LAYERS_MORE_MS_MAX: Final = 5.0
TREE_LAYERS: Final = 4
DATA_LAYERS: Final = 2
DATA_BYTES: Final = 14 << 20
MANY: Final = 20
DISK_GIB: Final = 6
IMPORT_S: Final = 600.0
STEPS: Final = ("mkdir -p /home/user/app", "seq 1 200000 >/home/user/app/numbers", "sort -r /home/user/app/numbers >/home/user/app/sorted")
LAST: Final = "for n in $(seq 1 40); do head -c 524288 /dev/urandom >/home/user/app/part-$n; done; sha256sum /home/user/app/part-* >/home/user/app/{token}"
"""What the last step does: 20 MiB are made and digested, and the token makes it another step."""


async def builds(world: World) -> Finding:
    """A rebuild in which nothing has changed, and one whose last step has, beside that step alone."""
    finding = Finding(
        name="images-builds",
        title="Rebuilding a template (s)",
        columns=["", "p50", "p95", "p99", "n", "more than the step alone"],
        about=(
            "`Template.build()` of the Python SDK, until it has said that the build is ready; four steps on `base`. The last step makes and digests 20 MiB; "
            "alone means that the same command runs in a sandbox that has the steps before it, by `commands.run()`. Pairs are measured one after the other."
        ),
    )
    name = f"bench-{uuid.uuid4().hex[:8]}"
    first, same, changed, alone = Sample(), Sample(), Sample(), Sample()
    try:
        await asyncio.to_thread(_build, f"{name}-before", None)
        first.add(await asyncio.to_thread(_build, name, "first"))
        for turn in range(world.count(10, 2) + 1):
            nothing_new = await asyncio.to_thread(_build, name, "first" if turn == 0 else f"round-{turn - 1}")
            step = await asyncio.to_thread(_step, f"{name}-before", f"alone-{turn}")
            another = await asyncio.to_thread(_build, name, f"round-{turn}")
            if turn:
                same.add(nothing_new)
                alone.add(step)
                changed.add(another)
    finally:
        for one in (name, f"{name}-before"):
            await world.api.delete_template(one)
    more = paired(changed.values, alone.values)
    rows = {"the first build": first, "nothing has changed": same, "the last step alone": alone, "the last step has changed": changed}
    for label, sample in rows.items():
        finding.rows.append([label, *sample.cells(scale=1.0), f"{more:+.2f}" if sample is changed else ""])
        finding.keep(label, sample)
    finding.verdicts += [
        Verdict(
            "a rebuild without a change: 1 s at most (p50)", f"{same.median:.2f} s", f"{REBUILD_S_MAX:.0f} s", same.median <= REBUILD_S_MAX
        ),
        Verdict(
            "a rebuild with a changed last step: that step's own time + 2 s at most (p50 of pairs)",
            f"{more:+.2f} s",
            f"+{STEP_MORE_S_MAX:.0f} s",
            more <= STEP_MORE_S_MAX,
        ),
    ]
    return finding


def _build(name: str, token: str | None) -> float:
    # Imported here: the SDK reads its environment when it is.
    from e2b import Template

    template = Template().from_template("base")
    for step in (*STEPS, *(() if token is None else (LAST.format(token=token),))):
        template = template.run_cmd(step)
    began = time.perf_counter()
    Template.build(template, name, cpu_count=1, memory_mb=512)
    return time.perf_counter() - began


def _step(template: str, token: str) -> float:
    from e2b import Sandbox

    sandbox = Sandbox.create(template)
    try:
        sandbox.commands.run("true")
        began = time.perf_counter()
        sandbox.commands.run(LAST.format(token=token))
        return time.perf_counter() - began
    finally:
        sandbox.kill()


async def pulls(world: World) -> Finding:
    """An image of a registry on this machine becomes a tree: ours beside skopeo and umoci."""
    missing = await asyncio.to_thread(_missing)
    if missing:
        raise CannotMeasure(f"{' and '.join(missing)} cannot be had on this machine: apt-get install {' '.join(missing)}")
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="atoll-images.") as directory:
        place = Path(directory)
        world.say("making an image of about 150 MB")
        made = await asyncio.to_thread(_image, place / "layout")
        world.say("pushing it")
        there = _There(world.api.instance.url.removeprefix("http://"), world.api.instance.key, made)
        await asyncio.to_thread(there.push, place / "layout")
        finding = Finding(
            name="images-pulls",
            title="Pull and unpack (s)",
            columns=["", "p50", "p95", "p99", "n", "of skopeo and umoci"],
            about=(
                f"{made.bytes / 1e6:.0f} MB in {len(made.layers)} gzip layers, from `atoll registry` through the edge on loopback, until the tree is there. Each run "
                "has an empty ext4 of its own. Ours ends with everything on the disk (syncfs), theirs does not ask for that. "
                "The host's row is what a machine that joined does: its layers come from control's folder, and are unpacked as they come."
            ),
        )
        ways = {
            "`skopeo copy`, `umoci unpack`": there.theirs,
            "`atoll-io image pull`, `unpack`": there.ours,
            "a host: fetched and unpacked in one": lambda disk: there.host(disk, place / "layout"),
        }
        samples = {label: Sample() for label in ways}
        for turn in range(world.count(7, 2) + 1):
            for label, way in ways.items():
                taken = await asyncio.to_thread(_on_a_fresh_disk, place, way)
                if turn:
                    samples[label].add(taken)
    theirs, ours, _ = samples.values()
    for label, sample in samples.items():
        share = "" if sample is theirs else f"{sample.median / theirs.median:.2f}"
        finding.rows.append([label, *sample.cells(scale=1.0), share])
        finding.keep(label, sample)
    ratio = ours.median / theirs.median
    finding.verdicts.append(
        Verdict(
            "pull and unpack of 150 MB: 1.3 times `skopeo copy` and `umoci unpack` at most (p50)",
            f"{ratio:.2f}",
            f"{PULL_RATIO_MAX}",
            ratio <= PULL_RATIO_MAX,
        )
    )
    return finding


def _missing() -> list[str]:
    """What is still not there after it was asked for."""
    wanted = [name for name in ("skopeo", "umoci") if shutil.which(name) is None]
    if wanted and shutil.which("apt-get") is not None:
        subprocess.run(["apt-get", "install", "-y", "-qq", *wanted], capture_output=True, timeout=600, check=False)
    return [name for name in wanted if shutil.which(name) is None]


def _image(directory: Path) -> layers.Layout:
    """The tree of `base` in some layers, and some of bytes that cannot be compressed."""
    layout = layers.Layout(directory)
    tree = layers.base_tree()
    for part in layers.in_parts(tree, layers.names_of(tree), TREE_LAYERS):
        layout.add(tree, part)
    for number in range(DATA_LAYERS):
        layout.add(None, [], data=(f"srv/data{number}", DATA_BYTES))
    layout.finish()
    return layout


@dataclass(frozen=True, slots=True)
class _There:
    """An image in the instance's registry, and ways to have its tree on a disk."""

    address: str
    key: str
    made: layers.Layout

    @property
    def reference(self) -> str:
        return f"{self.address}/default/bench-images:made"

    def push(self, layout: Path) -> None:
        _run(
            "skopeo",
            "copy",
            "-q",
            "--dest-tls-verify=false",
            "--dest-creds",
            f"x:{self.key}",
            f"oci:{layout}:made",
            f"docker://{self.reference}",
        )

    def theirs(self, disk: Path) -> None:
        image = f"{disk / 'image'}:made"
        _run("skopeo", "copy", "-q", "--src-tls-verify=false", "--src-creds", f"x:{self.key}", f"docker://{self.reference}", f"oci:{image}")
        _run("umoci", "unpack", "--image", image, str(disk / "bundle"))
        _expect(disk / "bundle" / "rootfs")

    def ours(self, disk: Path) -> None:
        given = json.dumps({"username": "x", "password": self.key})
        self._program(disk, "pull", "--source", f"registry:{self.reference}", "--options", "-", given=given)
        self._program(disk, "unpack", "--image", self.made.digest, "--cache", str(disk / "cache"))
        self._expect(disk)

    def host(self, disk: Path, layout: Path) -> None:
        given = json.dumps({"objects": {"folder": str(layout)}})
        self._program(disk, "fetch", "--documents", "--image", self.made.digest, "--options", "-", given=given)
        self._program(disk, "unpack", "--image", self.made.digest, "--cache", str(disk / "cache"), "--options", "-", given=given)
        self._expect(disk)

    def _expect(self, disk: Path) -> None:
        _expect(disk / "cache" / "sha256" / self.made.digest.removeprefix("sha256:") / "rootfs")

    @staticmethod
    def _program(disk: Path, verb: str, *words: str, given: str = "") -> None:
        _run(str(bin_directory() / "atoll-io"), "image", verb, "--store", str(disk / "store"), *words, given=given)


def _expect(rootfs: Path) -> None:
    """Whoever is quick because half of it is missing has not won."""
    for name in ("etc/passwd", "srv/data0/0000", f"srv/data{DATA_LAYERS - 1}/0000"):
        if not os.path.lexists(rootfs / name):
            raise CannotMeasure(f"{rootfs} has no {name}")


def _run(*command: str, given: str = "") -> None:
    ran = subprocess.run(command, input=given, capture_output=True, text=True, timeout=600, check=False)
    if ran.returncode != 0:
        raise CannotMeasure(f"{command[0]} {command[1]} ended with {ran.returncode}: {(ran.stderr or ran.stdout)[-500:]}")


def _on_a_fresh_disk(place: Path, way: Any) -> float:
    """A disk that remembers earlier runs is slow to make files on: ext4 without a journal goes around what was deleted minutes ago."""
    with _disk(place) as disk:
        os.sync()
        began = time.perf_counter()
        way(disk)
        return time.perf_counter() - began


@contextmanager
def _disk(place: Path) -> Iterator[Path]:
    file, point = place / "disk", place / "mounted"
    point.mkdir()
    with file.open("wb") as opened:
        opened.truncate(DISK_GIB << 30)
    try:
        _run("mkfs.ext4", "-q", "-F", str(file))
        _run("mount", "-o", "loop", str(file), str(point))
        try:
            yield point
        finally:
            _run("umount", str(point))
    finally:
        file.unlink()
        point.rmdir()


async def layered(world: World) -> Finding:
    """Starts from cached images with the same tree, in one layer and in twenty."""
    finding = Finding(
        name="images-layered",
        title=f"Start from a cached image, 1 layer and {MANY} (ms)",
        columns=["", "p50", "p95", "p99", "n", f"{MANY} more than 1, pair by pair"],
        about="POST /v1/sandboxes until it is answered, then `/bin/true` through the edge; both images have the tree of `base`. Pairs, one after the other.",
    )
    names = {count: f"bench-{count}-{uuid.uuid4().hex[:8]}" for count in (1, MANY)}
    try:
        for count, name in names.items():
            world.say(f"importing an image of {count} layers")
            await _import(world, name, count)
        for kind in RuntimeKind.RUNSC, RuntimeKind.CRUN:
            samples = {count: Sample() for count in names}
            for turn in range(world.count(60, 4) + 1):
                # Who comes first alternates.
                for count in sorted(names, reverse=bool(turn % 2)):
                    taken = await _start(world, kind, names[count])
                    if turn:
                        samples[count].add(taken)
            more = paired(samples[MANY].values, samples[1].values) * 1e3
            for count, sample in samples.items():
                label = f"{kind.value}, {count} layer{'s' if count > 1 else ''}"
                finding.rows.append([label, *sample.cells(), "" if count == 1 else f"{figure(more)}"])
                finding.keep(label, sample)
            finding.verdicts.append(
                Verdict(
                    f"start from an image of {MANY} layers, {kind.value}: at most 5 ms over one of 1 (p50 of pairs)",
                    f"{more:+.1f} ms",
                    f"+{LAYERS_MORE_MS_MAX:.0f} ms",
                    more <= LAYERS_MORE_MS_MAX,
                )
            )
    finally:
        for name in names.values():
            await world.api.delete_template(name)
    return finding


async def _start(world: World, kind: RuntimeKind, template: str) -> float:
    began = time.perf_counter()
    made = await world.api.create(CLASS[kind], template, **SIZE)
    try:
        await world.api.through_edge(made).run(TRUE)
        return time.perf_counter() - began
    finally:
        await world.api.end(made.id)


async def _import(world: World, name: str, count: int) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="atoll-images.") as directory:
        archive = await asyncio.to_thread(_archive, Path(directory), count)
        await world.api.import_archive(name, archive, within_s=IMPORT_S)


def _archive(place: Path, count: int) -> Path:
    layout = layers.Layout(place / "layout")
    tree = layers.base_tree()
    for part in layers.in_parts(tree, layers.names_of(tree), count):
        layout.add(tree, part)
    layout.finish()
    archive = place / "archive.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(layout.directory, ".")
    return archive

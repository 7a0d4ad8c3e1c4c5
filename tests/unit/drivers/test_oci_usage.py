"""What a placement's disk takes, by the blocks that its files have; CPU and memory are the control group's (test_cgroups.py)."""

from __future__ import annotations

from pathlib import Path

from atoll.drivers.oci import usage
from atoll.drivers.oci.look import View
from atoll.hostops.cgroups import Layout


def view(tmp_path: Path) -> View:
    group = tmp_path / "cg" / "parent" / "plc_a"
    group.mkdir(parents=True)
    (group / "cpu.stat").write_text("usage_usec 5000000\n")
    (group / "memory.current").write_text("4096\n")
    (group / "memory.stat").write_text("file 0\nshmem 0\n")
    (tmp_path / "state" / "plc_a").mkdir(parents=True)
    return View(tmp_path / "state", Layout(2, (("", tmp_path / "cg"),)), "parent", None)  # type: ignore[arg-type]


def blocks(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_a_sparse_image_counts_for_what_it_takes(tmp_path: Path) -> None:
    image = tmp_path / "state" / "plc_a" / "disk.img"
    seen = view(tmp_path)
    with image.open("wb") as file:
        file.truncate(1 << 30)
        file.write(b"x" * 100_000)
    found = usage.measure(seen, ["plc_a"])["plc_a"]
    assert (found.cpu_s, found.memory_bytes, found.disk_bytes) == (5.0, 4096, blocks(image))
    assert found.disk_bytes < 1 << 20


def test_the_files_of_a_sentry_are_summed(tmp_path: Path) -> None:
    seen = view(tmp_path)
    disk = tmp_path / "state" / "plc_a" / "disk"
    disk.mkdir()
    for name in ("one", "two"):
        (disk / name).write_bytes(b"x" * 50_000)
    assert usage.measure(seen, ["plc_a"])["plc_a"].disk_bytes == sum(map(blocks, disk.iterdir()))


def test_without_a_disk_or_a_group(tmp_path: Path) -> None:
    assert usage.measure(view(tmp_path), ["plc_a", "plc_b"])["plc_a"].disk_bytes == 0
    assert set(usage.measure(View(tmp_path, Layout(2, (("", tmp_path),)), "none", None), ["plc_a"])) == set()  # type: ignore[arg-type]

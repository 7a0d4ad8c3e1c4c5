"""What a placement's disk takes, by the blocks that its files have; CPU and memory are the control group's (test_cgroups.py)."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.drivers.oci import usage
from atoll.drivers.oci.look import View
from atoll.drivers.oci.runtime import PID_FILE
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
    found = usage.measure(seen, ["plc_a"], {})["plc_a"]
    assert (found.cpu_s, found.memory_bytes, found.disk_bytes) == (5.0, 4096, blocks(image))
    assert found.disk_bytes < 1 << 20


def test_a_sentry_s_file_counts_although_it_has_no_name(tmp_path: Path) -> None:
    """The runtime unlinks it as soon as it is open; it is found again without a search, and no more once it is closed."""
    seen, files = view(tmp_path), {}
    placement = tmp_path / "state" / "plc_a"
    (placement / "disk").mkdir()
    (placement / PID_FILE).write_text(str(os.getpid()))
    with (placement / "disk" / "runsc-filestore-1").open("wb") as file:
        file.write(b"x" * 50_000)
        file.flush()
        expected = os.fstat(file.fileno()).st_blocks * 512
        (placement / "disk" / "runsc-filestore-1").unlink()
        assert usage.measure(seen, ["plc_a"], files)["plc_a"].disk_bytes == expected > 0
        assert files == {"plc_a": Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")}
        (placement / PID_FILE).unlink()
        assert usage.measure(seen, ["plc_a"], files)["plc_a"].disk_bytes == expected
    assert usage.measure(seen, ["plc_a"], files)["plc_a"].disk_bytes == 0


def test_without_a_disk_or_a_group(tmp_path: Path) -> None:
    assert usage.measure(view(tmp_path), ["plc_a", "plc_b"], {})["plc_a"].disk_bytes == 0
    assert set(usage.measure(View(tmp_path, Layout(2, (("", tmp_path),)), "none", None), ["plc_a"], {})) == set()  # type: ignore[arg-type]

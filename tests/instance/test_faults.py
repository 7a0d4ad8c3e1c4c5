"""Faults of the machine: a full disk, a missing runtime, a corrupt template. A clear error each, and nothing lost."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.drivers.oci.programs import PROGRAMS as COPIES
from atoll.programs import layout
from tests.instance.conftest import ROOT, Instance, until

BINARIES = Path(os.environ.get("ATOLL_BIN") or ROOT / "build" / "bin")
CACHE = Path(os.environ.get("ATOLL_CACHE") or "/var/cache/atoll")


def gone(one: Instance, sandbox: str) -> bool:
    return bool(one.json("sandbox", "get", "--json", sandbox)["state"] in {"released", "failed"})


@pytest.fixture
def small(fresh: Callable[[], Instance], tmp_path: Path) -> Iterator[Instance]:
    """An instance on a disk of its own, of 3 GiB."""
    one = fresh()
    image = one.home.with_name(f"{one.home.name}.disk")
    with image.open("wb") as file:
        file.truncate(3 << 30)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, one.home], check=True)
    one.home.chmod(0o755)
    try:
        yield one
    finally:
        (one.home / "filler").unlink(missing_ok=True)
        one.run("down", check=False)
        subprocess.run(["umount", one.home], check=True)
        image.unlink()


def fill(one: Instance, *, leave_mib: int) -> None:
    space = os.statvfs(one.home)
    amount_mib = (space.f_bavail * space.f_frsize >> 20) - leave_mib
    count = [f"count={amount_mib}"] if leave_mib else []
    for block, more in (("1M", count), ("4k", []))[: 1 if leave_mib else 2]:
        command = ["dd", "if=/dev/zero", f"of={one.home}/filler", f"bs={block}", "oflag=append", "conv=notrunc", "status=none", *more]
        # To the last byte where nothing is left: it ends by "no space left".
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
    free_mib = os.statvfs(one.home).f_bavail * space.f_frsize >> 20
    assert free_mib <= leave_mib + 16


@pytest.mark.long
@pytest.mark.parametrize("leave_mib", [0, 100])
def test_a_full_disk(small: Instance, leave_mib: int) -> None:
    small.run("up", "--no-demo")
    sandbox = small.create()
    small.exec(sandbox, "sh", "-c", "echo kept > /home/user/kept")
    fill(small, leave_mib=leave_mib)
    refused = small.run("sandbox", "create", check=False, within_s=120)
    assert refused.returncode in {1, 4}
    assert any(code in refused.stderr for code in ("HOST_DISK_FULL", "STORE_FULL", "NO_HOSTS", "NO_CAPACITY", "CREATE_TIMEOUT")), (
        refused.stderr
    )
    # Who is there goes on, and can be talked to.
    assert small.exec(sandbox, "cat", "/home/user/kept") == "kept\n"
    assert small.run("status", check=False).stdout
    (small.home / "filler").unlink()
    small.until_well(90)
    until(lambda: small.run("sandbox", "create", check=False).returncode == 0, within_s=90, what=small.last_words)
    assert small.exec(sandbox, "cat", "/home/user/kept") == "kept\n"
    small.run("sandbox", "rm", "--all", "--wait")
    assert small.ids() == set()


def test_a_sandbox_ends_on_a_full_disk(small: Instance) -> None:
    """Delete works from every state: also when control cannot write much more."""
    small.run("up", "--no-demo")
    sandbox = small.create()
    fill(small, leave_mib=0)
    small.run("sandbox", "rm", sandbox, check=False)
    (small.home / "filler").unlink()
    small.until_well(90)
    if not gone(small, sandbox):
        small.run("sandbox", "rm", sandbox, check=False)
    until(lambda: gone(small, sandbox), within_s=60, what=small.last_words)


def test_a_runtime_that_goes_missing(fresh: Callable[[], Instance]) -> None:
    one = fresh()
    for name in layout.BINARIES:
        shutil.copy2(BINARIES / name, one.home / name)
    one.environment["ATOLL_BIN"] = str(one.home)
    one.run("up", "--no-demo")
    sandbox = one.create()
    (one.home / "runsc").rename(one.home / "runsc.away")
    # Its copies are enough for as long as they are there.
    one.run("sandbox", "rm", "--wait", one.create())
    for copy in (one.layout.sandboxes / COPIES).glob("runsc-*"):
        copy.unlink()
    refused = one.run("sandbox", "create", check=False)
    assert refused.returncode in {1, 4}
    assert any(code in refused.stderr for code in ("RUNTIME_MISSING", "START_FAILED", "NO_HOSTS", "NO_CAPACITY")), refused.stderr
    assert one.exec(sandbox, "echo", "on") == "on\n"
    assert one.exec(one.create("--class", "shared-kernel"), "echo", "on") == "on\n"
    # Delete needs no runtime.
    one.run("sandbox", "rm", "--wait", sandbox)
    (one.home / "runsc.away").rename(one.home / "runsc")
    until(lambda: one.run("sandbox", "create", check=False).returncode == 0, within_s=120, what=one.last_words)
    one.run("sandbox", "rm", "--all", "--wait")


def test_a_corrupt_template(fresh: Callable[[], Instance]) -> None:
    one = fresh()
    cache = one.home / "cache"
    subprocess.run(["cp", "-al", CACHE, cache], check=True)
    current = (cache / "templates" / "base" / "current").resolve()
    (current / "rootfs" / "not-ours").write_text("x")
    one.environment["ATOLL_CACHE"] = str(cache)
    done = one.run("up", check=False)
    assert done.returncode != 0
    assert "IMAGE" in done.stderr or "image" in done.stderr, done.stderr
    assert "make up" in done.stderr
    (current / "rootfs" / "not-ours").unlink()
    until(lambda: one.run("up", check=False).returncode == 0, within_s=150, what=one.last_words)
    assert one.ids() == set()

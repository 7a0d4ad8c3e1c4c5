"""The firecracker driver keeps what the port promises: by a real Firecracker where ATOLL_TEST_KVM=1 names one, else by the strict one."""

import dataclasses
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.base.errors import Code, Refused
from atoll.domain.spec import SaveMode
from atoll.drivers.firecracker import shape
from atoll.drivers.firecracker.machine import FOLLOWED
from atoll.drivers.machines.config import user_of
from atoll.drivers.machines.runtime import RUN, VM
from atoll.drivers.oci.config import RuntimeKind
from atoll.testing.conformance.firecracker_stand import REAL, FirecrackerStand, missing
from atoll.testing.conformance.stand import shell
from atoll.testing.firecracker.contract import VARIABLE
from tests.conformance.machines import cases, run, standing

pytestmark = [pytest.mark.root, pytest.mark.runtime, pytest.mark.timeout(900)]
OFTEN = {
    "nothing_is_absent",
    "prepare_can_be_repeated_and_removed",
    "start_says_where_and_can_be_repeated",
    "a_running_guest_survives_its_driver",
    "self_checks_pass_and_say_what_to_do",
    "pause_and_resume_can_be_repeated",
    "what_was_saved_survives_its_driver",
    "memory_and_files_are_of_one_moment",
}
"""What is tried always: behind the strict one a guest is emulated, and boots for seconds."""
is_real = os.environ.get("ATOLL_TEST_KVM") == "1"


@pytest.fixture
async def stand(tmp_path, binaries, cache):
    async with standing(
        lambda: FirecrackerStand(RuntimeKind.FIRECRACKER, tmp_path, binaries=binaries, cache=cache), missing(binaries, cache)
    ) as made:
        yield made


@pytest.mark.parametrize("case", cases(OFTEN))
async def test_case(case, stand):
    await run(case, stand)


@pytest.mark.skipif(is_real or VARIABLE in os.environ, reason="it is said what was checked only where something was not")
def test_its_own_description_was_there() -> None:
    pytest.skip(
        f"{VARIABLE} names no firecracker.yaml: requests were held against the order of things alone, not against their description"
    )


@pytest.mark.skipif(is_real, reason="a real Firecracker was asked")
def test_a_real_one_was_asked() -> None:
    pytest.skip(
        f"no real Firecracker was asked: that takes KVM, ATOLL_TEST_KVM=1, and {REAL} as the directory of `firecracker` and `jailer`"
    )


async def test_it_is_nobody_in_a_root_of_its_own(stand) -> None:
    order = stand.order()
    seen = await stand.driver.start(order)
    process = Path(f"/proc/{seen.pid}")
    fields = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line)
    user = user_of(seen.address)
    assert fields["Uid"].split() == fields["Gid"].split() == [str(user)] * 4
    assert fields["Groups"].split() == []
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    root = process / "root"
    assert {path.name for path in root.iterdir()} == {"dev", "firecracker", "image", "initrd", "kernel", "run", "vm"}
    nodes = [path for path in (root / "dev").rglob("*") if stat.S_ISCHR(path.lstat().st_mode)]
    assert {node.name for node in nodes} == {"kvm", "tun", "urandom"}
    for namespace in ("mnt", "net", "ipc", "uts"):
        assert (process / "ns" / namespace).readlink() != Path(f"/proc/self/ns/{namespace}").readlink(), namespace
    vm = stand.config.state_dir / order.placement_id / VM
    writable = [path.name for path in (vm, *vm.iterdir()) if path.is_dir() and path.stat().st_uid == user]
    assert writable == [RUN], "it can replace nothing that the agent works with"
    mine = f"{stand.names.cgroup}/{order.placement_id}"
    assert all(line.endswith(mine) for line in (process / "cgroup").read_text().splitlines() if ":memory:" in line or ":pids:" in line)
    jail = stand.config.state_dir / order.placement_id / "jail"
    assert not list(jail.iterdir()), "on the host's disk there is nothing of it"
    await stand.driver.remove(order.placement_id)


async def test_after_the_first_a_save_writes_what_has_changed(stand) -> None:
    """And after one that failed half-way all of it: what Firecracker has told once it does not tell again."""
    order = stand.order()
    vm = stand.config.state_dir / order.placement_id / VM
    guest = await stand.guest(order, await stand.driver.start(order))
    await shell(guest, "head -c 8000000 /dev/urandom >/dev/shm/kept; md5sum /dev/shm/kept >/dev/shm/sum")
    assert not (vm / FOLLOWED).exists()
    await stand.driver.save(order, SaveMode.FULL)
    seen = await stand.driver.restore(order)
    await stand.driver.discard(order.placement_id)
    assert (vm / FOLLOWED).exists()
    guest = await stand.guest(order, seen)
    await shell(guest, "head -c 8000000 /dev/urandom >/dev/shm/more; md5sum /dev/shm/more >>/dev/shm/sum")
    # Somebody has taken the name of what is to be saved: it fails when the difference has been told.
    blocked = stand.driver._machine._gather
    stand.driver._machine._gather = lambda *_: (_ for _ in ()).throw(OSError(28, "no space"))
    with pytest.raises(Refused):
        await stand.driver.save(order, SaveMode.FULL)
    stand.driver._machine._gather = blocked
    assert not (vm / FOLLOWED).exists()
    await shell(
        guest, "rm /dev/shm/kept; head -c 8000000 /dev/zero >/dev/shm/zeros; md5sum /dev/shm/zeros >>/dev/shm/sum; sed -i 1d /dev/shm/sum"
    )
    await stand.driver.save(order, SaveMode.FULL)
    seen = await stand.driver.restore(order)
    await stand.driver.discard(order.placement_id)
    guest = await stand.guest(order, seen)
    assert (await shell(guest, "cd / && md5sum -c /dev/shm/sum")).status == 0
    await stand.driver.save(order, SaveMode.FULL)
    assert not (vm / shape.DIFF).exists()
    seen = await stand.driver.restore(order)
    guest = await stand.guest(order, seen)
    assert (await shell(guest, "cd / && md5sum -c /dev/shm/sum")).status == 0
    await stand.driver.remove(order.placement_id)


async def test_a_program_that_is_another_starts_nothing(tmp_path, binaries, cache) -> None:
    if lack := missing(binaries, cache):
        pytest.skip(f"needs {lack}")
    stand = FirecrackerStand(RuntimeKind.FIRECRACKER, tmp_path, binaries=binaries, cache=cache)
    config = dataclasses.replace(stand.driver._machines, firecracker_sha256="0" * 64)
    stand.driver.program._config = config
    await stand.open()
    try:
        found = {probe.id: probe for probe in await stand.driver.probe()}
        assert not found["runtime.firecracker.binary"].ok
        assert not found["runtime.firecracker.boot"].ok
        with pytest.raises(Refused) as refused:
            await stand.driver.start(stand.order())
        assert refused.value.code is Code.RUNTIME_UNTRUSTED
    finally:
        await stand.close()


@pytest.mark.skipif(is_real, reason="it is about the strict one")
@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--id", "plc_1", "--exec-file", "{f}", "--uid", "1", "--gid", "1"], "invalid instance ID"),
        (["--id", "a", "--exec-file", "/bin/sh", "--uid", "1", "--gid", "1"], "must contain"),
        (["--id", "a", "--exec-file", "{f}", "--uid", "1"], "--gid"),
        (["--id", "a", "--exec-file", "{f}", "--uid", "1", "--gid", "1", "--nonsense", "1"], "--nonsense"),
    ],
)
def test_the_strict_jailer_refuses(tmp_path, words, refusal) -> None:
    program = tmp_path / "firecracker"
    program.write_text("#!/bin/sh\n")
    command = [sys.executable, "-m", "atoll.testing.firecracker.jailer", *(word.format(f=program) for word in words)]
    done = subprocess.run([*command, "--chroot-base-dir", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert refusal in done.stderr

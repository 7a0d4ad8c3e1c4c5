"""The qemu driver keeps what the port promises, on this machine: with KVM where a guest boots with it, else without."""

from pathlib import Path

import pytest

from atoll.base.errors import Code, Refused
from atoll.domain.spec import Isolation
from atoll.drivers.machines.config import user_of
from atoll.drivers.oci.config import RuntimeKind
from atoll.testing.conformance.qemu_stand import QemuStand, kind, missing
from tests.conformance.machines import cases, run, standing

pytestmark = [pytest.mark.root, pytest.mark.runtime, pytest.mark.timeout(600)]
OFTEN = {
    "nothing_is_absent",
    "prepare_can_be_repeated_and_removed",
    "start_says_where_and_can_be_repeated",
    "stop_keeps_files_and_start_goes_on",
    "an_end_by_itself_is_told_once",
    "a_running_guest_survives_its_driver",
    "what_was_prepared_can_be_started_by_another",
    "a_damaged_image_is_refused",
    "self_checks_pass_and_say_what_to_do",
    "memory_is_what_was_ordered",
    "an_ordinary_machine",
    "pause_and_resume_can_be_repeated",
    "a_frozen_guest_survives_its_driver",
    "what_was_saved_survives_its_driver",
    "memory_and_files_are_of_one_moment",
    "public_addresses_are_open",
    "forged_sources_are_dropped",
}
"""What is tried always: without hardware virtualization a guest boots for seconds, and the rest takes minutes."""


@pytest.fixture
async def stand(tmp_path, binaries, cache):
    async with standing(lambda: QemuStand(kind(), tmp_path, binaries=binaries, cache=cache), missing(binaries, cache)) as made:
        yield made


@pytest.mark.parametrize("case", cases(OFTEN))
async def test_case(case, stand):
    await run(case, stand)


async def test_qemu_is_nobody_in_a_root_of_its_own(stand) -> None:
    order = stand.order()
    seen = await stand.driver.start(order)
    process = Path(f"/proc/{seen.pid}")
    fields = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line)
    user = str(user_of(seen.address))
    assert fields["Uid"].split() == fields["Gid"].split() == [user] * 4
    assert fields["Groups"].split() == []
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert sorted(path.name for path in (process / "root").iterdir()) == sorted(
        ["dev", "firmware", "image", "initrd", "kernel", "lib", "lib64", "usr", "vm"]
    )
    names = {line.partition("=")[0] for line in (process / "environ").read_text().split("\0") if line}
    assert names <= {"PATH", "PWD", "OLDPWD", "SHLVL", "_"}, names
    vm = stand.config.state_dir / order.placement_id / "vm"
    writable = [path.name for path in (vm, *vm.iterdir()) if path.is_dir() and path.stat().st_uid == user_of(seen.address)]
    assert writable == ["run"], "it can replace nothing that the agent works with"
    nodes = {"null", "urandom", "zero"}
    assert {path.name for path in (process / "root" / "dev").iterdir()} - {"kvm"} == nodes
    assert not (process / "root" / "etc").exists()
    for namespace in ("mnt", "net", "ipc", "uts"):
        assert (process / "ns" / namespace).readlink() != Path(f"/proc/self/ns/{namespace}").readlink(), namespace
    mine = f"{stand.names.cgroup}/{order.placement_id}"
    assert all(line.endswith(mine) for line in (process / "cgroup").read_text().splitlines() if ":memory:" in line or ":pids:" in line)
    await stand.driver.remove(order.placement_id)


async def test_without_kvm_no_machine_is_called_one(tmp_path, binaries, cache) -> None:
    """What is emulated is another driver's, and has another name: a host never claims more than it can do."""
    if lack := missing(binaries, cache):
        pytest.skip(f"needs {lack}")
    if kind() is RuntimeKind.QEMU:
        pytest.skip("a guest boots with KVM here")
    stand = QemuStand(RuntimeKind.QEMU, tmp_path, binaries=binaries, cache=cache)
    await stand.open()
    try:
        order = stand.order()
        assert order.spec.isolation is Isolation.VM
        found = {probe.id: probe for probe in await stand.driver.probe()}
        assert not found["runtime.qemu.boot"].ok
        assert found["runtime.qemu.boot"].fatal, "the host does not say that it can"
        for verb in (stand.driver.prepare, stand.driver.start):
            with pytest.raises(Refused) as refused:
                await verb(order)
            assert refused.value.code is Code.RUNTIME_MISSING
        assert not stand.traces(order)
    finally:
        await stand.close()

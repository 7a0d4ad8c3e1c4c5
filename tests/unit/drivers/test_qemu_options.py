"""What a virtual machine is, read off its command line."""

import json

import pytest

from atoll.domain.spec import Isolation, Spec
from atoll.drivers.machines.config import UID_BASE, Accelerator, user_of
from atoll.drivers.machines.telling import KERNEL_MIB, guest_disk
from atoll.drivers.port import Order
from atoll.drivers.qemu import options


def shape(accelerator=Accelerator.TCG, **other):
    return options.Shape("plc_1", accelerator, 512, 1, 7, tsc_khz=2_600_000, **other)


def values(words, option):
    return [words[place + 1] for place, word in enumerate(words) if word == option]


def test_a_machine_may_start_nothing_and_write_its_own_disk_alone():
    words = options.arguments(shape())
    assert words[:2] == ["-name", "plc_1"], "by this it is known again"
    (sandbox,) = values(words, "-sandbox")
    assert {"on", "spawn=deny", "elevateprivileges=deny", "obsolete=deny", "resourcecontrol=deny"} == set(sandbox.split(","))
    writable = [disk for disk in values(words, "-drive") if "readonly=on" not in disk]
    assert len(writable) == 1
    assert "/vm/disk.img" in writable[0]
    assert "-nodefaults" in words
    assert "-no-user-config" in words
    assert values(words, "-netdev") == ["tap,id=net,fd=7"], "it opens no device by itself"
    paths = {word for option in words for part in option.split(",") if "/" in (word := part.partition("=")[2])}
    assert all(path.startswith(("/vm/", "/image", "unix:")) for path in paths if path), paths


def test_memory_is_mapped_privately():
    (memory,) = values(options.arguments(shape()), "-object")
    assert "share=off" in memory
    assert "size=512M" in memory


def test_without_hardware_the_guest_is_told_how_fast_its_clock_counts():
    emulated, real = (options.kernel_line(shape(kind)).split() for kind in (Accelerator.TCG, Accelerator.KVM))
    assert "tsc_early_khz=2600000" in emulated
    assert not [word for word in real if "tsc" in word or word == "mitigations=off"]
    assert values(options.arguments(shape(Accelerator.KVM)), "-accel") == ["kvm"]


def test_a_machine_that_was_saved_differs_by_where_its_state_comes_from_and_boots_nothing():
    fresh, restored = options.arguments(shape()), options.arguments(shape(state=9))
    at = fresh.index("-kernel")
    assert fresh[at : at + 6 : 2] == ["-kernel", "-initrd", "-append"]
    assert restored == [*fresh[:at], *fresh[at + 6 :], "-incoming", "fd:9"]


@pytest.mark.parametrize("accelerator", list(Accelerator))
def test_a_machine_that_comes_back_announces_itself_to_nobody(accelerator):
    assert "migration.announce-rounds=0" in values(options.arguments(shape(accelerator, state=9)), "-global")


@pytest.mark.parametrize(
    ("accelerator", "cpu_millis", "cpus"),
    [(Accelerator.TCG, 4000, 1), (Accelerator.KVM, 500, 1), (Accelerator.KVM, 1000, 1), (Accelerator.KVM, 1001, 2)],
)
def test_cores(accelerator, cpu_millis, cpus):
    assert options.cpus(accelerator, cpu_millis) == cpus


@pytest.mark.parametrize("tmp_on_disk", [True, False])
def test_the_guest_is_told_by_whole_sectors(tmp_on_disk):
    spec = Spec("c", "t", "sha256:1", "n", Isolation.VM, 1000, 512, 1024, 100, 60, command=("run",), tmp_on_disk=tmp_on_disk)
    order = Order("plc_1", "i1", 3, spec, "nonce", "key", "name")
    content = guest_disk(order, resolver="10.64.255.254", tmpfs_percent=(40, 20, 10))
    assert len(content) % 512 == 0
    said = json.loads(content.rstrip(b"\0"))
    assert said["guest"]["placement_id"] == "plc_1"
    assert said["guest"]["command"] == ["run"]
    assert said["guest"]["placement_file"].startswith("/run/"), "in memory: what was written there is gone with the next boot"
    assert said["guest"]["pids_max"] == 100
    assert said["network"] == {"address": "192.0.0.2/29", "gateway": "192.0.0.1", "resolver": "10.64.255.254"}
    assert (said["tmp_mib"] == 0) is tmp_on_disk
    assert said["tmp_mib"] + said["shm_mib"] + said["run_mib"] < 512 - KERNEL_MIB


def test_each_slot_has_a_user_of_its_own():
    addresses = [f"10.{second}.{third}.{fourth}" for second in (64, 127) for third in (0, 253) for fourth in (1, 255)]
    users = {user_of(address) for address in addresses}
    assert len(users) == len(addresses)
    assert min(users) > UID_BASE
    assert max(users) < 0x7FFFFFFF

"""Cases about limits, all looked at from inside: whoever exceeds one harms only itself."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

from atoll.domain.spec import Isolation
from atoll.drivers.port import Order, Power
from atoll.testing.conformance.guest import GuestClient, GuestGone
from atoll.testing.conformance.stand import Stand, shell

_REFUSED = (
    "mount -t tmpfs none /mnt",
    "mknod /disk b 254 0",
    "echo 7 >/proc/sys/kernel/printk",
    "echo h >/proc/sysrq-trigger",
    "unshare -U true",
)
_REFUSED_WHERE_SHARED = ("echo 0 >/sys/fs/cgroup/pids/pids.max",)
"""A guest with a kernel of its own may do this to itself, and then starts nothing any more."""
_HOG = """
taken = bytearray(4 << 30)
for place in range(0, len(taken), 4096):
    taken[place] = 1
print("took it")
"""
# By the shell alone, which needs no process for it. A kernel of the guest's own has threads, which are nobody's processes.
_COUNT = """
set -- /proc/[0-9]*; all=$#; kernel=0
if read -r name </proc/2/comm && [ "$name" = kthreadd ]; then
  # Its line has no end, which `read` takes for a failure.
  read -r children </proc/2/task/2/children; set -- $children; kernel=$(($# + 1))
fi
echo $((all - kernel))
"""
DISK_MIB = 256
PIDS_MAX = 200


async def _started(stand: Stand, **spec: object) -> tuple[Order, GuestClient]:
    order = stand.order(**spec)
    return order, await stand.guest(order, await stand.driver.start(order))


async def _lives(stand: Stand, order: Order, guest: GuestClient) -> None:
    """The sandbox still runs and its guest still starts programs."""
    for _ in range(60):
        assert (await stand.driver.inspect(order.placement_id)).power is Power.RUNNING, "the whole sandbox ended"
        try:
            if (await shell(guest, "echo alive", timeout_s=5.0)).out == "alive\n":
                return
        except (AssertionError, GuestGone, TimeoutError):
            await asyncio.sleep(0.5)
    raise AssertionError("the guest never answered again")


async def a_full_disk_is_the_guests_own(stand: Stand) -> None:
    order, guest = await _started(stand, disk_mib=DISK_MIB)
    neighbour, other = await _started(stand, disk_mib=DISK_MIB)
    size_kib = int((await shell(guest, "df -k / | tail -n 1")).out.split()[1])
    assert DISK_MIB * 1024 * 0.9 <= size_kib <= DISK_MIB * 1024, f"df says {size_kib} KiB of {DISK_MIB} MiB"
    result = await shell(guest, f"dd if=/dev/zero of=/fill bs=1M count={DISK_MIB * 2}; echo rest >/rest", timeout_s=60.0)
    assert "No space left" in result.text, result.text
    assert (await shell(other, "echo fine >/fine && cat /fine")).out == "fine\n"
    assert (await shell(guest, "rm /fill && echo again >/again && cat /again")).out == "again\n"
    for each in (order, neighbour):
        await stand.driver.remove(each.placement_id)


async def temporary_files_are_bounded(stand: Stand) -> None:
    order, guest = await _started(stand)
    for directory in ("/tmp", "/run", "/dev/shm"):  # noqa: S108 - the guest's
        size_mib = int((await shell(guest, f"df -k {directory} | tail -n 1")).out.split()[1]) // 1024
        assert 1 <= size_mib <= order.spec.memory_mib, f"{directory} has {size_mib} MiB"
    assert (await shell(guest, "touch /tmp/by-user", user="user")).status == 0
    await stand.driver.remove(order.placement_id)


async def a_fork_bomb_stays_inside(stand: Stand) -> None:
    order, guest = await _started(stand, pids_max=PIDS_MAX)
    bomb = f"i=0; while [ $i -lt {PIDS_MAX * 3} ]; do sleep 8 & i=$((i+1)); done; wait"
    task = asyncio.create_task(_quietly(guest, bomb))
    most = 0
    for _ in range(12):
        await asyncio.sleep(0.4)
        most = max(most, await _count_sleepers(guest))
    assert most <= PIDS_MAX, f"{most} processes of {PIDS_MAX}"
    await task
    await _lives(stand, order, guest)
    await stand.driver.remove(order.placement_id)


async def _quietly(guest: GuestClient, script: str) -> None:
    try:
        await shell(guest, script, timeout_s=60.0)
    except (AssertionError, GuestGone, TimeoutError):
        return


async def _count_sleepers(guest: GuestClient) -> int:
    """Processes inside, as far as one can be started to count them: while none can, the limit holds."""
    try:
        result = await shell(guest, _COUNT, timeout_s=5.0)
    except (AssertionError, GuestGone, TimeoutError):
        return 0
    found = re.search(r"^(\d+)$", result.out, re.MULTILINE)
    return int(found[1]) if found else 0


async def a_memory_hog_dies_alone(stand: Stand) -> None:
    order, guest = await _started(stand, memory_mib=stand.memory_mib_min)
    bystander = asyncio.create_task(shell(guest, "sleep 6; echo undisturbed", timeout_s=60.0))
    await asyncio.sleep(1.0)  # the settings that protect the guest come right after its start
    hog = await guest.run(["python3", "-c", _HOG], timeout_s=60.0)
    assert hog.status != 0, "it took more memory than there is"
    assert hog.out == "", hog.text
    assert (await bystander).out == "undisturbed\n"
    await _lives(stand, order, guest)
    assert stand.exits == []
    await stand.driver.remove(order.placement_id)


async def full_temporary_files_end_nobody(stand: Stand) -> None:
    order, guest = await _started(stand, memory_mib=stand.memory_mib_min)
    bystander = asyncio.create_task(shell(guest, "sleep 8; echo undisturbed", timeout_s=60.0))
    for directory in ("/tmp", "/run", "/dev/shm"):  # noqa: S108 - the guest's
        filled = await shell(guest, f"dd if=/dev/zero of={directory}/fill bs=1M", timeout_s=60.0)
        assert "No space left" in filled.text, filled.text
    assert (await bystander).out == "undisturbed\n"
    await _lives(stand, order, guest)
    await stand.driver.remove(order.placement_id)


async def memory_is_what_was_ordered(stand: Stand) -> None:
    order, guest = await _started(stand)
    if stand.driver.capabilities.isolation is Isolation.SHARED_KERNEL:
        limits = "cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || cat /sys/fs/cgroup/memory.max"
        assert int((await shell(guest, limits)).out) == order.spec.memory_mib << 20
    else:
        total_kib = int((await shell(guest, "grep MemTotal /proc/meminfo")).out.split()[1])
        ordered_kib = order.spec.memory_mib * 1024
        if stand.driver.capabilities.isolation in (Isolation.VM, Isolation.VM_EMULATED):
            # Its kernel is in its memory.
            assert ordered_kib * 0.8 <= total_kib <= ordered_kib, f"{total_kib} KiB"
        else:
            assert total_kib == ordered_kib
    await stand.driver.remove(order.placement_id)


async def cpu_is_what_was_ordered(stand: Stand) -> None:
    order, guest = await _started(stand, cpu_millis=500)
    burners = asyncio.create_task(shell(guest, "for i in 1 2; do timeout 8 sh -c 'while :; do :; done' & done; wait", timeout_s=60.0))
    await asyncio.sleep(1.5)
    before, began = stand.cpu_used_s(order), time.monotonic()
    await asyncio.sleep(3.0)
    share = (stand.cpu_used_s(order) - before) / (time.monotonic() - began)
    assert 0.02 <= share <= 0.6, f"{share:.2f} cores, half a core was ordered"
    await burners
    await stand.driver.remove(order.placement_id)


async def an_ordinary_machine(stand: Stand) -> None:
    """What people do on the first day works: own files, become root, find one's own name."""
    order, guest = await _started(stand)
    root = await shell(
        guest, "id -u && touch /made && chown nobody /made && chmod 600 /made && stat -c %U:%a /made 2>/dev/null || ls -l /made"
    )
    assert root.out.startswith("0\n"), root.text
    assert "nobody" in root.out, root.text
    assert (await shell(guest, "hostname")).out.strip() == order.hostname
    hosts = await shell(guest, "cat /etc/hosts /etc/resolv.conf")
    assert order.hostname in hosts.out
    assert "nameserver 10." in hosts.out, hosts.out
    assert (await shell(guest, "mkdir -p /a/b && mv /a /c && ln -s /c /d && ls /d")).out == "b\n"
    soft, hard = (await shell(guest, "ulimit -Sn; ulimit -Hn; ulimit -Sn $(ulimit -Hn)")).out.split()
    assert soft == "1024", "some programs look at each file that they may have open"
    assert int(hard) >= 8192, hard
    if (await shell(guest, "command -v sudo && getent passwd user")).status == 0:
        assert (await shell(guest, "sudo -n id -u", user="user")).out == "0\n"
    if (await shell(guest, "command -v ping")).status == 0:
        assert (await shell(guest, "ping -c 1 -w 3 127.0.0.1")).status == 0
    await stand.driver.remove(order.placement_id)


async def the_hosts_kernel_is_out_of_reach(stand: Stand) -> None:
    """Where the kernel is shared, what has led out of containers before is refused; elsewhere it is the guest's own to change."""
    order, guest = await _started(stand)
    shared = stand.driver.capabilities.isolation is Isolation.SHARED_KERNEL
    printk = Path("/proc/sys/kernel/printk").read_text()
    for script in (*_REFUSED, *(_REFUSED_WHERE_SHARED if shared else ())):
        result = await shell(guest, script)
        assert not shared or result.status != 0, script
    assert Path("/proc/sys/kernel/printk").read_text() == printk
    if shared:
        status = (await shell(guest, "cat /proc/self/status")).out
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["Seccomp"].strip() == "2"
        effective = int(fields["CapEff"], 16)
        for bit, name in ((21, "SYS_ADMIN"), (12, "NET_ADMIN"), (16, "SYS_MODULE"), (17, "SYS_RAWIO"), (19, "SYS_PTRACE"), (27, "MKNOD")):
            assert not effective >> bit & 1, f"CAP_{name}"
    await stand.driver.remove(order.placement_id)

"""The oci driver with runsc keeps what the port promises, on this machine."""

import asyncio
import contextlib
import os
import threading
from pathlib import Path

import pytest

from atoll.domain.spec import SaveMode
from atoll.drivers.oci.clearing import FREED_BEHIND_MIB_MAX
from atoll.drivers.oci.config import RuntimeKind
from atoll.hostops import processes
from atoll.testing.conformance.stand import shell
from atoll.testing.conformance.suite import CASES, lacking

RUNTIME = RuntimeKind.RUNSC
pytestmark = [pytest.mark.root, pytest.mark.runtime]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_case(case, oci_stand):
    if flags := lacking(case, oci_stand.driver.capabilities):
        pytest.skip(f"runsc does not declare {', '.join(flags)}")
    await case.run(oci_stand)


MIB = 1 << 20
HOLD = "import os,time; held=os.urandom({mib} << 20); open('/tmp/held','w').close(); time.sleep(600)"


async def holding(stand, mib):
    """A guest with a process that holds so much, and its sentry."""
    order = stand.order(memory_mib=mib + 256)
    seen = await stand.driver.start(order)
    guest = await stand.guest(order, seen)
    script = f'(python3 -c "{HOLD.format(mib=mib)}" >/dev/null 2>&1 &); until [ -e /tmp/held ]; do sleep 0.02; done'
    assert (await shell(guest, script)).status == 0
    return order, seen.pid


def files_of_guests():
    """What this process has of guests' memory."""
    names = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names.append(str(path.readlink()))
    return [name for name in names if "runsc-memory" in name]


async def test_memory_is_freed_behind_a_save_and_not_before_it(oci_stand, monkeypatch):
    order, sentry = await holding(oci_stand, 48)
    memory, go_on = oci_stand.driver._memory, threading.Event()
    let_go, sizes = memory.let_go, []

    def later(held):
        sizes.extend(os.fstat(fd).st_blocks * 512 for fd in held.fds)
        go_on.wait(30.0)
        let_go(held)

    monkeypatch.setattr(memory, "let_go", later)
    try:
        await oci_stand.driver.save(order, SaveMode.FULL)
        assert not processes.alive(sentry), "capacity is released by its end"
        async with asyncio.timeout(10.0):
            while not sizes:
                await asyncio.sleep(0.01)
        assert 48 * MIB < sum(sizes) < FREED_BEHIND_MIB_MAX * MIB
        assert memory.held_bytes > 48 * MIB
    finally:
        go_on.set()
    async with asyncio.timeout(10.0):
        while memory.held_bytes or files_of_guests():
            await asyncio.sleep(0.01)
    assert (await oci_stand.driver.restore(order)).pid
    await oci_stand.driver.remove(order.placement_id)


async def test_a_guest_with_more_memory_than_may_be_freed_behind_frees_it_itself(oci_stand, monkeypatch):
    order, sentry = await holding(oci_stand, FREED_BEHIND_MIB_MAX + 16)
    memory, held = oci_stand.driver._memory, []
    let_go = memory.let_go
    monkeypatch.setattr(memory, "let_go", lambda one: (held.append(one.size_bytes), let_go(one)))
    await oci_stand.driver.save(order, SaveMode.FULL)
    assert not processes.alive(sentry)
    assert held in ([], [0]), "nothing of it outlasts its end"
    assert not files_of_guests()
    await oci_stand.driver.remove(order.placement_id)

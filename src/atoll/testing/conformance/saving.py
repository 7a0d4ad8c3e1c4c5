"""Cases about saving a guest and bringing it back: one moment, nothing lost, and nothing half done to be seen."""

from __future__ import annotations

import asyncio

from atoll.base.errors import Code
from atoll.domain.spec import SaveMode
from atoll.drivers.port import Order, Power, Seen
from atoll.hostops import processes
from atoll.testing.conformance.guest import GuestClient
from atoll.testing.conformance.stand import Stand, refusal, shell

COUNTER = "i=0; while :; do i=$((i+1)); echo $i >>/count; sleep 0.02; done"
"""Its last line is the count: a file that is written anew is empty for a moment."""
CYCLES = 20


async def _gone(stand: Stand, order: Order) -> None:
    await stand.driver.remove(order.placement_id)
    assert (await stand.driver.inspect(order.placement_id)).power is Power.ABSENT
    assert not stand.traces(order), f"left on the machine: {stand.traces(order)}"


async def _back(stand: Stand, order: Order, *, reboot: bool = False) -> tuple[Seen, GuestClient]:
    seen = await stand.driver.restore(order, reboot=reboot)
    guest = await stand.guest(order, seen)
    await stand.driver.discard(order.placement_id)
    return seen, guest


async def what_is_saved_is_at_rest_until_it_is_restored(stand: Stand) -> None:
    order = stand.order()
    await stand.driver.start(order)
    saved = await stand.driver.save(order, SaveMode.FULL)
    assert saved.mode is stand.driver.capabilities.saves, "what cannot be done is said"
    assert saved.size_bytes > 0
    assert (await stand.driver.inspect(order.placement_id)).power is Power.SAVED
    assert order.placement_id in [held.placement_id for held in await stand.driver.held()]
    seen = await stand.driver.restore(order)
    assert (seen.power, bool(seen.address)) == (Power.RUNNING, True)
    await stand.driver.discard(order.placement_id)
    assert (await stand.driver.inspect(order.placement_id)).power is Power.RUNNING
    await _gone(stand, order)
    assert stand.exits == [], "an end that was asked for is no news"


async def what_a_guest_leaves_goes_behind_its_save(stand: Stand) -> None:
    order = stand.order()
    seen = await stand.driver.start(order)
    await stand.driver.save(order, SaveMode.FULL)
    assert seen.pid is not None
    assert not processes.alive(seen.pid), "it has ended when it is said to be saved"
    async with asyncio.timeout(5.0):
        while left := [name for name in (await stand.driver.inspect(order.placement_id)).leftovers if not name.startswith("directory")]:
            assert not [name for name in left if name.startswith("process")]
            await asyncio.sleep(0.01)
    await _back(stand, order)
    await stand.driver.save(order, SaveMode.FULL)
    # At once, whatever is still being cleared away.
    await _back(stand, order)
    await _gone(stand, order)
    assert stand.exits == []


async def saving_and_restoring_can_be_repeated(stand: Stand) -> None:
    order = stand.order()
    await stand.driver.start(order)
    first = await stand.driver.save(order, SaveMode.FULL)
    assert await stand.driver.save(order, SaveMode.FULL) == first
    for _ in range(2):
        assert (await stand.driver.restore(order)).power is Power.RUNNING
    assert await stand.driver.save(order, SaveMode.FULL) == first, "nobody has used it since"
    assert (await stand.driver.inspect(order.placement_id)).power is Power.SAVED
    await stand.driver.restore(order)
    await stand.driver.discard(order.placement_id)
    await stand.driver.discard(order.placement_id)
    assert (await refusal(stand.driver.restore(order))).code is Code.RESUME_FAILED, "what was discarded is the past"
    await _gone(stand, order)


async def what_is_saved_is_removed(stand: Stand) -> None:
    order = stand.order()
    await stand.driver.start(order)
    await stand.driver.save(order, SaveMode.FULL)
    await _gone(stand, order)


async def what_was_saved_survives_its_driver(stand: Stand) -> None:
    order = stand.order()
    await stand.driver.start(order)
    await stand.driver.save(order, SaveMode.FULL)
    driver = await stand.reopen()
    assert (await driver.adopt(order.placement_id)).power is Power.SAVED
    await driver.restore(order)
    driver = await stand.reopen()
    assert (await driver.adopt(order.placement_id)).power is Power.SAVED, "nobody has used what was restored"
    seen = await driver.restore(order)
    await driver.discard(order.placement_id)
    driver = await stand.reopen()
    adopted = await driver.adopt(order.placement_id)
    assert (adopted.power, adopted.pid) == (Power.RUNNING, seen.pid)
    await _gone(stand, order)


async def what_is_not_there_cannot_be_saved(stand: Stand) -> None:
    order = stand.order()
    assert (await refusal(stand.driver.save(order, SaveMode.FULL))).code is Code.PLACEMENT_LOST
    assert (await refusal(stand.driver.restore(order))).code is Code.RESUME_FAILED
    await stand.driver.discard(order.placement_id)
    await stand.driver.prepare(order)
    assert (await refusal(stand.driver.save(order, SaveMode.FULL))).code is Code.PLACEMENT_LOST
    await _gone(stand, order)


async def files_outlast_a_save_of_files(stand: Stand) -> None:
    order = stand.order()
    guest = await stand.guest(order, await stand.driver.start(order))
    before = (await shell(guest, "head -c 3000000 /dev/urandom >/kept; md5sum /kept; cat /proc/sys/kernel/random/boot_id")).out.split()
    assert (await stand.driver.save(order, SaveMode.FILES)).mode is SaveMode.FILES
    _, guest = await _back(stand, order)
    after = (await shell(guest, "md5sum /kept; cat /proc/sys/kernel/random/boot_id")).out.split()
    assert after[0] == before[0], "not a byte is another"
    if stand.driver.capabilities.saves_memory:
        assert after[2] != before[2], "it was booted anew"
    await _gone(stand, order)


async def memory_and_files_are_of_one_moment(stand: Stand) -> None:
    order = stand.order()
    guest = await stand.guest(order, await stand.driver.start(order))
    await shell(guest, f"({COUNTER}) >/dev/null 2>&1 & head -c 3000000 /dev/urandom >/kept; echo tmp >/tmp/kept")
    before = (await shell(guest, "md5sum /kept; cat /proc/sys/kernel/random/boot_id; tail -n 1 /count")).out.split()
    await stand.driver.save(order, SaveMode.FULL)
    await asyncio.sleep(1.0)
    _, guest = await _back(stand, order)
    first = (await shell(guest, "md5sum /kept; cat /proc/sys/kernel/random/boot_id; tail -n 1 /count; cat /tmp/kept")).out.split()
    await asyncio.sleep(0.5)
    second = (await shell(guest, "tail -n 1 /count")).out
    assert (first[0], first[2], first[4]) == (before[0], before[2], "tmp")
    assert int(before[3]) <= int(first[3]) < int(second), "what counted goes on where it was"
    _, guest = await _rebooted(stand, order)
    assert (await shell(guest, "md5sum /kept")).out.split()[0] == before[0], "files alone, of what was saved whole"
    assert (await shell(guest, "cat /proc/sys/kernel/random/boot_id")).out.strip() != before[2]
    await _gone(stand, order)


async def _rebooted(stand: Stand, order: Order) -> tuple[Seen, GuestClient]:
    await stand.driver.save(order, SaveMode.FULL)
    return await _back(stand, order, reboot=True)


async def twenty_cycles_lose_nothing(stand: Stand) -> None:
    order = stand.order()
    guest = await stand.guest(order, await stand.driver.start(order))
    await shell(guest, f"mkdir /all; ({COUNTER}) >/dev/null 2>&1 &")
    sums: list[str] = []
    counted = 0
    for number in range(CYCLES):
        # Written and not synced: what was written before a save is there after it.
        sums.append((await shell(guest, f"head -c 200000 /dev/urandom >/all/{number}; md5sum </all/{number}")).out)
        await stand.driver.save(order, SaveMode.FULL)
        _, guest = await _back(stand, order)
        found = (await shell(guest, f"for i in $(seq 0 {number}); do md5sum </all/$i; done")).out
        assert found == "".join(sums), f"cycle {number}"
        count = int((await shell(guest, "sleep 0.1; tail -n 1 /count")).out)
        assert count > counted, f"cycle {number}: the process that counts is gone"
        counted = count
    await _gone(stand, order)


async def a_frozen_guest_is_saved(stand: Stand) -> None:
    order = stand.order()
    guest = await stand.guest(order, await stand.driver.start(order))
    await shell(guest, "echo here >/kept")
    await stand.driver.pause(order.placement_id)
    await stand.driver.save(order, SaveMode.FULL)
    _, guest = await _back(stand, order)
    assert (await shell(guest, "cat /kept")).out == "here\n"
    await _gone(stand, order)


async def restored_guests_have_other_chance(stand: Stand) -> None:
    order = stand.order()
    await stand.guest(order, await stand.driver.start(order))
    await stand.driver.save(order, SaveMode.FULL)
    drawn = set()
    for _ in range(2):
        guest = await stand.guest(order, await stand.driver.restore(order))
        drawn.add((await shell(guest, "head -c 16 /dev/urandom | od -An -tx1")).out)
    assert len(drawn) == 2, "two that were restored from one moment drew the same"
    await _gone(stand, order)


async def connections_are_cut_when_the_address_changes(stand: Stand) -> None:
    order = stand.order()
    guest = await stand.guest(order, await stand.driver.start(order))
    command = asyncio.create_task(guest.run(["/bin/sh", "-c", "echo begun; sleep 60"], user="root", timeout_s=20.0))
    await asyncio.sleep(0.4)
    await stand.driver.save(order, SaveMode.FULL)
    async with asyncio.timeout(10.0):
        outcome = (await asyncio.gather(command, return_exceptions=True))[0]
    assert isinstance(outcome, Exception), "its peer hears at once that it is gone"
    _, guest = await _back(stand, order)
    assert "sleep 60" in (await shell(guest, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).out, "what ran goes on all the same"
    await _gone(stand, order)


ABROAD = """
import errno, socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
peer.sendall(b"here")
said = []
for use in (lambda: peer.recv(64), lambda: peer.sendall(b"more")):
    try:
        said.append(repr(use()))
    except OSError as error:
        said.append(errno.errorcode[error.errno])
open("/abroad", "w").write(" ".join(said))
"""
"""A connection of a guest to somebody outside: it waits for an answer, and says how that ended, and what becomes of more that it would say."""
TOLD_S = 10.0
"""In which whoever is at an end of a cut connection hears of it: their own timers take minutes, or hours."""


async def peers_outside_are_reset_when_the_address_changes(stand: Stand) -> None:
    """Both wait for the other and send nothing: by themselves neither would ever find out."""
    async with stand.world() as world:
        with world.holding() as peer:
            order = stand.order()
            guest = await stand.guest(order, await stand.driver.start(order))
            begin = f"cat >/abroad.py <<'END'\n{ABROAD}END\n(python3 /abroad.py {world.address} {peer.port} >/dev/null 2>&1 &)"
            await shell(guest, begin)
            assert await asyncio.to_thread(peer.heard, TOLD_S) == "here"
            assert await asyncio.to_thread(peer.heard, 0.5) == "nothing"
            await stand.driver.save(order, SaveMode.FULL)
            assert await asyncio.to_thread(peer.heard, TOLD_S) == "reset", "whoever is outside is told, and not left to wait"
            _, guest = await _back(stand, order)
            said = await shell(guest, f"timeout {TOLD_S:.0f} sh -c 'until [ -s /abroad ]; do sleep 0.1; done'; cat /abroad")
            heard, sent = said.out.split()
            assert heard in ("ECONNRESET", "ECONNABORTED", "b''"), "who was inside is not left to wait, either"
            assert sent in ("ECONNRESET", "ECONNABORTED", "EPIPE"), "nor does it talk to nobody"
            await _gone(stand, order)


LOOP = """
import socket, time
server = socket.create_server(("127.0.0.1", 7777))
client = socket.create_connection(("127.0.0.1", 7777))
other, _ = server.accept()
count = 0
while True:
    client.sendall(b"x")
    assert other.recv(1) == b"x"
    count += 1
    open("/loop.new", "w").write(str(count))
    __import__("os").rename("/loop.new", "/loop")
    time.sleep(0.05)
"""
"""One connection of a guest to itself: whoever is cut ends."""


async def connections_within_a_guest_outlast_a_suspend(stand: Stand) -> None:
    order = stand.order()
    guest = await stand.guest(order, await stand.driver.start(order))
    begin = (
        f"cat >/loop.py <<'END'\n{LOOP}END\n(python3 /loop.py >/dev/null 2>/loop.err &)\nuntil [ -e /loop ]; do sleep 0.05; done; cat /loop"
    )
    before = int((await shell(guest, begin)).out)
    await stand.driver.save(order, SaveMode.FULL)
    _, guest = await _back(stand, order)
    async with asyncio.timeout(10.0):
        while (now := int((await shell(guest, "cat /loop")).out)) < before + 20:  # noqa: ASYNC110 - it is asked by a command
            await asyncio.sleep(0.1)
    assert (await shell(guest, "cat /loop.err")).out == "", f"{before}, then {now}"
    await _gone(stand, order)

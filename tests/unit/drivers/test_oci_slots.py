"""The pool hands every slot out once, whoever asks at the same time, and survives a kernel that refuses for a while."""

import asyncio
import os

import pytest

from atoll.drivers.oci import slots as module
from atoll.drivers.oci.config import Names
from atoll.drivers.oci.ruleset import Egress
from atoll.drivers.oci.slots import SlotPool
from atoll.drivers.oci.slotworks import Slot


class PaperWorks:
    """Slots without a machine: descriptors of /dev/null."""

    def __init__(self):
        self.made, self.removed, self.assigned = 0, [], []
        self.refuse = self.looks = 0
        self.torn_down = self.closed = False
        self.forgotten = []

    def set_up(self):
        pass

    def make(self):
        if self.refuse:
            self.refuse -= 1
            raise OSError(12, "no memory for interfaces")
        self.made += 1
        return Slot(self.made, f"at{self.made}", f"10.64.0.{self.made}", os.open("/dev/null", os.O_RDONLY))

    def assign(self, slot, placement_id, egress):
        self.assigned.append((slot.number, placement_id, egress))

    def remove(self, number, address):
        self.removed.append(number)

    def drop_orphans(self):
        pass

    def mend(self):
        self.looks += 1
        return False

    def forget_retired(self):
        self.forgotten = list(self.removed)

    def existing(self):
        return {number: "" for number in range(1, self.made + 1) if number not in self.removed}

    def checks(self):
        return {}

    def tear_down(self):
        self.torn_down = True

    def close(self):
        self.closed = True


@pytest.fixture
async def pool_and_works():
    works = PaperWorks()
    pool = SlotPool(Names("abcdefgh"), subnet=0, size=2, works=lambda: works)
    await pool.open()
    yield pool, works
    await pool.close()
    assert works.closed


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_nobody_gets_anothers_slot(pool_and_works):
    pool, _ = pool_and_works
    slots = await asyncio.gather(*(pool.reserve() for _ in range(20)))
    assert len({slot.number for slot in slots}) == 20
    for slot in slots:
        os.fstat(slot.namespace_fd)
        await pool.give_back(slot.number, slot.address)


async def test_the_pool_fills_itself_again(pool_and_works):
    pool, works = pool_and_works
    await until(lambda: pool.ready_count == 2)
    slot = await pool.reserve()
    await pool.assign(slot, "plc_1", Egress(True))
    assert works.assigned == [(slot.number, "plc_1", Egress(True))]
    await until(lambda: pool.ready_count == 2)


async def test_the_connections_of_a_slot_that_went_are_forgotten_soon(pool_and_works):
    """And not when the next one is wanted: who is at their far ends hears of it then."""
    pool, works = pool_and_works
    slot = await pool.reserve()
    await until(lambda: pool.ready_count == 2)
    await pool.give_back(slot.number, slot.address)
    await until(lambda: works.forgotten == [slot.number])


async def test_whoever_starts_a_guest_has_the_machine_before_the_pool(monkeypatch):
    monkeypatch.setattr(module, "REFILL_DELAY_S", 0.01)
    works = PaperWorks()
    pool = SlotPool(Names("abcdefgh"), subnet=0, size=4, works=lambda: works)
    await pool.open()
    await until(lambda: pool.ready_count == 4)
    slots = [await pool.reserve() for _ in range(6)]
    assert works.made == 6, "who finds none has one made"
    await asyncio.sleep(0.1)
    assert works.made == 6, "nothing is made ahead while they start"
    for slot in slots:
        await pool.settle(slot)
    await until(lambda: pool.ready_count == 4)
    await pool.close()


async def test_a_start_that_lasts_does_not_keep_the_pool_empty(monkeypatch):
    monkeypatch.setattr(module, "REFILL_DELAY_S", 0.01)
    monkeypatch.setattr(module, "REFILL_LATE_S", 0.05)
    works = PaperWorks()
    pool = SlotPool(Names("abcdefgh"), subnet=0, size=2, works=lambda: works)
    await pool.open()
    await until(lambda: pool.ready_count == 2)
    for _ in range(2):
        await pool.reserve()
    await until(lambda: pool.ready_count == 2)
    await pool.close()


async def test_a_settled_slots_descriptor_is_closed_once(pool_and_works):
    pool, works = pool_and_works
    slot = await pool.reserve()
    await pool.settle(slot)
    with pytest.raises(OSError):
        os.fstat(slot.namespace_fd)
    other = os.open("/dev/null", os.O_RDONLY)  # most likely the same number
    await pool.settle(slot)
    await pool.give_back(slot.number, slot.address)
    os.fstat(other)
    os.close(other)
    assert works.removed == [slot.number]


async def test_a_refusing_kernel_is_reported_and_asked_again():
    works = PaperWorks()
    works.refuse = 2
    pool = SlotPool(Names("abcdefgh"), subnet=0, size=1, works=lambda: works)
    await pool.open()
    await until(lambda: works.refuse == 1)
    await asyncio.sleep(0)
    await until(lambda: pool.ready_count == 1)
    assert (await pool.checks())["net.slots"] is None
    await pool.close()


async def test_two_drivers_share_it_and_the_last_one_closes_it():
    works = PaperWorks()
    pool = SlotPool(Names("abcdefgh"), subnet=0, size=1, works=lambda: works)
    await pool.open()
    await pool.open()
    await pool.close()
    assert not works.torn_down
    await until(lambda: pool.ready_count == 1)
    await pool.close()
    assert works.torn_down
    assert works.removed == list(range(1, works.made + 1)), "what was ready is given back"


async def test_an_abandoned_pool_closes_its_descriptors_and_touches_nothing():
    works = PaperWorks()
    pool = SlotPool(Names("abcdefgh"), subnet=0, size=1, works=lambda: works)
    await pool.open()
    slot = await pool.reserve()
    pool.abandon()
    with pytest.raises(OSError):
        os.fstat(slot.namespace_fd)
    assert not works.removed
    assert not works.torn_down


async def test_the_table_is_looked_at_now_and_then(monkeypatch):
    monkeypatch.setattr(module, "GUARD_S", 0.01)
    works = PaperWorks()
    pool = SlotPool(Names("abcdefgh"), subnet=0, size=1, works=lambda: works)
    await pool.open()
    async with asyncio.timeout(5):
        while works.looks < 3:
            await asyncio.sleep(0.01)
    await pool.close()
    seen = works.looks
    await asyncio.sleep(0.05)
    assert works.looks == seen

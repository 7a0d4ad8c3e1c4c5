"""What an agent does with orders for snapshots: each once, the newest wins, and its word is told until it is heard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.agent.journal import Journal, put_record
from atoll.agent.keeping import Keeping
from atoll.agent.ledger import Ledger
from atoll.agent.outbox import Outbox
from atoll.agent.record import Blueprint, Record, order_of
from atoll.base.errors import Code, Refused, Unavailable
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.domain.spec import Isolation, SaveMode
from atoll.drivers.fake.driver import FakeDriver, FakeMachine
from atoll.drivers.port import Image, Mark
from atoll.wire.agent import SnapshotOrder, SnapshotSeen, SnapshotState, SnapshotWish
from tests.builders import seeded, spec

A, S = "plc_" + "a" * 20, "snp_" + "s" * 20
KEEP = SnapshotOrder(id=S, wish=SnapshotWish.KEEP, placement_id=A)
DROP = SnapshotOrder(id=S, wish=SnapshotWish.DROP, placement_id=A)


class Bench:
    """One agent's keeping on a fake machine; `told` is what control has heard, which is away while `away`."""

    def __init__(self, path: Path) -> None:
        self.spec = spec(isolation=Isolation.GVISOR)
        self.machine = FakeMachine(images=[Image(self.spec.image, self.spec.image_name)])
        self.driver = FakeDriver(Mark("ins_x", "hst_x"), machine=self.machine)
        self.journal = Journal(path / "journal", inline=True)
        self.told: list[SnapshotSeen] = []
        self.away = 0
        self.ledger = Ledger(self.journal, Outbox(), boot_id="boot")
        self.keeping = self.make()

    def make(self) -> Keeping:
        return Keeping(self.ledger, {Isolation.GVISOR: self.driver}, seeded(1), self.tell, parallel=2)

    async def tell(self, seen: SnapshotSeen) -> None:
        if self.away > 0:
            self.away -= 1
            raise Unavailable(Code.CONTROL_UNAVAILABLE, "away")
        self.told.append(seen)

    async def ready(self) -> None:
        record = Record(A, "i" + "a" * 20, "tea", 1, Kind.ENSURE_RUNNING, 1, "c", "d", "boot", Blueprint(self.spec, "n", "k", "h"))
        record = replace(record, observed=Observed.RUNNING, ready=True, applied_revision=1)
        await self.journal.write(put_record(record))
        self.ledger = Ledger(self.journal, Outbox(), boot_id="boot")
        self.keeping = self.make()
        await self.driver.start(order_of(record))

    async def until_told(self, count: int) -> SnapshotSeen:
        async with asyncio.timeout(5):
            while len(self.told) < count or self.keeping.under_way():
                await asyncio.sleep(0.005)
        return self.told[-1]


@contextlib.asynccontextmanager
async def at_work(bench: Bench) -> AsyncIterator[Keeping]:
    task = asyncio.create_task(bench.keeping.run())
    await asyncio.sleep(0)
    try:
        yield bench.keeping
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_an_order_is_carried_out_once_and_told_until_it_is_heard(bench: Bench) -> None:
    await bench.ready()
    bench.away = 3
    async with at_work(bench) as keeping:
        assert keeping.take([KEEP])
        assert not keeping.take([KEEP]), "said again, it is under way"
        assert keeping.under_way() == {S: SnapshotWish.KEEP}
        seen = await bench.until_told(1)
        assert (seen.state, seen.save_mode, seen.size_bytes) == (SnapshotState.KEPT, SaveMode.FULL, 1 << 20)
        assert list(bench.machine.kept) == [S]
        assert keeping.take([KEEP]), "what was heard is forgotten, and can be asked again"
        assert (await bench.until_told(2)) == seen


async def test_a_drop_waits_for_the_keeping_and_then_takes_it_away(bench: Bench) -> None:
    await bench.ready()
    bench.driver.weather.delay_s["snapshot"] = 0.2
    async with at_work(bench) as keeping:
        keeping.take([KEEP])
        await asyncio.sleep(0.02)
        keeping.take([DROP])
        assert keeping.under_way() == {S: SnapshotWish.DROP}
        seen = await bench.until_told(1)
        assert [one.state for one in bench.told] == [SnapshotState.ABSENT], "nobody wants to know of the other any more"
        assert seen.id == S
        assert not bench.machine.kept


async def test_a_drop_is_tried_until_it_is_seen_gone(bench: Bench) -> None:
    bench.driver.weather.fail["drop"] = [Refused(Code.CLEANUP_FAILED, "no"), OSError(5, "no")]
    async with at_work(bench) as keeping:
        keeping.take([DROP])
        assert (await bench.until_told(1)).state is SnapshotState.ABSENT


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"observed": Observed.FROZEN, "ready": False}, Code.ILLEGAL_STATE),
        ({"ready": False}, Code.ILLEGAL_STATE),
        ({"desired": Kind.ENSURE_ABSENT, "desired_revision": 2}, Code.PLACEMENT_LOST),
        ({"observed": Observed.ABSENT, "ready": False}, Code.PLACEMENT_LOST),
    ],
)
async def test_what_is_not_running_is_not_kept(bench: Bench, change: dict[str, object], code: Code) -> None:
    await bench.ready()
    await bench.ledger.change(A, lambda record: replace(record, **change))  # type: ignore[arg-type]
    async with at_work(bench) as keeping:
        keeping.take([KEEP])
        seen = await bench.until_told(1)
        assert (seen.state, seen.code) == (SnapshotState.FAILED, code)
        assert not bench.machine.kept


@pytest.mark.parametrize("failure", [Refused(Code.HOST_DISK_FULL, "full"), OSError(28, "full")], ids=str)
async def test_a_failure_is_told_with_its_code_and_the_guest_goes_on(bench: Bench, failure: BaseException) -> None:
    await bench.ready()
    bench.driver.weather.fail["snapshot"] = [failure]
    async with at_work(bench) as keeping:
        keeping.take([KEEP])
        seen = await bench.until_told(1)
        assert (seen.state, seen.code) == (SnapshotState.FAILED, Code.HOST_DISK_FULL)
        assert bench.machine.placements[A].power == "running"


async def test_a_stranger_is_not_kept_and_a_fence_lets_go_of_all(bench: Bench) -> None:
    async with at_work(bench) as keeping:
        keeping.take([KEEP])
        assert (await bench.until_told(1)).code == Code.PLACEMENT_LOST
    await bench.ready()
    async with at_work(bench) as keeping:
        keeping.take([KEEP])
        await bench.until_told(2)
        await keeping.drop_all()
        assert not bench.machine.kept


async def test_the_next_run_is_told_again_what_the_last_one_did(bench: Bench) -> None:
    await bench.ready()
    bench.away = 10**6
    async with at_work(bench) as keeping:
        keeping.take([KEEP])
        async with asyncio.timeout(5):
            while not bench.machine.kept:
                await asyncio.sleep(0.005)
    bench.away = 0
    bench.keeping = bench.make()
    async with at_work(bench) as keeping:
        assert keeping.under_way() == {}
        keeping.take([KEEP])
        assert (await bench.until_told(1)).state is SnapshotState.KEPT


async def test_a_run_tells_what_is_here_until_control_has_heard_it(bench: Bench) -> None:
    await bench.ready()
    async with at_work(bench) as keeping:
        keeping.take([KEEP])
        await bench.until_told(1)
    bench.keeping = bench.make()
    async with at_work(bench) as keeping:
        async with asyncio.timeout(5):
            while not keeping.untold():
                await asyncio.sleep(0.005)
        assert keeping.untold() == [S]
        keeping.take([DROP])
        assert keeping.untold() == [], "control has ordered it away"
        await bench.until_told(2)
        keeping.told([S])
        assert keeping.untold() == []

"""Origins: the snapshot that a guest begins from, had here before it begins; and when one that need not be had is done without.

Theory of operation. What is in the artifact store, and not here, is fetched first. Of a head start no more is expected than that it makes a
start quicker: where it cannot be had, whatever the reason, or not soon, the guest boots in its place, and why is told with it. What was saved
on hosts of another kind is not even asked for. A fetch that takes too long goes on by itself, so that whoever is started here next finds it; meanwhile, and for a while after one that failed, nobody waits for it
again. So a store that is slow, or away, costs one start a little, and the others nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Final

from atoll.agent.arrivals import Arrivals
from atoll.agent.resting import explain
from atoll.base.clock import Clock
from atoll.base.errors import Code, Refused
from atoll.domain.moment import HEAD_START_WAIT_S
from atoll.domain.spec import Origin
from atoll.drivers.port import Driver, Order
from atoll.telemetry import events
from atoll.telemetry.log import get_logger

log = get_logger()

AGAIN_S: Final = 30.0
"""How long one that could not be fetched is not asked for again."""
_NO_HEAD_START: Final = frozenset({Code.SNAPSHOT_UNAVAILABLE, Code.START_FAILED, Code.RESUME_FAILED, Code.NOT_SUPPORTED})
"""As what a driver refuses to begin a guest from a moment, and may well boot it."""
_BY_NAME: Final = frozenset({Code.MOMENT_UNSUITABLE, Code.MOMENT_CORRUPT, Code.MOMENT_UNAVAILABLE, Code.HOST_DISK_FULL})
"""Whose cause is another than that this machine does not have the snapshot, and somebody else's to mend."""


@dataclass(frozen=True, slots=True)
class Booted:
    """Why a guest was booted in place of its head start."""

    code: Code
    detail: str

    @classmethod
    def by(cls, error: Exception) -> Booted:
        code, detail = explain(error, otherwise=Code.INTERNAL)
        return cls(code, detail) if code in _BY_NAME else cls(Code.SNAPSHOT_UNAVAILABLE, f"{code}: {detail}")


@dataclass(slots=True)
class Origins:
    """Of one agent run."""

    clock: Clock
    wait_s: float = HEAD_START_WAIT_S
    """How long a head start is waited for, from when its fetch began."""
    arrivals: Arrivals = field(default_factory=lambda: Arrivals(None))
    _failed: dict[str, tuple[float, Booted]] = field(default_factory=dict)
    """By snapshot: since when, and why, a head start could not be fetched."""
    _fetches: dict[str, tuple[float, asyncio.Task[None]]] = field(default_factory=dict)
    """By snapshot: since when one is fetched."""

    async def at_hand(self, order: Order, driver: Driver) -> tuple[Order, Booted | None]:
        """The order, once what it begins from is here; or to boot, and why. *Errors*: those of Arrivals.snapshot where it may not boot."""
        origin = order.spec.origin
        if origin is None:
            return order, None
        if origin.or_boot:
            why = await self._ahead(order, driver, origin)
            return (order, None) if why is None else _booting(order, why)
        if origin.moment is not None:
            await self.arrivals.snapshot(driver, order, origin.moment, origin.snapshot_id)
        return order, None

    async def _ahead(self, order: Order, driver: Driver, origin: Origin) -> Booted | None:
        """Why a head start is not here; None: it is, or its driver says why not."""
        if not (origin.kind or origin.moment) or origin.snapshot_id in await driver.snapshots():
            return None
        kinds = await driver.kinds()
        if origin.kind and origin.kind not in kinds:
            return Booted(
                Code.MOMENT_UNSUITABLE, f"it was saved by {origin.kind}, and this host goes on from {', '.join(kinds) or 'nothing'}"
            )
        return None if origin.moment is None else await self._fetched(order, driver, origin.moment, origin.snapshot_id)

    async def _fetched(self, order: Order, driver: Driver, moment: str, snapshot_id: str) -> Booted | None:
        """Why a head start cannot be had from the store, or not soon; None: it is here."""
        now = self.clock.boot()
        self._failed = {name: one for name, one in self._failed.items() if now < one[0] + AGAIN_S}
        if (failed := self._failed.get(snapshot_id)) is not None:
            return replace(failed[1], detail=f"{failed[1].detail} ({now - failed[0]:.0f} s ago)")
        if snapshot_id not in self._fetches:
            self._fetches[snapshot_id] = now, asyncio.ensure_future(self._fetch(order, driver, moment, snapshot_id))
        began, fetch = self._fetches[snapshot_id]
        await asyncio.wait({fetch}, timeout=max(0.0, began + self.wait_s - now))
        if not fetch.done():
            late = f"it is not here yet: {self.clock.boot() - began:.1f} s after its fetch began that goes on, for those that come later"
            return Booted(Code.SNAPSHOT_UNAVAILABLE, late)
        failed = self._failed.get(snapshot_id)
        return None if failed is None else failed[1]

    async def _fetch(self, order: Order, driver: Driver, moment: str, snapshot_id: str) -> None:
        """Never raises: what came of it is noted, whoever waits."""
        try:
            await self.arrivals.snapshot(driver, order, moment, snapshot_id)
            self._failed.pop(snapshot_id, None)
        except asyncio.CancelledError:
            self._failed[snapshot_id] = self.clock.boot(), Booted(Code.SNAPSHOT_UNAVAILABLE, "its fetch was broken off")
            raise
        except Exception as error:  # noqa: BLE001 - a task boundary: whatever it is, the guest boots
            why = Booted.by(error)
            self._failed[snapshot_id] = self.clock.boot(), why
            log.warning(events.HEAD_START_FAILED, snapshot_id=snapshot_id, code=why.code, message=why.detail)
        finally:
            del self._fetches[snapshot_id]

    async def close(self) -> None:
        """End what is under way; the next run begins it anew."""
        tasks = [task for _, task in self._fetches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.arrivals.close()


def instead(order: Order, error: Refused) -> tuple[Order, Booted]:
    """The order to boot, and why, where the driver could not begin it with its head start. *Errors*: `error`, where that is no reason to."""
    origin = order.spec.origin
    if origin is None or not origin.or_boot or error.code not in _NO_HEAD_START:
        raise error
    return _booting(order, Booted.by(error))


def _booting(order: Order, why: Booted) -> tuple[Order, Booted]:
    """The order without its head start, which is told and logged."""
    origin = order.spec.origin
    assert origin is not None
    log.warning(
        events.HEAD_START_FAILED,
        placement_id=order.placement_id,
        snapshot_id=origin.snapshot_id,
        code=why.code,
        message=why.detail,
    )
    return replace(order, spec=replace(order.spec, origin=None)), why

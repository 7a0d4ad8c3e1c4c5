"""How the `oci` driver ends what there is of a placement; mixed into the driver.

Theory of operation. A guest is over when its processes are: memory and CPU are free then, and nothing of it goes on. What they leave (the
runtime's files, control groups, the slot) keeps nobody waiting where the guest was saved: it is cleared away behind the answer, under the
placement's lock, and whoever comes first does it, or finds it done. The slot goes by itself, as the kernel takes its time with an interface: who
goes on from what was saved gets another slot, and needs this one neither there nor gone. Only what this run has seen to its end counts as
cleared; of anything else the machine is asked. The guest's memory itself, up to a bound, is held over its end and freed right behind it (adr/0047):
a process that frees it as it ends is waited for as long as that takes.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from atoll.base.errors import Code, Refused
from atoll.drivers.oci import ending, look
from atoll.drivers.oci.abiding import Abiding
from atoll.drivers.oci.slots import SlotPool
from atoll.drivers.oci.slotworks import Slot
from atoll.drivers.oci.watching import Watches
from atoll.drivers.port import Order
from atoll.hostops.memfiles import MemoryFiles

FREED_BEHIND_MIB_MAX: Final = 256
"""Of guests that were saved and have ended, all together: about 50 ms of the kernel's work. A guest with more frees it as it ends."""


class Over(Enum):
    """What this run knows of a placement's end."""

    UNKNOWN = auto()
    """Nothing: a look says what there is."""
    KILLED = auto()
    """Its processes have ended; what they leave may be there."""
    PARTED = auto()
    """As KILLED, and its slot goes by itself."""
    CLEARED = auto()
    """Nothing but its directory is there, and perhaps a slot that is going."""


@dataclass(slots=True)
class Live:
    """What is known of a placement in this run only."""

    slot: Slot | None = None
    prepared: Order | None = None
    """The order that is prepared and has not been started since."""
    ending: bool = False
    """stop or remove has been asked: its end is no news."""
    reason: str | None = None
    over: Over = Over.UNKNOWN


class Clearing(Abiding):
    """The ends of placements."""

    _pool: SlotPool
    _watches: Watches
    _live: dict[str, Live]
    _step: Callable[[str], None]
    _clearing: set[asyncio.Task[None]]
    _memory: MemoryFiles

    # What the driver has.

    @abstractmethod
    def _lock(self, placement_id: str) -> AbstractAsyncContextManager[None]: ...

    @abstractmethod
    async def _look(self, placement_id: str) -> look.Traces: ...

    @abstractmethod
    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]: ...

    @abstractmethod
    def _some_time(self, work: Callable[[], None]) -> None:
        """Have something done by a thread as soon as there is one; from any thread. The driver's end waits for it."""

    async def _end(self, placement_id: str, *, strays: bool) -> None:
        """Processes, runtime files, control groups and slot of a placement go; directory, disk and console stay.

        *Errors*: Refused(CLEANUP_FAILED) naming what is left, after every step was tried.
        """
        await self._outlast(placement_id)
        found = await self._look(placement_id)
        self._watches.unwatch(placement_id)
        # The kernel takes its time to let an interface go: beside the rest, not after it.
        failed = await asyncio.gather(
            self._each(lambda: self._end_slots(placement_id, found)),
            self._each(
                self._step_of("killed", lambda: ending.end_processes(self._view, placement_id, strays=strays)),
                self._step_of("runtime state removed", lambda: ending.end_runtime(self._view, placement_id)),
                self._step_of("groups removed", lambda: ending.end_groups(self._view, placement_id)),
            ),
        )
        if failures := [failure for failures in failed for failure in failures]:
            raise Refused(Code.CLEANUP_FAILED, f"{placement_id}: {'; '.join(failures)}")
        if (live := self._live.get(placement_id)) is not None:
            live.over = Over.CLEARED

    def _step_of(self, name: str, work: Callable[[], None]) -> Callable[[], Awaitable[None]]:
        async def take() -> None:
            await self._blocking(work)
            self._step(name)

        return take

    async def _each(self, *steps: Callable[[], Awaitable[None]]) -> list[str]:
        """Take every step, one after the other, whether or not an earlier one failed; say what failed."""
        failures: list[str] = []
        for step in steps:
            try:
                await step()
            except (OSError, Refused) as error:
                failures.append(str(error))
        return failures

    async def _end_slots(self, placement_id: str, found: look.Traces) -> None:
        live = self._live.get(placement_id)
        doomed = {number: self._pool.address(number) for number in found.slots}
        if found.record is not None and found.record.slot >= 0:
            # By the record alone it may be somebody else's by now: slot numbers come round again.
            owner = (await self._blocking(self._pool.existing)).get(found.record.slot)
            if owner in (None, placement_id):
                doomed[found.record.slot] = found.record.address
        if live is not None and live.slot is not None:
            doomed[live.slot.number] = live.slot.address
            live.slot = live.prepared = None
        for number, address in doomed.items():
            await self._pool.give_back(number, address)
        self._step("slot removed")

    async def _end_as_told(self, placement_id: str) -> None:
        """End what there is of a guest; its files stay, and its end is no news. *Errors*: as `_end`."""
        live = self._live.setdefault(placement_id, Live())
        live.ending = True
        if live.over is Over.PARTED:
            await self._end_remains(placement_id, live)
        elif live.over is not Over.CLEARED:
            await self._end(placement_id, strays=self._may_have_strays(placement_id))

    async def _end_remains(self, placement_id: str, live: Live) -> None:
        """Runtime files and control groups of a guest that has ended go. *Errors*: as `_end`."""
        await self._outlast(placement_id)
        failures = await self._each(
            self._step_of("runtime state removed", lambda: ending.end_runtime(self._view, placement_id)),
            self._step_of("groups removed", lambda: ending.end_groups(self._view, placement_id)),
        )
        if failures:
            raise Refused(Code.CLEANUP_FAILED, f"{placement_id}: {'; '.join(failures)}")
        live.over = Over.CLEARED

    def _may_have_strays(self, placement_id: str) -> bool:
        """Whether a runtime of an earlier run may still be at it, that is in no group of its own yet."""
        live = self._live.get(placement_id)
        return placement_id not in self._watches and (live is None or live.over is Over.UNKNOWN)

    async def _end_guest(self, placement_id: str, guest: int) -> None:
        """As `_end_as_told`, and what its processes leave is cleared away behind it. *Errors*: Refused(CLEANUP_FAILED): some do not end."""
        live = self._live.setdefault(placement_id, Live())
        live.ending = True
        strays = self._may_have_strays(placement_id)
        self._watches.unwatch(placement_id)
        await self._blocking(lambda: self._kill(placement_id, guest, strays=strays))
        slot, live.slot, live.prepared = live.slot, None, None
        live.over = Over.KILLED if slot is None else Over.PARTED
        self._step("killed")
        if slot is not None:
            self._behind(self._let_slot_go(live, slot), f"slot of {placement_id}")
        self._behind(self._clear_away(placement_id), f"clear away {placement_id}")

    def _kill(self, placement_id: str, guest: int, *, strays: bool) -> None:
        """End its processes; the memory that the guest had to itself is freed behind that. Blocking. *Errors*: as `_end_guest`."""
        held = self._memory.hold(guest)
        try:
            ending.end_processes(self._view, placement_id, strays=strays)
        finally:
            self._some_time(lambda: self._memory.let_go(held))

    def _behind(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Something that nobody waits for but whoever closes the driver."""
        task = self._spawn(work, name)
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)

    async def _let_slot_go(self, live: Live, slot: Slot) -> None:
        """One that cannot be removed is met again, by its placement's name, by whoever ends that."""
        try:
            await self._pool.give_back(slot.number, slot.address)
        except (OSError, Refused):
            if live.over is not Over.UNKNOWN:
                live.over = Over.KILLED
        else:
            self._step("slot removed")

    async def _clear_away(self, placement_id: str) -> None:
        """Unless somebody has come first. What cannot be cleared away is met again by whoever wants the placement next."""
        async with self._lock(placement_id):
            live = self._live.get(placement_id)
            if live is not None and live.over in (Over.KILLED, Over.PARTED):
                with contextlib.suppress(Refused, OSError):
                    await self._end_as_told(placement_id)

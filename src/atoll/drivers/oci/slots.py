"""Network slots, made ahead, for all drivers of an instance.

Theory of operation. A slot is used once: it is made in the background, reserved by one placement, and ends with it. Its namespace is
held by a file descriptor until the sandbox's processes live in it, so a killed agent leaves no namespace. The interface carries the
placement's id as its alias: that is how the machine itself says whose it is. What happens on the machine is in `slotworks`.
Making and naming happen in one thread, removing in another: the kernel takes 10-30 ms to let an interface go, and nobody who wants a
slot waits for that. `open` and `close` count their callers.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from atoll.base.errors import Refused
from atoll.drivers.oci.config import Names
from atoll.drivers.oci.ruleset import Egress
from atoll.drivers.oci.slotworks import Slot, SlotWorks, gateway_of
from atoll.telemetry import events
from atoll.telemetry.log import get_logger

T = TypeVar("T")

log = get_logger()

LATE_LOOKS_S: Final = (0.5, 2.0, 10.0)
GUARD_S: Final = 2.0
REFILL_DELAY_S: Final = 0.25
REFILL_LATE_S: Final = 3.0
"""So long the pool is not filled while guests are being started; then it is, a slot at a time."""
REFILL_PAUSE_S: Final = 0.1
REFILL_PAUSE_S_MAX: Final = 10.0


class _Open:
    """What an open pool has: works, two threads, its tasks."""

    def __init__(self, works: SlotWorks) -> None:
        self.works = works
        self.making = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slots")
        self.ending = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slots-end")
        self.tasks: list[asyncio.Task[None]] = []

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    def shut_down(self) -> None:
        """Wait for what is under way, drop what waits, close handles."""
        for executor in (self.making, self.ending):
            executor.shutdown(wait=True, cancel_futures=True)
        self.works.close()


class SlotPool:
    """Slots of one instance."""

    def __init__(
        self,
        names: Names,
        *,
        subnet: int,
        size: int,
        closed: tuple[str, ...] = (),
        mtu: int = 1500,
        works: Callable[[], SlotWorks] | None = None,
    ) -> None:
        """`works` makes what works on the machine, in place of the real one."""
        self.gateway_address = gateway_of(subnet)
        self.table = names.table
        self._make_works = works or (lambda: SlotWorks(names, subnet=subnet, closed=closed, mtu=mtu))
        self._size = size
        self._ready: collections.deque[Slot] = collections.deque()
        self._held: dict[int, Slot] = {}
        """Slots whose namespace descriptor is open, ready or reserved."""
        self._users = 0
        self._open: _Open | None = None
        self._wanted = asyncio.Event()
        self._refill_error: str | None = None
        self._starting: set[int] = set()
        """Slots whose guests are being started."""
        self._calm = asyncio.Event()
        """Set while there are none."""
        self._calm.set()

    @property
    def ready_count(self) -> int:
        """Slots made and not reserved."""
        return len(self._ready)

    # -- opening and closing

    async def open(self) -> None:
        """Have the gateway, the table and forwarding; delete elements of slots that no longer exist; start filling."""
        self._users += 1
        if self._users > 1:
            return
        self._open = state = _Open(self._make_works())
        try:
            await self._make(state.works.set_up)
        except BaseException:
            self._users, self._open = 0, None
            state.shut_down()
            raise
        self._wanted.set()
        state.tasks = [
            asyncio.create_task(self._fill(), name="slot pool: fill"),
            asyncio.create_task(self._late_orphans(), name="slot pool: orphans"),
            asyncio.create_task(self._guard(), name="slot pool: guard"),
        ]

    async def close(self) -> None:
        """Give back the ready slots, and the table and the gateway when no slot is in use. Sandboxes that run keep both."""
        self._users -= 1
        if self._users > 0 or self._open is None:
            return
        state = self._open
        state.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)
        await self._end(lambda: None)  # what is under way ends first
        await self._make(self._give_all_back)
        self._open = None
        state.shut_down()

    def _give_all_back(self) -> None:
        works = self._need().works
        while self._ready:
            slot = self._ready.popleft()
            self._close_fd(slot)
            works.remove(slot.number, slot.address)
        for slot in list(self._held.values()):
            self._close_fd(slot)
        works.tear_down()

    def abandon(self) -> None:
        """Let go of everything without touching the machine, as the end of this process would: descriptors close, threads end.

        For tests of what the next run finds.
        """
        if (state := self._open) is not None:
            state.cancel()
            self._open = None
            state.shut_down()
        for slot in list(self._held.values()):
            self._close_fd(slot)

    # -- for drivers

    async def reserve(self) -> Slot:
        """A slot that nobody else gets; made now when none is ready. It is closed and unnamed until `assign`.

        *Errors*: Refused(INSUFFICIENT_SLOTS) when all numbers are used, OSError of the kernel.
        """
        while not self._ready:
            # Somebody else may take what was made before this goes on.
            await self._make(self._make_ready)
        slot = self._ready.popleft()
        self._starting.add(slot.number)
        self._calm.clear()
        self._wanted.set()
        return slot

    async def assign(self, slot: Slot, placement_id: str, egress: Egress) -> None:
        """Write the placement's name on a reserved slot and open its egress as told."""
        await self._make(lambda: self._need().works.assign(slot, placement_id, egress))

    async def settle(self, slot: Slot) -> None:
        """The sandbox's own processes hold the namespace now: let go of it."""
        self._started(slot.number)
        self._close_fd(slot)

    async def give_back(self, number: int, address: str) -> None:
        """Remove a slot with its elements and connections. *Idempotency*: a slot that is gone is fine.

        *Errors*: OSError when the interface or the elements cannot be removed.
        """
        self._started(number)
        if (slot := self._held.get(number)) is not None:
            self._close_fd(slot)
        await self._end(lambda: self._need().works.remove(number, address))
        # Its connections are forgotten, and their far ends told, in a moment.
        self._wanted.set()

    def address(self, number: int) -> str:
        """The address that belongs to a slot number."""
        return self._need().works.address(number)

    def existing(self) -> dict[int, str]:
        """Slots that exist on the machine now: number → placement id, or "" while nobody has it. Blocking, for any thread."""
        return self._need().works.existing()

    async def checks(self) -> dict[str, str | None]:
        """Self-checks by id: what is wrong, or None."""
        found = await self._make(self._need().works.checks)
        return {**found, "net.slots": f"slots cannot be made: {self._refill_error}" if self._refill_error else None}

    # -- behind

    async def _fill(self) -> None:
        pause_s = REFILL_PAUSE_S
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if self._starting:
                # Whoever took one is starting a guest now and needs the machine more than the pool does.
                await asyncio.sleep(REFILL_DELAY_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REFILL_LATE_S):
                        await self._calm.wait()
            try:
                while len(self._ready) < self._size:
                    # One at a time: whoever wants a slot now waits for one step, not for the whole batch.
                    await self._make(self._make_ready)
                await self._end(self._need().works.forget_retired)
                pause_s, self._refill_error = REFILL_PAUSE_S, None
            except (OSError, Refused) as error:
                self._refill_error = str(error)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, REFILL_PAUSE_S_MAX)
                self._wanted.set()

    def _started(self, number: int) -> None:
        self._starting.discard(number)
        if not self._starting:
            self._calm.set()

    def _make_ready(self) -> None:
        """Keeps the slot in the same step, so that a `close` in between finds it."""
        slot = self._need().works.make()
        self._held[slot.number] = slot
        self._ready.append(slot)

    async def _late_orphans(self) -> None:
        """Interfaces of a killed run may go only after the table was written; their elements go then."""
        for pause_s in LATE_LOOKS_S:
            await asyncio.sleep(pause_s)
            with contextlib.suppress(OSError):
                await self._end(self._need().works.drop_orphans)

    async def _guard(self) -> None:
        """Without our table guests would reach whatever this machine does: look now and then that it is there."""
        while True:
            await asyncio.sleep(GUARD_S)
            with contextlib.suppress(OSError):
                if await self._end(self._need().works.mend):
                    log.error(events.FIREWALL_MENDED, what=self.table)

    def _close_fd(self, slot: Slot) -> None:
        if self._held.pop(slot.number, None) is not None:
            os.close(slot.namespace_fd)

    def _need(self) -> _Open:
        if self._open is None:
            raise RuntimeError("the slot pool is closed")
        return self._open

    async def _make(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._need().making, work)

    async def _end(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._need().ending, work)

"""Fate: does what the scenario says goes wrong, each fault in a task of its own, and heals it all in the end."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from atoll.base.errors import AtollError, Code
from atoll.domain.host import AdminEvent
from atoll.testing.sim import verdict
from atoll.testing.sim.moments import MomentWeather
from atoll.testing.sim.network import Weather
from atoll.testing.sim.places import Host, Seat
from atoll.testing.sim.process import Process
from atoll.testing.sim.scenario import CONTROL, MOMENTS, REPLICAS, SLOW_S_MAX, STEP_S_MAX, STEPS_MAX, STORE, Fault, Kind
from atoll.testing.sim.store import StoreWeather
from atoll.testing.sim.world import World

_STEP_SEEN_S: Final = 45.0
_TRAP_S: Final = 30.0
"""A process that takes no steps ends after this time all the same."""


class Fate:
    """Of one world."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def run(self) -> None:
        """Until every fault is over, or until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for fault in self._world.scenario.faults:
                group.create_task(self._one(fault))

    async def _one(self, fault: Fault) -> None:
        world = self._world
        await asyncio.sleep(max(0.0, fault.at_s - world.loop.time()))
        await self._happen(fault)

    async def _happen(self, fault: Fault) -> bool:
        """Whether there was anything that could go wrong."""
        world = self._world
        if fault.kind in REPLICAS and not world.shared:
            return False
        if fault.kind in STORE:
            return await self._store(fault)
        if fault.kind in MOMENTS:
            return await self._moments(fault)
        if fault.kind is Kind.CLOCK_STEP:
            return await self._step(fault)
        if fault.kind is Kind.RESTORE:
            return await self._restore(fault)
        if fault.kind in CONTROL:
            seat = world.seats[fault.target % len(world.seats)]
            return await _CONTROL[fault.kind](self, fault, seat)
        host = world.hosts[fault.target % len(world.hosts)] if world.hosts else None
        return host is not None and await _HOST[fault.kind](self, fault, host)

    def _say(self, fault: Fault, of: str) -> None:
        """It happens: count it, and tell."""
        self._world.injected[fault.kind.value] += 1
        extra = f" {fault.word}" if fault.word else ""
        self._world.note(f"! {fault.kind}{extra} on {of} for {fault.for_s:.2f} s, share {fault.share:.2f}")

    # The store, and clocks.

    async def _store(self, fault: Fault) -> bool:
        weather = self._world.database.weather
        self._say(fault, "the store")
        name, value = _STORE[fault.kind](fault)
        setattr(weather, name, value)
        if weather.down:
            for seat in self._world.seats:
                seat.ear.broken.set()
        await asyncio.sleep(fault.for_s)
        setattr(weather, name, getattr(StoreWeather(), name))
        return True

    async def _moments(self, fault: Fault) -> bool:
        shelf = self._world.shelf
        if fault.kind is Kind.MOMENT_SPOILT:
            there = list(shelf.manifests)
            if not there:
                return False
            digest = there[min(int(fault.share * len(there)), len(there) - 1)]
            self._say(fault, f"the artifact store: {digest}")
            shelf.spoilt.add(digest)
            self._world.history.spoilt = True
            return True
        self._say(fault, "the artifact store")
        name, value = _MOMENTS[fault.kind](fault)
        setattr(shelf.weather, name, value)
        await asyncio.sleep(fault.for_s)
        setattr(shelf.weather, name, getattr(MomentWeather(), name))
        return True

    async def _restore(self, fault: Fault) -> bool:
        world = self._world
        backup, made_at = world.database.back_up(), world.loop.time()
        world.note("a backup of the store is made")
        await asyncio.sleep(fault.for_s)
        self._say(fault, "the store")
        self._take_back(backup, made_at=made_at)
        return True

    def _take_back(self, backup: bytes, *, made_at: float) -> None:
        """The store is what it was at `made_at`: an operator has ended every control process, and restored it. *Units*: true seconds.

        One that stands still was overlooked, and goes on later as if nothing had happened; but its connections are broken.
        """
        world = self._world
        for seat in world.seats:
            if seat.process is not None and (seat.process.frozen is None or not world.shared):
                seat.process.end()
            seat.ear.broken.set()
        now = world.database.wall() if world.shared else world.seats[0].clock.now()
        world.database.take_back(backup, now=now, chance=world.dice(f"life after {world.loop.time()}").randbytes)
        world.ledger.taken_back(world.database.rows())
        with world.watched():
            verdict.taken_back(world, made_at=made_at)

    async def _step(self, fault: Fault) -> bool:
        world = self._world
        machines: list[Seat | Host] = [*world.seats, *world.hosts]
        chosen = fault.target % len(machines)
        step_s = round((fault.share - 0.5) * 2 * STEP_S_MAX, 3)
        world.injected[fault.kind.value] += 1
        world.note(f"! clock {chosen} is set by {step_s} s")
        machines[chosen].clock.step(step_s)
        seats = world.seats[chosen : chosen + 1]
        await self._see_step(seats)
        await asyncio.sleep(fault.for_s)
        machines[chosen].clock.set_right()
        await self._see_step(seats)
        return True

    async def _see_step(self, seats: Sequence[Seat]) -> None:
        """Control does as the program: it ends in order, and the next process begins with the new time."""
        for seat in seats:
            await asyncio.sleep(_STEP_SEEN_S)
            seat.clock.unseen = False
            if seat.process is not None:
                seat.process.end()

    # Control.

    async def _control_crash(self, fault: Fault, seat: Seat) -> bool:
        process = seat.process
        if process is None or not process.alive:
            return False
        seat.pause_s = min(fault.for_s, 60.0) + 0.1
        await self._trapped(fault, process)
        return True

    async def _control_freeze(self, fault: Fault, seat: Seat) -> bool:
        return await self._freeze(fault, seat.process)

    async def _hints_lost(self, fault: Fault, seat: Seat) -> bool:
        self._say(fault, f"control {seat.number}")
        seat.ear.cut_off()
        await asyncio.sleep(fault.for_s)
        seat.ear.cut = False
        return True

    async def _trapped(self, fault: Fault, process: Process) -> None:
        steps = 1 + int(fault.share * STEPS_MAX)
        self._world.injected[fault.kind.value] += 1
        self._world.note(f"! {process.name} is to end after {steps} steps")
        process.trap(steps)
        begun = self._world.loop.time()
        while process.alive and self._world.loop.time() - begun < _TRAP_S:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.5)
        process.end()

    async def _freeze(self, fault: Fault, process: Process | None) -> bool:
        if process is None or not process.alive:
            return False
        self._say(fault, process.name)
        process.freeze()
        await asyncio.sleep(fault.for_s)
        process.thaw()
        return True

    # Agents and machines.

    async def _agent_crash(self, fault: Fault, host: Host) -> bool:
        process = host.process
        if process is None or not process.alive or host.off:
            return False
        host.pause_s = fault.for_s + 0.1
        await self._trapped(fault, process)
        await process.gone()
        if fault.word == "disk":
            self._world.history.lost_disk.add(host.name)
            host.forgot_at = host.clock.boot()
            self._world.note(f"! {host.name} has lost its database")
            for path in host.directory.glob("agent.db*"):
                path.unlink()
        return True

    async def _agent_freeze(self, fault: Fault, host: Host) -> bool:
        return await self._freeze(fault, host.process)

    async def _switch_off(self, host: Host) -> None:
        host.off = True
        for placement_id in host.things.living():
            self._world.history.ended.add(placement_id)
            host.things.end(placement_id, "power loss")
        if host.process is not None:
            host.process.end()
            await host.process.gone()

    def _switch_on(self, host: Host) -> None:
        host.boots += 1
        host.clock.reboot()
        host.forgot_at = min(host.forgot_at, 0.0)
        host.line.answered_at = host.clock.boot()
        host.off = False
        host.woken.set()

    async def _reboot(self, fault: Fault, host: Host) -> bool:
        if host.off:
            return False
        self._say(fault, host.name)
        await self._switch_off(host)
        if fault.word == "wiped":
            host.things.placements.clear()
            host.things.kept.clear()
        await asyncio.sleep(min(fault.for_s, 60.0))
        self._switch_on(host)
        return True

    async def _vanish(self, fault: Fault, host: Host) -> bool:
        if host.off or host.fenced:
            return False
        self._say(fault, host.name)
        if fault.word == "fence":
            # The worst case of a fence: it lives, and hears nothing.
            host.line.weather.requests_cut = host.line.weather.answers_cut = host.fenced = True
            await self._operate(host, AdminEvent.DISABLE, off=False)
            return True
        await self._switch_off(host)
        if fault.word == "back":
            await asyncio.sleep(fault.for_s)
            self._switch_on(host)
            return True
        host.fenced = True
        host.things.placements.clear()
        await self._operate(host, AdminEvent.DISABLE, off=True)
        return True

    async def _operate(self, host: Host, event: AdminEvent, *, off: bool = False) -> None:
        """An operator who does not give up."""
        world = self._world
        if event is AdminEvent.DISABLE:
            world.history.fenced.add(host.identity.host_id)
        while True:
            try:
                await world.clients.ask(lambda service, caller: service.set_host_admin(caller, host.identity.host_id, event, off=off))
            except AtollError as error:
                if error.code is Code.ILLEGAL_STATE:
                    return
                await asyncio.sleep(1.0)
                continue
            world.note(f"an operator says {event} of {host.name}{', it is off' if off else ''}")
            return

    async def _reset(self, host: Host) -> None:
        """Refused until nothing counts as being there."""
        while True:
            try:
                await self._world.clients.ask(
                    lambda service, caller: service.set_host_admin(caller, host.identity.host_id, AdminEvent.RESET)
                )
            except AtollError:
                await asyncio.sleep(1.0)
                continue
            return

    async def _drain(self, fault: Fault, host: Host) -> bool:
        if host.fenced:
            return False
        self._say(fault, host.name)
        await self._operate(host, AdminEvent.DRAIN)
        await asyncio.sleep(fault.for_s)
        await self._operate(host, AdminEvent.ACTIVATE)
        return True

    # Lines.

    async def _lossy(self, fault: Fault, host: Host) -> bool:
        self._say(fault, host.name)
        host.line.weather.lost = fault.share * 0.7
        await asyncio.sleep(fault.for_s)
        host.line.weather.lost = 0.0
        return True

    async def _repeated(self, fault: Fault, host: Host) -> bool:
        self._say(fault, host.name)
        host.line.weather.repeated = fault.share
        await asyncio.sleep(fault.for_s)
        host.line.weather.repeated = 0.0
        return True

    async def _slow(self, fault: Fault, host: Host) -> bool:
        self._say(fault, host.name)
        host.line.weather.delay_s = fault.share * SLOW_S_MAX
        await asyncio.sleep(fault.for_s)
        host.line.weather.delay_s = Weather().delay_s
        return True

    async def _partition(self, fault: Fault, host: Host) -> bool:
        if host.fenced:
            return False
        self._say(fault, host.name)
        host.line.weather.requests_cut = fault.word != "answers"
        host.line.weather.answers_cut = fault.word != "requests"
        await asyncio.sleep(fault.for_s)
        if not host.fenced:
            host.line.weather.requests_cut = host.line.weather.answers_cut = False
        return True

    # Drivers and guests.

    async def _guest_exits(self, fault: Fault, host: Host) -> bool:
        running = host.things.running()
        if not running:
            return False
        placement_id = running[min(int(fault.share * len(running)), len(running) - 1)]
        self._say(fault, f"{host.name}: {placement_id}")
        self._world.history.ended.add(placement_id)
        host.things.end(placement_id, "exit 1")
        process = host.process
        if fault.word != "unseen" and host.driver is not None and process is not None and process.alive:
            process.run(host.driver.tell_exit(placement_id, "exit 1"))
        return True

    async def _guest_mute(self, fault: Fault, host: Host) -> bool:
        self._say(fault, host.name)
        host.things.mute = True
        await asyncio.sleep(fault.for_s)
        host.things.mute = False
        return True

    async def _driver_fails(self, fault: Fault, host: Host) -> bool:
        verb, how = fault.word.split()
        self._say(fault, host.name)
        host.things.failing[verb] = how
        await asyncio.sleep(fault.for_s)
        host.things.failing.pop(verb, None)
        return True

    async def _driver_hangs(self, fault: Fault, host: Host) -> bool:
        self._say(fault, host.name)
        host.things.hanging.add(fault.word)
        await asyncio.sleep(fault.for_s)
        host.things.hanging.discard(fault.word)
        return True

    async def _disk_full(self, fault: Fault, host: Host) -> bool:
        self._say(fault, host.name)
        host.things.disk_full = True
        await asyncio.sleep(fault.for_s)
        host.things.disk_full = False
        return True

    async def _journal_refuses(self, fault: Fault, host: Host) -> bool:
        self._say(fault, host.name)
        host.things.journal_refuses = True
        await asyncio.sleep(fault.for_s)
        host.things.journal_refuses = False
        return True

    async def _stuck(self, fault: Fault, host: Host) -> bool:
        there = list(host.things.placements.values())
        if not there:
            return False
        chosen = there[min(int(fault.share * len(there)), len(there) - 1)]
        self._say(fault, f"{host.name}: {chosen.order.placement_id}")
        chosen.stuck = True
        await asyncio.sleep(fault.for_s)
        chosen.stuck = False
        return True

    # The end of it.

    async def heal(self) -> None:
        """Nothing goes wrong any more; what was fenced is enrolled again."""
        world = self._world
        world.database.weather = StoreWeather()
        world.shelf.weather = MomentWeather()
        for seat in world.seats:
            seat.pause_s = 0.5
            seat.ear.cut = False
            seat.clock.set_right()
            if seat.clock.unseen and seat.process is not None:
                seat.process.end()
            if seat.process is not None:
                seat.process.spare()
        for host in world.hosts:
            host.line.weather = Weather()
            host.clock.set_right()
            things = host.things
            things.mute = things.disk_full = things.journal_refuses = False
            things.failing.clear()
            things.hanging.clear()
            for placement in things.placements.values():
                placement.stuck = False
            host.woken.set()
            host.pause_s = 0.5
            if host.process is not None:
                host.process.spare()
        await world.until(world.replicas, 120.0, "control never came back")
        for host in world.hosts:
            await self._operate(host, AdminEvent.ACTIVATE)
            if host.fenced:
                await self._join_again(host)
            elif host.off:
                self._switch_on(host)

    async def _join_again(self, host: Host) -> None:
        """A fenced machine is switched off for good, and set up anew under its old name."""
        await self._switch_off(host)
        host.things.placements.clear()
        await self._operate(host, AdminEvent.DISABLE, off=True)
        await self._reset(host)
        shutil.rmtree(host.directory)
        host.directory.mkdir(mode=0o700)
        host.identity = await self._world.enrol(host.name)
        host.fenced = False
        self._world.note(f"{host.name} joins again")
        self._switch_on(host)


_STORE: Final[Mapping[Kind, Callable[[Fault], tuple[str, float | bool]]]] = {
    Kind.STORE_RACES: lambda fault: ("races", fault.share * 0.8),
    Kind.STORE_FORGETS: lambda fault: ("forgets", fault.share),
    Kind.STORE_SLOW: lambda fault: ("slow_s", fault.share),
    Kind.STORE_LATE: lambda fault: ("late", fault.share),
    Kind.STORE_DOWN: lambda _fault: ("down", True),
}
"""What of the store's weather each changes, and to what."""
_MOMENTS: Final[Mapping[Kind, Callable[[Fault], tuple[str, float | bool]]]] = {
    Kind.MOMENTS_AWAY: lambda _fault: ("away", True),
    Kind.MOMENTS_LOSSY: lambda fault: ("lost", fault.share),
    Kind.MOMENTS_SLOW: lambda fault: ("slow_s", fault.share * SLOW_S_MAX),
}
"""The same of the artifact store's."""

Handler = Callable[..., Awaitable[bool]]
_CONTROL: Final[Mapping[Kind, Handler]] = {kind: getattr(Fate, f"_{kind.value}") for kind in Kind if kind in CONTROL}
_HOST: Final[Mapping[Kind, Handler]] = {
    kind: getattr(Fate, f"_{kind.value}") for kind in Kind if kind not in CONTROL | STORE | MOMENTS | {Kind.CLOCK_STEP, Kind.RESTORE}
}

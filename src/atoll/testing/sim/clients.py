"""Clients: what they ask for, and what they were promised.

Theory of operation. Each client does its steps one after the other, through any replica, and asks again when it does not know what became
of a request. The book keeps, for each request, between which times its sandbox may end by itself: whatever was answered binds, and
whatever was not may or may not have happened. `verdict.py` holds the world to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from atoll.base.errors import AtollError, Code
from atoll.base.secret import Secret
from atoll.control.service import Caller, Query, Service
from atoll.domain.sandbox import Condition, Sandbox, State
from atoll.domain.snapshot import Snapshot
from atoll.planning.resolve import CreateRequest
from atoll.testing.sim.network import Replica
from atoll.testing.sim.scenario import MEMORY_MIB, Step, Wish

T = TypeVar("T")

KEY: Final = "e2b_" + "5" * 40
CANARY: Final = "c4n4ry"
"""In every environment value; found at rest, a promise is broken."""
PATIENCE_S: Final = 70.0
TRIES: Final = 40
_AGAIN: Final = frozenset(
    {Code.CONTROL_UNAVAILABLE, Code.OUTCOME_UNKNOWN, Code.STORE_UNAVAILABLE, Code.REQUEST_IN_PROGRESS, Code.RATE_LIMITED}
)
_HOPELESS: Final = frozenset(
    {
        Code.NO_CAPACITY, Code.CREATE_TIMEOUT, Code.START_FAILED, Code.GUEST_BOOT_TIMEOUT, Code.GUEST_EXITED, Code.HOST_DISK_FULL,
        Code.PLACEMENT_LOST, Code.LEASE_EXPIRED, Code.HOST_QUARANTINED, Code.RELEASE_REQUESTED, Code.END_REACHED, Code.INTERNAL,
        Code.CLEANUP_FAILED, Code.SANDBOX_NOT_FOUND, Code.STORE_RESTORED, Code.START_TIMEOUT, Code.IMAGE_TIMEOUT, Code.IMAGE_UNAVAILABLE,
        Code.BOOTSTRAP_DELIVERED, Code.SNAPSHOT_UNAVAILABLE, Code.SNAPSHOT_NOT_FOUND,
        Code.MOMENT_CORRUPT, Code.MOMENT_UNAVAILABLE,
    }
)  # fmt: skip
"""How a create may fail while things go wrong; each is checked by why its sandbox ended."""


@dataclass(slots=True)
class Promise:
    """What one request was told. *Units*: true seconds."""

    request_id: str
    timeout_s: int
    sandbox_id: str | None = None
    ready: bool = False
    """A client was told so."""
    released: bool = False
    """Somebody asked for its end, or gave up."""
    earliest: float = 0.0
    latest: float = 0.0
    moved_at: float = 0.0
    """When its end was moved last."""
    given: str | None = None
    """Of a clone: whose environment it has, by the request that brought it."""
    parents: tuple[str, ...] = ()
    """Of a clone: the sandbox that it was made of, what that was made of, and so on."""
    memory_mib: int = MEMORY_MIB


@dataclass(slots=True)
class Book:
    """All promises, by request and by sandbox."""

    by_request: dict[str, Promise] = field(default_factory=dict)
    authorized: set[tuple[str, int]] = field(default_factory=set)
    """Sandboxes and generations of which a client has certified that they may be replaced."""

    def of(self, sandbox_id: str, request_id: str | None) -> Promise | None:
        """The promise about a sandbox, by either name."""
        if request_id is not None and request_id in self.by_request:
            return self.by_request[request_id]
        return next((p for p in self.by_request.values() if p.sandbox_id == sandbox_id), None)


@dataclass(slots=True)
class Clients:
    """Everybody who asks."""

    dice: random.Random
    replicas: Callable[[], Sequence[Replica]]
    true_s: Callable[[], float]
    note: Callable[[str], None]
    class_name: str
    rebuild: Callable[[], Awaitable[None]]
    """Gives the template a new build."""
    book: Book = field(default_factory=Book)
    asked: int = 0

    async def client(self, number: int, steps: Sequence[Step]) -> None:
        """Do these steps, then give up everything that is still there."""
        mine: list[Promise] = []
        for index, step in enumerate(steps):
            await asyncio.sleep(max(0.0, step.at_s - self.true_s()))
            await self._do(step, mine, f"c{number}-{index}")

    async def _do(self, step: Step, mine: list[Promise], name: str) -> None:
        match step.wish:
            case Wish.CREATE:
                await self.create(self._promised(name, step, mine))
                return
            case Wish.CROWD:
                crowd = [self._promised(f"{name}-{number}", step, mine) for number in range(step.count)]
                await asyncio.gather(*(self.create(promise) for promise in crowd))
                return
            case Wish.WARM:
                await self._keep_warm(step.count, step.memory_mib)
                return
            case Wish.REBUILD:
                await self.rebuild()
                return
            case _:
                pass
        if not mine:
            return
        promise = mine[min(int(step.pick * len(mine)), len(mine) - 1)]
        match step.wish:
            case Wish.SNAPSHOT:
                await self._snapshot(promise)
            case Wish.FORK:
                await self._fork(promise, mine, name, step.timeout_s)
            case _:
                await self._live(step, promise, mine)

    def _promised(self, name: str, step: Step, mine: list[Promise]) -> Promise:
        promise = self.book.by_request[name] = Promise(name, step.timeout_s, memory_mib=step.memory_mib)
        mine.append(promise)
        return promise

    async def _live(self, step: Step, promise: Promise, mine: list[Promise]) -> None:
        match step.wish:
            case Wish.REPEAT if promise.given is None:
                await self.create(promise)
            case Wish.REPEAT:
                return
            case Wish.AUTHORIZE:
                for one in mine:
                    await self._authorize(one)
            case Wish.EXTEND:
                await self._extend(promise, step.timeout_s)
            case Wish.PAUSE | Wish.SUSPEND:
                await self._rest(promise, step.wish)
            case Wish.RESUME:
                await self._resume(promise, step.timeout_s)
            case _:
                await self.release(promise)

    async def create(self, promise: Promise, *, require_host: str | None = None) -> bool:
        """Ask until there is an answer; whether it was ready."""
        request = CreateRequest(
            template="base",
            timeout_s=promise.timeout_s,
            memory_mib=promise.memory_mib,
            request_id=promise.request_id,
            class_name=self.class_name,
            require_host=require_host,
            env={"SECRET": f"{CANARY}-{promise.request_id}"},
        )
        for _ in range(TRIES):
            begun = self.true_s()
            code = await self._created(promise, request, begun)
            if code is None:
                return True
            if code not in _AGAIN:
                self.note(f"create {promise.request_id}: {code}")
                if code not in _HOPELESS:
                    raise AssertionError(f"create {promise.request_id} was refused: {code}")
                return False
            await asyncio.sleep(1.0 + self.dice.random())
        self.note(f"create {promise.request_id}: given up")
        return False

    async def _created(self, promise: Promise, request: CreateRequest, begun: float) -> Code | None:
        try:
            sandbox: Sandbox = await self.ask(lambda service, caller: service.create(caller, request))
        except AtollError as error:
            # It may have been accepted, and may still become ready within its deadlines.
            promise.latest = max(promise.latest, self.true_s() + 800.0 + promise.timeout_s)
            return error.code
        if promise.sandbox_id not in (None, sandbox.id):
            # Its first sandbox failed, and whoever asked again was given another one.
            promise.released = False
        promise.sandbox_id, promise.ready = sandbox.id, True
        # It was ready at some time before this answer; a repeated create is answered with a sandbox that is as old as it is.
        promise.earliest = max(promise.earliest, begun + promise.timeout_s) if promise.latest == 0.0 else promise.earliest
        promise.latest = max(promise.latest, self.true_s() + promise.timeout_s)
        self.note(f"create {promise.request_id}: {sandbox.id} {sandbox.state}")
        return None

    async def _extend(self, promise: Promise, timeout_s: int) -> None:
        if promise.sandbox_id is None:
            return
        sandbox_id, begun = promise.sandbox_id, self.true_s()
        try:
            await self.ask(lambda service, caller: service.set_end(caller, sandbox_id, timeout_s=timeout_s, only_extend=True))
        except AtollError as error:
            promise.latest = max(promise.latest, self.true_s() + timeout_s)
            promise.moved_at = self.true_s()
            self.note(f"extend {promise.request_id}: {error.code}")
            return
        promise.earliest = max(promise.earliest, begun + timeout_s)
        promise.latest = max(promise.latest, self.true_s() + timeout_s)
        promise.moved_at = self.true_s()
        self.note(f"extend {promise.request_id} to {timeout_s} s")

    async def _rest(self, promise: Promise, wish: Wish) -> None:
        """Nothing ends that is at rest; whether it is may be known to nobody but its host."""
        if promise.sandbox_id is None:
            return
        sandbox_id = promise.sandbox_id
        promise.latest = math.inf
        try:
            if wish is Wish.PAUSE:
                sandbox: Sandbox = await self.ask(lambda service, caller: service.pause(caller, sandbox_id))
            else:
                sandbox = await self.ask(lambda service, caller: service.suspend(caller, sandbox_id))
        except AtollError as error:
            self.note(f"{wish} {promise.request_id}: {error.code}")
            return
        self.note(f"{wish} {promise.request_id}: {sandbox.id} is {sandbox.state}")

    async def _resume(self, promise: Promise, timeout_s: int) -> None:
        if promise.sandbox_id is None:
            return
        sandbox_id, begun = promise.sandbox_id, self.true_s()
        # Whatever is answered: it may have been resumed, and lives from then.
        promise.earliest = min(promise.earliest, begun + timeout_s)
        promise.moved_at = begun
        try:
            sandbox, rested = await self.ask(lambda service, caller: service.resume(caller, sandbox_id, timeout_s=float(timeout_s)))
        except AtollError as error:
            self.note(f"resume {promise.request_id}: {error.code}")
            return
        if rested:
            promise.latest, promise.moved_at = self.true_s() + timeout_s, self.true_s()
        self.note(f"resume {promise.request_id}: {sandbox.id} is {sandbox.state}{', from rest' if rested else ''}")

    async def _snapshot(self, promise: Promise) -> None:
        if promise.sandbox_id is None:
            return
        sandbox_id = promise.sandbox_id
        try:
            taken: Snapshot = await self.ask(lambda service, caller: service.snapshot(caller, sandbox_id))
        except AtollError as error:
            self.note(f"snapshot of {promise.request_id}: {error.code}")
            return
        self.note(f"snapshot of {promise.request_id}: {taken.id} {taken.mode}")

    async def _fork(self, parent: Promise, mine: list[Promise], name: str, timeout_s: int) -> None:
        """Two clones, which are promises like any other; what was answered to nobody may be there all the same."""
        if parent.sandbox_id is None:
            return
        sandbox_id, begun = parent.sandbox_id, self.true_s()
        given, parents = parent.given or parent.request_id, (sandbox_id, *parent.parents)
        clones = [Promise(f"{name}#{number}", timeout_s, given=given, parents=parents) for number in range(2)]
        for one in clones:
            one.latest = self.true_s() + 900.0 + timeout_s
            self.book.by_request[one.request_id] = one
        mine += clones
        try:
            made = await self.ask(
                lambda service, caller: service.fork(caller, sandbox_id, count=len(clones), timeout_s=timeout_s, request_id=name)
            )
        except AtollError as error:
            self.note(f"fork of {parent.request_id}: {error.code}")
            return
        for one, found in zip(clones, made, strict=True):
            if isinstance(found, AtollError):
                self.note(f"fork {one.request_id}: {found.code}")
                if found.code not in _AGAIN | _HOPELESS:
                    raise AssertionError(f"fork {one.request_id} was refused: {found.code}")
                continue
            one.sandbox_id, one.ready, one.earliest = found.id, True, begun + timeout_s
            one.latest = self.true_s() + timeout_s
            self.note(f"fork {one.request_id}: {found.id} {found.state}")

    async def _keep_warm(self, count: int, memory_mib: int) -> None:
        """Ask until it is said to be kept."""
        request = CreateRequest(template="base", class_name=self.class_name, memory_mib=memory_mib)
        while True:
            try:
                await self.ask(lambda service, caller: service.keep_warm(caller, "base", request, count=count))
            except AtollError as error:
                if error.code is Code.NOT_SUPPORTED:
                    self.note(f"nothing can be kept warm: {error.message}")
                    return
                if error.code not in _AGAIN:
                    raise AssertionError(f"keeping {count} warm was refused: {error.code}") from None
                await asyncio.sleep(1.0 + self.dice.random())
                continue
            self.note(f"{count} guests of {memory_mib} MiB are kept warm")
            return

    async def cool(self) -> None:
        """Nothing is kept warm any more."""
        while True:
            try:
                kept = await self.ask(lambda service, caller: service.warm_policies(caller))
            except AtollError:
                await asyncio.sleep(1.0)
                continue
            if not kept:
                return
            for one in kept:
                await self._keep_warm(0, one.policy.memory_mib)

    async def drop_all(self) -> None:
        """Every snapshot that is listed is deleted."""
        while True:
            try:
                page = await self.ask(lambda service, caller: service.snapshots(caller))
            except AtollError:
                await asyncio.sleep(1.0)
                continue
            if not page.items:
                return
            for snapshot in page.items:
                with contextlib.suppress(AtollError):
                    await self._drop(snapshot.id)
            await asyncio.sleep(1.0)

    async def _drop(self, snapshot_id: str) -> Snapshot:
        return await self.ask(lambda service, caller: service.delete_snapshot(caller, snapshot_id))

    async def _authorize(self, promise: Promise) -> None:
        """Say that what the lost guest was given is revoked, where that is waited for."""
        if promise.sandbox_id is None:
            return
        sandbox_id = promise.sandbox_id
        try:
            sandbox: Sandbox = await self.ask(lambda service, caller: service.get(caller, sandbox_id, ended=True))
            if Condition.REPLACEMENT_BLOCKED not in sandbox.conditions:
                return
            lost = sandbox.generation - (sandbox.state is State.PENDING)
            self.book.authorized.add((sandbox_id, lost))
            await self.ask(lambda service, caller: service.authorize_replacement(caller, sandbox_id, generation=lost))
        except AtollError as error:
            self.note(f"authorize {promise.request_id}: {error.code}")
            return
        self.note(f"authorize {promise.request_id}: generation {lost} of {sandbox_id} may be replaced")

    async def release_all(self) -> None:
        """Whatever is listed: who asked for it may have lost sight of it."""
        while True:
            try:
                page = await self.ask(lambda service, caller: service.find(caller, Query(scope="living")))
            except AtollError:
                await asyncio.sleep(1.0)
                continue
            if not page.items:
                return
            for sandbox in page.items:
                with contextlib.suppress(AtollError):
                    await self._release(sandbox.id)
            await asyncio.sleep(1.0)

    async def release(self, promise: Promise) -> None:
        """Ask until it is said to be gone."""
        promise.released = True
        if promise.sandbox_id is None:
            return
        sandbox_id = promise.sandbox_id
        for _ in range(TRIES):
            try:
                await self._release(sandbox_id)
            except AtollError as error:
                if error.code is Code.SANDBOX_NOT_FOUND:
                    break
                await asyncio.sleep(1.0 + self.dice.random())
                continue
            break
        self.note(f"release {promise.request_id}: {sandbox_id}")

    async def _release(self, sandbox_id: str) -> Sandbox:
        return await self.ask(lambda service, caller: service.release(caller, sandbox_id))

    async def ask(self, work: Callable[[Service, Caller], Coroutine[Any, Any, T]], *, of: Replica | None = None) -> T:
        """One request to some replica; it dies with it. *Errors*: what the service raises; CONTROL_UNAVAILABLE, OUTCOME_UNKNOWN."""
        self.asked += 1
        replicas = self.replicas()
        if not replicas:
            raise AtollError(Code.CONTROL_UNAVAILABLE, "no control runs")
        replica = of or self.dice.choice(replicas)

        async def serve() -> T:
            service = replica.control.service
            return await work(service, await service.authenticate(Secret(KEY)))

        task = replica.process.run(serve())
        try:
            await asyncio.wait({task}, timeout=PATIENCE_S)
        finally:
            if not task.done():
                task.cancel()
        if not task.done() or task.cancelled() or not replica.process.alive:
            raise AtollError(Code.OUTCOME_UNKNOWN, "no answer")
        return task.result()

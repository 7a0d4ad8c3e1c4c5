"""Bringing sandboxes to rest and back, as every API asks for it: one wish, one commit, and then waiting for the host's word.

What was asked for is on record before anybody waits, so whoever loses patience loses nothing: the sandbox shows what became of it. A way
that failed is told with the code that the host gave, and the sandbox is then what it was before.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Final

from atoll.base.errors import AtollError, Code, OutcomeUnknown, Refused, Unavailable
from atoll.control.sandboxes.sandboxes import Sandboxes, not_found, still_at
from atoll.control.service import Caller
from atoll.domain.host import Admin, Health, health
from atoll.domain.operations import Act, Action, Actor
from atoll.domain.sandbox import TERMINAL, Sandbox, State
from atoll.domain.spec import SaveMode
from atoll.planning.pausing import MOVING, wakes_by_traffic
from atoll.planning.stimuli import CopyUnwanted, PauseRequested, ResumeRequested, SuspendRequested
from atoll.store import sandboxes

WOKEN_S: Final = 300.0
"""How long a sandbox lives that traffic has woken."""
PATIENCE_S: Final = 55.0
"""Less than any client waits for an answer; what takes longer goes on without it."""
_LOOK_AGAIN_S: Final = 2.0
_NO_ROOM: Final = frozenset(
    {Code.NO_CAPACITY, Code.INSUFFICIENT_CPU, Code.INSUFFICIENT_MEMORY, Code.INSUFFICIENT_DISK, Code.INSUFFICIENT_SLOTS}
)
_CALLERS_FAULT: Final = frozenset({Code.NOT_SUPPORTED, Code.GUEST_UNRESPONSIVE})


@dataclass(frozen=True, slots=True)
class Resting:
    """Part of the Service; one per control process."""

    sandboxes: Sandboxes

    async def pause(self, caller: Caller, sandbox_id: str, *, revision: int | None = None) -> Sandbox:
        """As Service.pause."""
        return await self._to_rest(caller, sandbox_id, PauseRequested(), State.PAUSED, Action.SANDBOX_PAUSE, revision)

    async def suspend(
        self, caller: Caller, sandbox_id: str, *, mode: SaveMode = SaveMode.FULL, strict: bool = False, revision: int | None = None
    ) -> Sandbox:
        """As Service.suspend."""
        wish = SuspendRequested(mode, strict)
        return await self._to_rest(caller, sandbox_id, wish, State.SUSPENDED, Action.SANDBOX_SUSPEND, revision)

    async def _to_rest(
        self,
        caller: Caller,
        sandbox_id: str,
        wish: PauseRequested | SuspendRequested,
        rest: State,
        action: Action,
        revision: int | None,
    ) -> Sandbox:
        found = await self._settled(caller, sandbox_id)
        if found.state is rest:
            return found
        act = Act(caller.actor(), action, found.id)
        done = await self._apply(found, wish, act, revision=revision, readmit=found.state is State.PAUSED)
        if not done:
            now = await self.sandboxes.get(caller, sandbox_id)
            raise Refused(Code.ILLEGAL_STATE, f"sandbox {now.id} is {now.state}, and cannot be {rest} from there")
        after = await self._settled(caller, sandbox_id)
        if after.state is not rest:
            raise failure(after, Code.PAUSE_FAILED if rest is State.PAUSED else Code.SAVE_FAILED)
        return after

    async def resume(
        self, caller: Caller, sandbox_id: str, *, timeout_s: float | None = None, reboot: bool = False, revision: int | None = None
    ) -> tuple[Sandbox, bool]:
        """As Service.resume."""
        found = await self._settled(caller, sandbox_id)
        longest = found.spec.timeout_s_max
        if timeout_s is not None and timeout_s > longest:
            raise Refused(Code.CLASS_LIMIT, f"timeout {timeout_s:g} s is longer than {longest} s")
        if found.state is State.READY:
            return found, False
        wish = ResumeRequested(max(0.0, timeout_s) if timeout_s is not None else None, reboot)
        done, after = await self._back(caller, found, wish, Act(caller.actor(), Action.SANDBOX_RESUME, found.id), revision=revision)
        if after.state is not State.READY:
            if found.unresponsive:
                message = f"sandbox {found.id} was saved while its guest did not answer, and does not answer now"
                raise Refused(Code.GUEST_UNRESPONSIVE, message)
            raise failure(after, Code.RESUME_FAILED)
        # Of several who want it back at once one has brought it about; the others find it running.
        return after, done

    async def _apply(
        self, found: Sandbox, wish: PauseRequested | SuspendRequested | ResumeRequested, act: Act, *, revision: int | None, readmit: bool
    ) -> bool:
        done = await self.sandboxes.reconciler.apply(found.id, wish, about=still_at(revision), act=act, readmit=readmit)
        return done is not None and done.changed

    async def _back(
        self, caller: Caller | None, found: Sandbox, wish: ResumeRequested, act: Act, *, revision: int | None
    ) -> tuple[bool, Sandbox]:
        """Whether this wish has brought it back, and what it is then. Where it is, or, if the artifact store has it, on any host that fits;
        in the room of guests that were made ahead, where there is no other.

        *Errors*: Unavailable when nobody has room, and then it stays as it is.
        """
        try:
            return await self._at_once(caller, found, wish, act, revision=revision)
        except Unavailable as error:
            if error.code not in _NO_ROOM or not await self.sandboxes.warming.make_room(await self._settled(caller, found.id)):
                raise
        return await self._at_once(caller, found, wish, act, revision=revision)

    async def _at_once(
        self, caller: Caller | None, found: Sandbox, wish: ResumeRequested, act: Act, *, revision: int | None
    ) -> tuple[bool, Sandbox]:
        done = await self._one_way_back(caller, found, wish, act, revision=revision)
        after = await self._settled(caller, found.id)
        if done or after.rests_in_store == found.rests_in_store:
            return done, after
        # Its host has given its copy up in between.
        done = await self._one_way_back(caller, after, wish, act, revision=revision)
        return done, await self._settled(caller, found.id)

    async def _one_way_back(self, caller: Caller | None, found: Sandbox, wish: ResumeRequested, act: Act, *, revision: int | None) -> bool:
        if found.rests_in_store:
            taken = await self.sandboxes.reconciler.take_up(found, wish, about=still_at(revision), act=act)
            return taken is not None and taken.changed
        if found.moment is not None and self._is_away(found):
            found, revision = await self._leave(caller, found, revision)
            if found.rests_in_store:
                return await self._one_way_back(caller, found, wish, act, revision=revision)
        try:
            return await self._apply(found, wish, act, revision=revision, readmit=True)
        except Unavailable:
            if found.moment is None:
                raise
            found, revision = await self._leave(caller, found, revision)
            if not found.rests_in_store:
                raise
        return await self._one_way_back(caller, found, wish, act, revision=revision)

    def _is_away(self, sandbox: Sandbox) -> bool:
        """Whether its host cannot be expected to bring it back soon."""
        host = self.sandboxes.reconciler.directory.host(sandbox.host_id) if sandbox.host_id is not None else None
        now = self.sandboxes.clock.now()
        return host is None or host.admin is Admin.DISABLED or health(host, now=now) is not Health.HEALTHY

    async def _leave(self, caller: Caller | None, found: Sandbox, revision: int | None) -> tuple[Sandbox, int | None]:
        """It rests in the artifact store alone, if it can. What it is then; its revision, where the caller has named one."""
        await self.sandboxes.reconciler.apply(found.id, CopyUnwanted(), about=still_at(revision))
        after = await self._settled(caller, found.id)
        return after, (after.revision if revision is not None else None)

    async def wake(self, sandbox_id: str) -> None:
        """Resume one for which traffic has come. *Idempotency*: one that runs is left alone. *Errors*: as Service.resume."""
        found = await self._settled(None, sandbox_id)
        if found.state is State.READY:
            return
        if not wakes_by_traffic(found):
            raise not_found(sandbox_id)
        act = Act(Actor(found.team_id), Action.SANDBOX_RESUME, found.id, data={"by": "traffic"})
        life_s = float(min(WOKEN_S, found.spec.timeout_s_max))
        _, after = await self._back(None, found, ResumeRequested(life_s), act, revision=None)
        if after.state is not State.READY:
            raise failure(after, Code.RESUME_FAILED)

    async def _look(self, caller: Caller | None, sandbox_id: str) -> Sandbox:
        if caller is not None:
            return await self.sandboxes.get(caller, sandbox_id)
        found = await self.sandboxes.store.read(lambda conn: sandboxes.get(conn, sandbox_id))
        if found is None:
            raise not_found(sandbox_id)
        return found

    async def _settled(self, caller: Caller | None, sandbox_id: str) -> Sandbox:
        """The sandbox once it is on no way to rest or back. *Errors*: SANDBOX_NOT_FOUND; OutcomeUnknown when patience ends."""
        clock = self.sandboxes.clock
        until = clock.boot() + PATIENCE_S
        with self.sandboxes.hub.watch(sandbox_id) as changed:
            while True:
                changed.clear()
                now = await self._look(caller, sandbox_id)
                if now.state in TERMINAL or now.state is State.RELEASING:
                    raise not_found(sandbox_id)
                if now.state not in MOVING:
                    return now
                left_s = until - clock.boot()
                if left_s <= 0:
                    raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, f"sandbox {now.id} is still {now.state}; look at it again")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, _LOOK_AGAIN_S)):
                        await changed.wait()


def failure(sandbox: Sandbox, otherwise: Code) -> AtollError:
    """Why it is what it was before, as its host has said."""
    code = Code(sandbox.reason) if sandbox.reason is not None and sandbox.reason in Code.__members__ else otherwise
    message = f"sandbox {sandbox.id} is {sandbox.state}: {sandbox.detail or 'its host does not say why'}"
    return Refused(code, message) if code in _CALLERS_FAULT else Unavailable(code, message, retry_after_s=5.0)

"""The fake service's part about rest: what is asked for is so at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace

from atoll.base.errors import Code, Refused
from atoll.control.service import Caller, revision_mismatch
from atoll.domain.sandbox import Sandbox, State
from atoll.domain.spec import SaveMode


class FakeResting:
    """Mixed into FakeService."""

    unresponsive: set[str]
    """Sandboxes whose guest does not answer."""

    @abstractmethod
    async def get(self, caller: Caller, sandbox_id: str, *, ended: bool = False, every_team: bool = False) -> Sandbox: ...

    now: Callable[[], float]

    @abstractmethod
    def _put(self, sandbox: Sandbox, event: str, data: Mapping[str, str | int | float | None] | None = None) -> Sandbox: ...

    async def pause(self, caller: Caller, sandbox_id: str, *, revision: int | None = None) -> Sandbox:
        return await self._rest(caller, sandbox_id, State.PAUSED, "sandbox.paused", revision)

    async def suspend(
        self, caller: Caller, sandbox_id: str, *, mode: SaveMode = SaveMode.FULL, strict: bool = False, revision: int | None = None
    ) -> Sandbox:
        if strict and sandbox_id in self.unresponsive:
            raise Refused(Code.GUEST_UNRESPONSIVE, f"sandbox {sandbox_id} is ready: its guest does not answer")
        found = await self._rest(caller, sandbox_id, State.SUSPENDED, "sandbox.suspended", revision)
        return self._put(replace(found, save_mode=mode, unresponsive=sandbox_id in self.unresponsive), "sandbox.suspended")

    async def _rest(self, caller: Caller, sandbox_id: str, state: State, event: str, revision: int | None) -> Sandbox:
        one = await self.get(caller, sandbox_id)
        _still_at(revision, one.revision)
        if one.state is state:
            return one
        if one.state is not State.READY:
            raise Refused(Code.ILLEGAL_STATE, f"sandbox {one.id} is {one.state}")
        return self._put(replace(one, state=state, end_at=None), event)

    async def resume(
        self, caller: Caller, sandbox_id: str, *, timeout_s: float | None = None, reboot: bool = False, revision: int | None = None
    ) -> tuple[Sandbox, bool]:
        one = await self.get(caller, sandbox_id)
        _still_at(revision, one.revision)
        if timeout_s is not None and timeout_s > one.spec.timeout_s_max:
            raise Refused(Code.CLASS_LIMIT, f"timeout {timeout_s:g} s is longer than {one.spec.timeout_s_max} s")
        if one.state is State.READY:
            return one, False
        life_s = timeout_s if timeout_s is not None else float(one.spec.timeout_s)
        mode = SaveMode.FILES if reboot else one.save_mode
        return self._put(replace(one, state=State.READY, end_at=self.now() + life_s, save_mode=mode), "sandbox.resumed"), True


def _still_at(revision: int | None, now: int) -> None:
    if revision is not None and revision != now:
        raise revision_mismatch("the sandbox", now)

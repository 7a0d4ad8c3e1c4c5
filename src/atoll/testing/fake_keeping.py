"""The fake service's part about snapshots and forks: what is asked for is there at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from atoll.base.errors import AtollError, Code, Refused
from atoll.base.ids import HostId, PlacementId, Prefix, new_id
from atoll.control.sandboxes.snapshots import not_found, page_after, page_of
from atoll.control.service import Caller, Page
from atoll.domain.sandbox import LIVING, Sandbox, State
from atoll.domain.snapshot import DEFAULT_TAG, Purpose, Snapshot
from atoll.domain.snapshot import State as Kept
from atoll.domain.spec import SaveMode
from atoll.planning.resolve import CreateRequest


class FakeKeeping:
    """Mixed into FakeService."""

    kept: dict[str, Snapshot]
    now: Callable[[], float]

    @abstractmethod
    def dice(self, count: int) -> bytes: ...

    @abstractmethod
    async def get(self, caller: Caller, sandbox_id: str, *, ended: bool = False, every_team: bool = False) -> Sandbox: ...

    @abstractmethod
    async def create(self, caller: Caller, request: CreateRequest) -> Sandbox: ...

    @abstractmethod
    def _of(self, caller: Caller) -> Sequence[Sandbox]: ...

    async def snapshot(self, caller: Caller, sandbox_id: str, *, mode: SaveMode = SaveMode.FULL, name: str | None = None) -> Snapshot:
        one = await self._running(caller, sandbox_id)
        bare, _, tag = (name or "").rpartition("/")[2].partition(":")
        same = [known for known in self.kept.values() if bare and (known.name, known.tag) == (bare, tag or DEFAULT_TAG)]
        taken = Snapshot(
            id=new_id(Prefix.SNAPSHOT, self.dice),
            revision=2,
            team_id=caller.team.id,
            client_id=caller.client.id,
            sandbox_id=one.id,
            placement_id=one.placement_id or PlacementId(""),
            host_id=one.host_id or HostId(""),
            state=Kept.READY,
            purpose=Purpose.KEPT,
            mode=mode,
            spec=one.spec,
            created_at=self.now(),
            name=bare or None,
            tag=tag or DEFAULT_TAG,
            version=len(same) + 1 if bare else 0,
            size_bytes=1 << 20,
            taken_at=self.now(),
        )
        self.kept[taken.id] = taken
        return taken

    async def _running(self, caller: Caller, sandbox_id: str) -> Sandbox:
        one = await self.get(caller, sandbox_id)
        if one.state is not State.READY:
            raise Refused(Code.ILLEGAL_STATE, f"sandbox {one.id} is {one.state}")
        return one

    async def snapshots(
        self, caller: Caller, *, sandbox_id: str | None = None, name: str | None = None, limit: int = 100, cursor: str | None = None
    ) -> Page[Snapshot]:
        after = page_after(cursor)
        mine = [one for one in self.kept.values() if one.team_id == caller.team.id and sandbox_id in (None, one.sandbox_id)]
        found = sorted((one for one in mine if name in (None, one.name)), key=lambda one: (-one.created_at, one.id))
        return page_of([one for one in found if after is None or (-one.created_at, one.id) > (-after[0], after[1])], limit)

    async def find_snapshot(self, caller: Caller, reference: str) -> Snapshot:
        bare, _, tag = reference.rpartition("/")[2].partition(":")
        mine = [one for one in self.kept.values() if one.team_id == caller.team.id]
        found = [one for one in mine if one.id == bare or (one.name, one.tag) == (bare, tag or DEFAULT_TAG)]
        if not found:
            raise not_found(reference)
        return max(found, key=lambda one: one.version)

    async def delete_snapshot(self, caller: Caller, reference: str) -> Snapshot:
        found = await self.find_snapshot(caller, reference)
        if any(one.spec.template_id == found.id and one.state in LIVING for one in self._of(caller)):
            raise Refused(Code.SNAPSHOT_IN_USE, f"1 sandbox(es) use snapshot {found.reference!r}")
        del self.kept[found.id]
        return replace(found, state=Kept.DELETING)

    async def fork(
        self, caller: Caller, sandbox_id: str, *, count: int = 1, timeout_s: int | None = None, request_id: str | None = None
    ) -> Sequence[Sandbox | AtollError]:
        one = await self._running(caller, sandbox_id)
        made: list[Sandbox | AtollError] = []
        for number in range(count):
            asked = None if request_id is None else f"{request_id}#{number}"
            request = CreateRequest(template=one.alias, timeout_s=timeout_s, metadata=one.metadata, request_id=asked)
            try:
                made.append(await self.create(caller, request))
            except AtollError as error:
                made.append(error)
        return made

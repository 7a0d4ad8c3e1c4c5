"""Rests: notes beside moments in the artifact store of whose they are, so that a store that is taken back to a backup finds them again.

Theory of operation. A host gives up its copy of what it has saved once the store has it: from then on only control's rows say that there is a sandbox.
So with the moment of each placement goes a note of its sandbox and generation, before its host hears that the moment is there. When control
begins in a store that was taken back, it reads all notes before it hears any host, and marks the records (`planning.restoring.marked`). A note
whose sandbox has gone on or ended goes within a minute; nothing goes before every host has said what it has, and for a while after, as
what they say may still be on its way. One that is stale for less than that may bring a sandbox back that was deleted just before control was lost.
Why: docs/adr/0041.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from atoll.base.errors import AtollError, Code, Refused
from atoll.domain.moment import Moment
from atoll.domain.spec import SaveMode
from atoll.images.artifacts import Artifacts
from atoll.planning.restoring import Left
from atoll.store import facts, resting, restoring
from atoll.store.engine import Store
from atoll.telemetry import events
from atoll.telemetry.log import get_logger

LOG = get_logger()

RESTS: Final = "rests"
NOTE_BYTES_MAX: Final = 4096
SWEEP_EVERY_S: Final = 60.0
FRESH_S: Final = 120.0
"""What is younger is not looked at: what its host says of it is still on its way."""
_OF_PLACEMENT: Final = re.compile(r"plc_[0-9a-z]{20}")


@dataclass(slots=True)
class Rests:
    """Of one control process. `now`: wall seconds, as the artifact store tells them."""

    store: Store
    artifacts: Artifacts
    now: Callable[[], float]
    ids: Callable[[], str]
    _settled_at: float | None = None

    async def note(self, name: str, digest: str, content: bytes) -> None:
        """Say whose moment this is, if it is a placement's. `content`: its manifest. *Errors*: those of Artifacts; Refused MOMENT_CORRUPT."""
        whose = await self.store.read(lambda conn: resting.whose(conn, name)) if _OF_PLACEMENT.fullmatch(name) else None
        if whose is None:
            return
        said = {"sandbox_id": whose[0], "generation": whose[1], **_of_manifest(content), "digest": digest}
        await self.artifacts.write(f"{RESTS}/{name}", json.dumps(said).encode())

    async def begin(self) -> None:
        """Mark the records of a store that was taken back, before any host is heard. Never raises: what could not be read is read again."""
        try:
            await self.mark()
        except AtollError as error:
            LOG.warning(events.ARTIFACTS_NOT_COLLECTED, code=error.code, error=error.message)

    async def mark(self) -> int:
        """Take what the notes say into the records of a store that was taken back: how many. *Errors*: those of Artifacts."""
        if not await self.store.read(restoring.unsettled):
            return 0
        newest: dict[str, Left] = {}
        async for left, _ in self._notes():
            known = newest.get(left.sandbox_id)
            if known is None or left.generation > known.generation:
                newest[left.sandbox_id] = left
        count = 0
        for left in newest.values():
            count += await self.store.write(lambda conn, left=left: self._mark(conn, left)) is not None  # type: ignore[misc]
        LOG.info(events.MOMENTS_FOUND, count=count)
        return count

    def _mark(self, conn: sa.Connection, left: Left) -> facts.Committed | None:
        return restoring.mark(conn, left, now=self.now(), ids=self.ids)

    async def run(self) -> None:
        """Sweep until cancelled. Replicas may do so side by side."""
        while True:
            try:
                await self.sweep()
            except AtollError as error:
                LOG.warning(events.ARTIFACTS_NOT_COLLECTED, code=error.code, error=error.message)
            await asyncio.sleep(SWEEP_EVERY_S)

    async def sweep(self) -> list[str]:
        """Notes go whose sandboxes have gone on, or ended: of which placements. *Errors*: those of Artifacts."""
        if await self.store.read(restoring.unsettled):
            self._settled_at = None
            await self.mark()
            return []
        if self._settled_at is None:
            self._settled_at = self.now()
        if await self.store.read(restoring.restored_at) is not None and self.now() - self._settled_at < SWEEP_EVERY_S:
            # What a host does not have comes to light by the ordinary way, a moment after it has said what it has.
            return []
        gone: list[str] = []
        async for left, changed_at in self._notes():
            if changed_at < self.now() - FRESH_S and await self.store.read(lambda conn, left=left: resting.is_past(conn, left)):  # type: ignore[misc]
                await self.artifacts.delete(f"{RESTS}/{left.placement_id}")
                gone.append(left.placement_id)
        return gone

    async def _notes(self) -> AsyncIterator[tuple[Left, float]]:
        async for info in self.artifacts.list(RESTS):
            name = info.key.rpartition("/")[2]
            try:
                said = json.loads(await self.artifacts.read(info.key, bytes_max=NOTE_BYTES_MAX))
                moment = Moment(str(said["digest"]), int(said["size"]), str(said["kind"]))
                yield Left(str(said["sandbox_id"]), name, int(said["generation"]), SaveMode(said["mode"]), moment), info.changed_at
            except (ValueError, KeyError, TypeError) as error:
                LOG.warning(events.ARTIFACTS_NOT_COLLECTED, code=Code.MOMENT_CORRUPT, error=f"{info.key}: {type(error).__name__}")
            except Refused as error:
                if error.code is not Code.ARTIFACT_NOT_FOUND:
                    raise


def _of_manifest(content: bytes) -> dict[str, Any]:
    """What a record needs of a moment besides its digest. *Errors*: Refused MOMENT_CORRUPT."""
    try:
        document = json.loads(content)
        said = document["facts"]
        parts = (said["driver"], said["isolation"], said["arch"], said.get("runtime", ""))
        return {
            "size": sum(int(pack["size"]) for pack in document["packs"]),
            "kind": "/".join(str(part) for part in parts if part),
            "mode": SaveMode(said["mode"]).value,
        }
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(Code.MOMENT_CORRUPT, f"a manifest does not say what it is of: {type(error).__name__}") from None

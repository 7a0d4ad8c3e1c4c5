"""The deployment document as this replica follows it: read, checked, applied, and known to everything else in the process.

Theory of operation. `current` is what the last revision means that this process has read; whoever needs a class or a limit asks for it at
that moment and keeps nothing. Applying is compare-and-set on the revision; the applier follows at once, the other replicas when they look
for a newer one (`loops/refresh.py`). A document that was applied is not read again by a later release: what it meant is on record beside it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Final

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import Code, Refused
from atoll.control.service import Caller, CheckedConfig, ConfigView
from atoll.domain.deployment import Deployment
from atoll.domain.operations import Act, Action
from atoll.store import configurations as stored
from atoll.store import operations
from atoll.store.engine import Store
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger
from atoll.wire import deployment as document
from atoll.wire import normal_form
from atoll.wire.document import NotADocument

LOG = get_logger()

_SHOWN_MAX: Final = 10
"""Problems in the message of a refusal; a check names all."""


class Configuration:
    """Part of the Service; one per control process. `built_in` applies until a document was applied, as revision 0."""

    def __init__(self, *, store: Store, clock: Clock, built_in: Deployment) -> None:
        self._store = store
        self._clock = clock
        self._built_in = built_in
        self.current = built_in
        self.revision = 0

    async def follow(self) -> bool:
        """Take in a newer revision; whether there was one."""
        newest = await self._store.read(stored.newest)
        if newest == self.revision:
            return False
        found = await self._store.read(lambda conn: stored.get(conn, newest))
        if found is None:
            return False
        self._take_in(found.revision, found.deployment)
        return True

    async def show(self, caller: Caller, revision: int | None) -> ConfigView:
        """As Service.config."""
        _operator(caller)
        wanted = await self._store.read(stored.newest) if revision is None else revision
        if wanted == 0:
            return ConfigView(0, normal_form.write(self._built_in), None, None)
        found = await self._store.read(lambda conn: stored.get(conn, wanted))
        if found is None:
            raise Refused(Code.CONFIG_NOT_FOUND, f"there is no revision {wanted} of the deployment document")
        return _view(found)

    async def history(self, caller: Caller, *, before: int | None, limit: int) -> Sequence[ConfigView]:
        """As Service.config_history."""
        _operator(caller)
        found = await self._store.read(lambda conn: stored.history(conn, before=before, limit=limit))
        return [_view(one) for one in found]

    async def check(self, caller: Caller, text: str) -> CheckedConfig:
        """As Service.check_config."""
        _operator(caller)
        await self.follow()
        try:
            # Reading is work of its own, and other requests wait for this thread.
            meant = await asyncio.to_thread(document.read, text)
        except NotADocument as refused:
            return CheckedConfig(self.revision, tuple(refused.problems), ())
        return CheckedConfig(self.revision, (), tuple(normal_form.changes(self.current, meant)))

    async def apply(self, caller: Caller, text: str, *, revision: int) -> ConfigView:
        """As Service.apply_config."""
        _operator(caller)
        try:
            meant = await asyncio.to_thread(document.read, text)
        except NotADocument as refused:
            raise _invalid(refused) from None
        new = stored.Configuration(
            revision=revision + 1,
            document=text,
            digest=hashlib.sha256(text.encode()).hexdigest(),
            deployment=meant,
            applied_at=self._clock.now(),
            client_id=caller.client.id,
        )

        def work(conn: sa.Connection) -> stored.Configuration:
            added = stored.add(conn, new)
            # What was applied before is told once.
            if added is new:
                act = Act(caller.actor(), Action.CONFIG_APPLY, "deployment", data={"revision": new.revision, "digest": new.digest})
                operations.audit(conn, act, at=new.applied_at)
            return added

        try:
            applied = await self._store.write(work, tell=self._newer)
        except sa.exc.IntegrityError:
            raise Refused(Code.CONFIG_CONFLICT, f"revision {revision + 1} of the document was applied by somebody else") from None
        return _view(applied)

    def _newer(self, applied: stored.Configuration) -> None:
        if applied.revision > self.revision:
            self._take_in(applied.revision, applied.deployment)

    def _take_in(self, revision: int, deployment: Deployment) -> None:
        self.revision, self.current = revision, deployment
        LOG.info(names.CONFIG_FOLLOWED, revision=revision, count=len(deployment.classes))


def _view(one: stored.Configuration) -> ConfigView:
    return ConfigView(one.revision, one.document, one.applied_at, one.client_id)


def _invalid(refused: NotADocument) -> Refused:
    problems = refused.problems
    listed = "; ".join(map(str, problems[:_SHOWN_MAX]))
    more = f"; and {len(problems) - _SHOWN_MAX} more" if len(problems) > _SHOWN_MAX else ""
    return Refused(Code.CONFIG_INVALID, f"the document is not valid: {listed}{more}", problems=len(problems))


def _operator(caller: Caller) -> None:
    if not caller.operator:
        raise Refused(Code.FORBIDDEN, "only operators see and change the deployment document")

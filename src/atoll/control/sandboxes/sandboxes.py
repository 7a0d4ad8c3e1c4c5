"""Sandboxes as every API asks for them: admitted, resolved, accepted, awaited; listed, extended, released.

A create is three commits: accepted (with its sealed payload), placed, ready; the first two may share a flush. The request waits on the
hub, not on the store.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code, OutcomeUnknown, Refused, Unavailable
from atoll.base.ids import Dice, Prefix, SandboxId, is_id, new_id
from atoll.base.records import replace
from atoll.control.artifacts.manifests import Manifests
from atoll.control.artifacts.templates import Templates
from atoll.control.configuration import Configuration
from atoll.control.loops.reconcile import Reconciler
from atoll.control.replicas.hub import Hub
from atoll.control.sandboxes.snapshots import Snapshots, require_ready
from atoll.control.sandboxes.usages import Usages
from atoll.control.sandboxes.warming import Warming
from atoll.control.service import EVERY_TEAM, Caller, EventRecord, Page, Query, revision_mismatch
from atoll.control.sessions.consoles import Consoles
from atoll.control.sessions.orders import Orders
from atoll.control.tokens import Tokens
from atoll.domain.operations import Act, Action
from atoll.domain.sandbox import STARTING, TERMINAL, Condition, Sandbox, State
from atoll.domain.snapshot import State as Kept
from atoll.domain.spec import OnEnd, Spec
from atoll.domain.template import Template
from atoll.planning import beginning, replacing, resolve
from atoll.planning.admission import Limits
from atoll.planning.beginning import Beginning
from atoll.planning.resolve import CreateRequest
from atoll.planning.stimuli import EndMoved, Facts, ReleaseRequested, ReplacementAuthorized
from atoll.store import facts, operations, sandboxes, tallies, tenancy
from atoll.store.engine import Store
from atoll.store.payloads import Sealed

_ENDED: Final = TERMINAL | {State.RELEASING}
_NEAR_END_S: Final = 30.0
_AGENT_WORD_S: Final = 2.0
_LOOK_AGAIN_S: Final = 2.0
_STREAMS_MAX: Final = 256
_STREAM_PAGE: Final = 500
_STREAM_PING_S: Final = 15.0


def not_found(sandbox_id: str) -> Refused:
    """The same for a stranger's sandbox, an ended one, and one that never was."""
    return Refused(Code.SANDBOX_NOT_FOUND, f"sandbox {sandbox_id[:64]!r} was not found")


@dataclass(slots=True, kw_only=True)
class Sandboxes:
    """Part of the Service; one per control process."""

    store: Store
    clock: Clock
    dice: Dice
    hub: Hub
    reconciler: Reconciler
    orders: Orders
    templates: Templates
    consoles: Consoles
    tokens: Tokens
    usages: Usages
    configuration: Configuration
    snapshots: Snapshots
    warming: Warming
    manifests: Manifests | None = None
    """None: this process has no store for images, and every one is ready-made."""
    streams: int = 0
    """Of events, that are open."""

    async def create(self, caller: Caller, request: CreateRequest, *, begun: Beginning | None = None) -> Sandbox:
        """As Service.create. For builds and forks: `begun`, in place of what the request names."""
        meter = self.reconciler.meter
        meter.creating += 1
        try:
            return await self._create(caller, request, begun)
        except AtollError as error:
            meter.create_refused(error.code)
            raise
        finally:
            meter.creating -= 1

    async def _create(self, caller: Caller, request: CreateRequest, begun: Beginning | None) -> Sandbox:
        if request.request_id is not None:
            known = await self._repeated(caller, request)
            if known is not None:
                return known
        sandbox, placed = await self._accept(caller, request, begun)
        self.reconciler.meter.accepted(sandbox.spec.class_name)
        if not request.wait:
            await self.reconciler.settle(sandbox.id, known=placed)
            return sandbox
        return await self._await_ready(sandbox, placed)

    async def get(self, caller: Caller, sandbox_id: str, *, ended: bool = False, every_team: bool = False) -> Sandbox:
        """As Service.get."""
        found = await self.store.read(lambda conn: sandboxes.get(conn, sandbox_id)) if is_id(Prefix.SANDBOX, sandbox_id) else None
        if found is None:
            raise not_found(sandbox_id)
        _require_seen(found, caller, sandbox_id, every_team=every_team)
        if not ended and (found.state in _ENDED or found.state in STARTING):
            raise not_found(sandbox_id)
        return found

    async def some(self, caller: Caller, sandbox_ids: Sequence[str]) -> Sequence[Sandbox]:
        """Those of these that are the caller's and visible, in their order."""
        wanted = [one for one in dict.fromkeys(sandbox_ids) if is_id(Prefix.SANDBOX, one)]
        found = await self.store.read(lambda conn: sandboxes.some(conn, wanted))
        return [one for one in found if one.team_id == caller.team.id and one.state not in _ENDED | STARTING]

    async def find(self, caller: Caller, query: Query) -> Page[Sandbox]:
        """As Service.find."""
        scopes = {"visible": sandboxes.VISIBLE, "living": sandboxes.LIVING_STATES, "all": tuple(s.value for s in State)}
        states = [s for s in scopes[query.scope] if not query.states or s in query.states]
        template_id = None
        if query.template is not None:
            try:
                template_id = (await self.templates.get(caller, query.template)).id
            except Refused as error:
                if error.code is not Code.TEMPLATE_NOT_FOUND:
                    raise
                return Page([])
        wanted = sandboxes.Filter(
            team_id=await self._team(caller, query.team),
            states=states,
            metadata=query.metadata,
            template_id=template_id,
            started_after=query.started_after,
            ascending=query.ascending,
            limit=query.limit,
            after=_parse_cursor(query.cursor) if query.cursor else None,
        )
        found, running = await self.store.read(lambda conn: (sandboxes.find(conn, wanted), sandboxes.running(conn, wanted)))
        items = found[: query.limit]
        more = len(found) > query.limit
        return Page(items, _cursor(items[-1]) if more else None, running)

    async def _team(self, caller: Caller, reference: str | None) -> str | None:
        """The team whose sandboxes are meant; None: every team's. *Errors*: FORBIDDEN, INVALID_REQUEST."""
        if reference is None or reference in (caller.team.id, caller.team.name):
            return caller.team.id
        if not caller.operator:
            raise Refused(Code.FORBIDDEN, "only operators see other teams' sandboxes")
        if reference == EVERY_TEAM:
            return None
        found = await self.store.read(lambda conn: tenancy.team(conn, reference))
        if found is None:
            raise Refused(Code.INVALID_REQUEST, f"there is no team {reference[:64]!r}")
        return found.id

    async def release(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        reason: str = Code.RELEASE_REQUESTED,
        every_team: bool = False,
        revision: int | None = None,
    ) -> Sandbox:
        """As Service.release."""
        if not is_id(Prefix.SANDBOX, sandbox_id):
            raise not_found(sandbox_id)
        still = still_at(revision)

        def about(known: Facts) -> bool:
            # Asked in the transaction that ends it, so that it need not be read twice.
            _require_seen(known.sandbox, caller, sandbox_id, every_team=every_team)
            if known.sandbox.state in _ENDED:
                raise not_found(sandbox_id)
            return still(known)

        act = Act(caller.actor(), Action.SANDBOX_RELEASE, SandboxId(sandbox_id), data={"reason": str(reason)})
        done = await self.reconciler.apply(sandbox_id, ReleaseRequested(reason), about=about, act=act)
        if done is None or not done.changed:
            raise not_found(sandbox_id)
        return done.sandbox

    async def set_end(
        self, caller: Caller, sandbox_id: str, *, timeout_s: float, only_extend: bool, revision: int | None = None
    ) -> Sandbox:
        """As Service.set_end."""
        found = await self.get(caller, sandbox_id)
        if timeout_s > found.spec.timeout_s_max:
            raise Refused(Code.CLASS_LIMIT, f"timeout {timeout_s:g} s is longer than {found.spec.timeout_s_max} s")
        if found.state is not State.READY and found.state not in STARTING:
            raise Refused(Code.ILLEGAL_STATE, f"sandbox {found.id} is {found.state}: its end counts from when it is resumed")
        if timeout_s <= 0 and not only_extend and found.spec.on_end is OnEnd.KILL:
            # Now means now: the way over the agent would leave it reachable for a moment after the answer.
            return await self.release(caller, sandbox_id, reason=Code.END_REACHED, revision=revision)
        now = self.clock.now()
        end_at = now + max(0.0, timeout_s)
        if revision is not None and found.revision != revision:
            raise revision_mismatch(f"sandbox {found.id}", found.revision)
        unsure = self._unconfirmed(found) or self._is_unheard(found)
        if only_extend and found.end_at is not None and end_at <= found.end_at:
            if unsure:
                await self._agent_word(found)
            return found
        old_end = await self._enforced_end(found)
        done = await self.reconciler.apply(found.id, EndMoved(end_at), about=still_at(revision))
        if done is None or done.sandbox.state in _ENDED:
            raise not_found(sandbox_id)
        if done.sandbox.host_id is not None:
            self.hub.wake_host(done.sandbox.host_id)
        if done.changed and old_end is not None and (unsure or old_end - now < _NEAR_END_S):
            await self._agent_word(done.sandbox)
        return await self.get(caller, sandbox_id) if timeout_s > 0 else done.sandbox

    async def authorize_replacement(self, caller: Caller, sandbox_id: str, *, generation: int, statement: str) -> Sandbox:
        """As Service.authorize_replacement."""
        found = await self.store.read(lambda conn: sandboxes.get(conn, sandbox_id)) if is_id(Prefix.SANDBOX, sandbox_id) else None
        if found is None or (found.team_id != caller.team.id and not caller.operator):
            raise not_found(sandbox_id)
        act = Act(caller.actor(), Action.SANDBOX_AUTHORIZE_REPLACEMENT, found.id, data={"generation": generation, "statement": statement})
        done = await self.reconciler.apply(found.id, ReplacementAuthorized(generation, caller.client.id, statement), act=act)
        if done is None or done.sandbox.state in _ENDED:
            raise not_found(sandbox_id)
        now = done.sandbox
        if not done.changed and (now.generation <= generation or Condition.REPLACEMENT_BLOCKED in now.conditions):
            raise Refused(
                Code.REPLACEMENT_NOT_BLOCKED,
                f"generation {generation} of {now.id} waits for no replacement; it is {now.state} at generation {now.generation}",
                generation=now.generation,
            )
        await self.reconciler.settle(now.id)
        return now

    async def events(
        self, caller: Caller, sandbox_id: str, *, after: int = 0, limit: int = 100, every_team: bool = False
    ) -> list[EventRecord]:
        """As Service.events."""
        found = await self.get(caller, sandbox_id, ended=True, every_team=every_team)
        rows = await self.store.read(lambda conn: sandboxes.events_of(conn, found, after=after, limit=limit))
        return [EventRecord(**row) for row in rows]

    async def follow(self, caller: Caller, sandbox_id: str, *, after: int = 0) -> AsyncIterator[Sequence[EventRecord]]:
        """As Service.follow."""
        found = await self.get(caller, sandbox_id, ended=True, every_team=True)
        if self.streams >= _STREAMS_MAX:
            raise Unavailable(Code.RATE_LIMITED, f"{_STREAMS_MAX} streams of events are open", retry_after_s=10.0)
        return self._follow(caller, found.id, after)

    async def _follow(self, caller: Caller, sandbox_id: str, after: int) -> AsyncIterator[Sequence[EventRecord]]:
        def look(conn: sa.Connection) -> tuple[Sandbox | None, Sequence[sa.RowMapping]]:
            if not tenancy.lives(conn, caller.client.id):
                return None, ()
            # The state first: what is read after an end has every event of it.
            now = sandboxes.get(conn, sandbox_id)
            return now, () if now is None else sandboxes.events_of(conn, now, after=after, limit=_STREAM_PAGE)

        self.streams += 1
        try:
            with self.hub.watch(sandbox_id) as changed:
                while True:
                    changed.clear()
                    now, rows = await self.store.read(look)
                    yield [EventRecord(**row) for row in rows]
                    if rows:
                        after = rows[-1]["seq"]
                    if len(rows) >= _STREAM_PAGE:
                        continue
                    if now is None or now.state in TERMINAL:
                        return
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_STREAM_PING_S):
                            await changed.wait()
        finally:
            self.streams -= 1

    async def logs(self, caller: Caller, sandbox_id: str, *, every_team: bool = False) -> bytes:
        """As Service.logs."""
        found = await self.get(caller, sandbox_id, ended=True, every_team=every_team)
        if found.host_id is None or found.placement_id is None:
            return b""
        try:
            return await self.consoles.read(host_id=found.host_id, placement_id=found.placement_id)
        except Refused:
            # Its host keeps only the last words of a few that have ended.
            return b""

    # Create, step by step.

    async def _repeated(self, caller: Caller, request: CreateRequest) -> Sandbox | None:
        assert request.request_id is not None
        request_id = request.request_id
        known = await self.store.read(lambda conn: sandboxes.by_request(conn, caller.team.id, request_id))
        if known is None:
            return None
        if request.wait and known.state in _ENDED and known.started_at is None:
            # The first was answered with its failure, and whoever asks again wants another try, not a sandbox that never was.
            await self.store.write(lambda conn: sandboxes.forget_request(conn, known.id))
            return None
        if known.request_digest is not None and known.request_digest != self._digest(request):
            raise Refused(Code.REQUEST_MISMATCH, "this request id was used with another body")
        if request.wait and known.state in STARTING:
            raise Refused(Code.REQUEST_IN_PROGRESS, "the first request with this id is still running")
        return known

    async def _beginning(self, caller: Caller, request: CreateRequest) -> Beginning:
        """What it begins from. *Errors*: TEMPLATE_NOT_FOUND; as planning.beginning."""
        reference = request.template or resolve.template_of(request, resolve.class_of(request, self.configuration.current))
        try:
            return Beginning(request, await self.templates.get(caller, reference))
        except Refused as error:
            found = await self.snapshots.look(caller, reference) if error.code is Code.TEMPLATE_NOT_FOUND else None
            if found is None or found.state is not Kept.READY:
                raise
        host = self.reconciler.directory.host(found.host_id)
        return beginning.of_snapshot(found, request, host_name=host.name if host is not None else "")

    async def _spec(self, begun: Beginning) -> Spec:
        policy = resolve.class_of(begun.request, self.configuration.current)
        spec = resolve.resolve(begun.request, template=begun.template, policy=policy)
        if begun.shape is None:
            # What a snapshot or a build's step takes is fixed by that.
            spec = self.reconciler.directory.on_its_rung(spec, policy.rungs(), now=self.clock.now())
        if begun.snapshot is not None:
            beginning.check_class(begun.snapshot, policy)
        elif self.manifests is not None:
            spec = replace(spec, manifest=await self.manifests.of(begun.template))
        return spec if begun.shape is None else begun.shape(spec)

    async def _ahead(self, begun: Beginning, spec: Spec) -> tuple[Spec, dict[str, str]]:
        """The spec, with the head start that its template's build has kept where it fits; and what its first event says of that."""
        moment = await self.snapshots.head_start(begun.template) if begun.on_record and spec.origin is None else None
        if moment is None:
            return spec, {}
        made = beginning.head_start(spec, moment)
        if isinstance(made, str):
            return spec, {"head_start": "none", "because": made}
        return made, {"head_start": moment.id}

    async def _accept(self, caller: Caller, request: CreateRequest, given: Beginning | None) -> tuple[Sandbox, facts.Committed | None]:
        asked = request
        begun = given if given is not None else await self._beginning(caller, request)
        request, template = begun.request, begun.template
        spec, said = await self._ahead(begun, await self._spec(begun))
        now = self.clock.now()
        sandbox_id = SandboxId(new_id(Prefix.SANDBOX, self.dice))
        sealing = self._sealing(caller, request, template)
        sealed, payload_digest = sealing(sandbox_id)
        sandbox = Sandbox(
            id=sandbox_id,
            revision=1,
            team_id=caller.team.id,
            client_id=caller.client.id,
            state=State.PENDING,
            spec=spec,
            generation=1,
            created_at=now,
            end_at=None,
            end_revision=0,
            request_id=request.request_id,
            request_digest=self._digest(asked) if asked.request_id is not None else None,
            alias=template.aliases[0] if template.aliases else None,
            metadata=dict(request.metadata),
            payload_digest=payload_digest,
            deadline_at=now,
            secured=request.secured,
        )

        def admit(conn: sa.Connection, made: Sandbox) -> None:
            if begun.snapshot is not None:
                require_ready(conn, begun.snapshot.id)
            tallies.admit(conn, team_id=caller.team.id, client_id=caller.client.id, limits=limits)
            if given is None or begun.snapshot is not None:
                operations.audit(conn, Act(caller.actor(), Action.SANDBOX_CREATE, made.id, data=data), at=now)
            if begun.on_record:
                tenancy.spawned(conn, template.id, now=now)

        def work(conn: sa.Connection) -> None:
            admit(conn, sandbox)
            event_id, request_id = self.reconciler.event_id(), caller.request_id
            facts.accept(conn, sandbox, payload=sealed, event_id=event_id, request_id=request_id, said=said)

        data = {"template": spec.template_id if begun.snapshot is not None else template.name, "class": spec.class_name}
        self.store.require_room()
        limits = Limits.of(self.configuration.current, team=caller.team.name)
        try:
            if given is None and begun.snapshot is None:
                claimed = await self.warming.claim(sandbox, own_env=bool(request.env), payload=sealing, admit=admit)
                if claimed is not None:
                    return claimed.sandbox, claimed
            return sandbox, await self.reconciler.accept(sandbox, work)
        except sa.exc.IntegrityError:
            # Two requests with one id at once: the other one is first, and says what this one is answered.
            known = await self._repeated(caller, asked) if asked.request_id is not None else None
            if known is None:
                raise Refused(Code.REQUEST_IN_PROGRESS, "the first request with this id is still running") from None
            return known, None

    def _sealing(self, caller: Caller, request: CreateRequest, template: Template) -> Callable[[str], tuple[Sealed, str]]:
        """What the create brings, sealed for whichever sandbox becomes its own, with its digest."""
        # A template's own values are in its image's configuration, for everybody who has that.
        exposes = bool(request.env)
        brought = {**dict(template.env), **request.env}

        def seal(sandbox_id: str) -> tuple[Sealed, str]:
            env, files = brought, list[dict[str, str]]()
            if request.e2b_env:
                env, files = _e2b_inside(brought, sandbox_id=sandbox_id, team_id=caller.team.id, template_id=template.id)
            return self.orders.seal(sandbox_id, env=env, files=files, exposes=exposes)

        return seal

    async def _await_ready(self, sandbox: Sandbox, placed: facts.Committed | None) -> Sandbox:
        until = self.clock.boot() + sandbox.spec.create_patience_s
        with self.hub.watch(sandbox.id) as changed:
            await self.reconciler.settle(sandbox.id, known=placed)
            while True:
                now = changed.take() or await self.store.read(lambda conn: sandboxes.get(conn, sandbox.id))
                if now is None or now.state in _ENDED:
                    raise _start_failure(now)
                if now.state not in STARTING:
                    return now
                left_s = until - self.clock.boot()
                if left_s <= 0:
                    await self._give_up(now)
                    continue
                # Another replica's word of it may be lost: it is looked at now and then, unasked.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, _LOOK_AGAIN_S)):
                        await changed.wait()

    async def _give_up(self, sandbox: Sandbox) -> None:
        """Patience is over: release it, let the request id be used again, and say what was missing."""
        code, detail = Code.NO_CAPACITY if sandbox.state in (State.PENDING, State.RESERVING) else Code.CREATE_TIMEOUT, sandbox.detail
        found = await self.store.read(lambda conn: facts.load(conn, sandbox.id))
        if found is not None and found.placement is not None and replacing.waits_for_command(found.placement):
            # Its host has not waited for it as long as it may, but nobody here waits longer.
            code, detail = Code.START_COMMAND_FAILED, replacing.why_late(found.placement)[1]
        released = await self.reconciler.apply(
            sandbox.id, ReleaseRequested(code, failing=True, detail=detail), about=lambda known: known.sandbox.state in STARTING
        )
        if released is None or not released.changed:
            # Ready, or ended, in the last moment: whoever waits looks at it again.
            return
        await self.store.write(lambda conn: sandboxes.forget_request(conn, sandbox.id))
        raise Unavailable(code, detail or "the sandbox was not ready in time", retry_after_s=5.0)

    def _digest(self, request: CreateRequest) -> str:
        content: dict[str, Any] = asdict(request)
        content.pop("wait")
        return self.tokens.request_digest(json.dumps(content, sort_keys=True, default=str).encode())

    def _unconfirmed(self, sandbox: Sandbox) -> bool:
        """Whether its end was moved and its agent has not said that it enforces that: it may be about to enforce an earlier one.

        The end that a sandbox gets as it becomes ready needs no word: its agent has it from the command.
        """
        if sandbox.placement_id is None or sandbox.started_at is None or sandbox.end_at is None:
            return False
        moved = sandbox.end_at != sandbox.started_at + sandbox.spec.timeout_s
        return moved and not self.reconciler.ends.knows(sandbox.placement_id, sandbox.end_revision)

    async def _enforced_end(self, sandbox: Sandbox) -> float | None:
        """The soonest at which its agent may end it by itself, as far as control knows. *Units*: wall seconds.

        An agent that has not heard of the end that control counts from readiness counts its own, from a readiness that control may have
        heard of late; but no guest was ready before it was placed.
        """
        if sandbox.end_at is None or sandbox.placement_id is None or self.reconciler.ends.knows(sandbox.placement_id, sandbox.end_revision):
            return sandbox.end_at
        found = await self.store.read(lambda conn: facts.load(conn, sandbox.id))
        placement = found.placement if found is not None else None
        if placement is None:
            return sandbox.end_at
        # A guest that was made ahead has been somebody's only since it was claimed.
        return min(sandbox.end_at, max(placement.created_at, sandbox.created_at) + sandbox.spec.timeout_s)

    def _is_unheard(self, sandbox: Sandbox) -> bool:
        """Whether its host has been silent for so long that its agent may enforce the old end before it hears of another."""
        host = self.reconciler.directory.host(sandbox.host_id) if sandbox.host_id is not None else None
        return host is not None and host.seen_at is not None and self.clock.now() - host.seen_at >= _NEAR_END_S

    async def _agent_word(self, sandbox: Sandbox) -> None:
        """Wait until the agent enforces the new end: the old one is too near to trust that it hears in time."""
        if sandbox.host_id is None or sandbox.placement_id is None:
            return
        if not await self.reconciler.ends.told(sandbox.placement_id, sandbox.end_revision, timeout_s=_AGENT_WORD_S):
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "the host has not confirmed the new end yet; look at the sandbox again")


def _require_seen(found: Sandbox, caller: Caller, sandbox_id: str, *, every_team: bool) -> None:
    """*Errors*: SANDBOX_NOT_FOUND for who may not know of it."""
    strange = found.team_id != caller.team.id and not (caller.operator and every_team)
    if strange or (sandboxes.is_hidden(found) and found.client_id != caller.client.id and not caller.operator):
        raise not_found(sandbox_id)


def still_at(revision: int | None) -> Callable[[Facts], bool]:
    """Whether a sandbox is still as its caller saw it, asked in the transaction that changes it. *Errors* of the answer: REVISION_MISMATCH."""

    def look(found: Facts) -> bool:
        if revision is not None and found.sandbox.revision != revision:
            raise revision_mismatch(f"sandbox {found.sandbox.id}", found.sandbox.revision)
        return True

    return look


def _start_failure(sandbox: Sandbox | None) -> Unavailable:
    code = Code(sandbox.reason) if sandbox and sandbox.reason and sandbox.reason in Code.__members__ else Code.START_FAILED
    detail = (sandbox.detail if sandbox else None) or "the sandbox ended before it was ready"
    return Unavailable(code, detail, retry_after_s=5.0, sandbox_id=sandbox.id if sandbox else None)


def _e2b_inside(env: dict[str, str], *, sandbox_id: str, team_id: str, template_id: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """What E2B's own guests find inside: four variables and three files."""
    own = {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": sandbox_id, "E2B_TEAM_ID": team_id, "E2B_TEMPLATE_ID": template_id}
    files = [
        {"path": f"/run/e2b/.{name}", "content": own[name], "mode": "0644"} for name in ("E2B_SANDBOX", "E2B_SANDBOX_ID", "E2B_TEMPLATE_ID")
    ]
    return {**own, **env}, files


def _cursor(last: Sandbox) -> str:
    at = last.started_at if last.started_at is not None else last.created_at
    return base64.urlsafe_b64encode(f"{at!r}|{last.id}".encode()).decode()


def _parse_cursor(cursor: str) -> tuple[float, str]:
    try:
        at, _, sandbox_id = base64.urlsafe_b64decode(cursor.encode()).decode().partition("|")
        parsed = float(at)
    except (ValueError, binascii.Error, UnicodeError):
        raise Refused(Code.INVALID_REQUEST, "the page token is not one of ours") from None
    if not is_id(Prefix.SANDBOX, sandbox_id):
        raise Refused(Code.INVALID_REQUEST, "the page token is not one of ours")
    return parsed, sandbox_id

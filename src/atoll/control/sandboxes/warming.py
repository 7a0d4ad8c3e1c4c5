"""Warm guests: the policies as operators set them, guests that are made ahead, and creates that take one over.

`planning/warming.py` says how many there should be, `loops/warming.py` looks; `planning/claiming.py` says what a claim is, `store/warmth.py`
commits it. In here is what they need of the rest of control: templates and classes resolved as for a create, payloads, and the hosts that
may be asked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code, Refused
from atoll.base.ids import Dice, Prefix, SandboxId, new_id
from atoll.base.records import replace
from atoll.control.artifacts.manifests import Manifests
from atoll.control.artifacts.templates import Templates
from atoll.control.configuration import Configuration
from atoll.control.loops.reconcile import Reconciler
from atoll.control.service import Caller, WarmView
from atoll.control.sessions.orders import Orders
from atoll.domain.operations import Act, Action
from atoll.domain.placement import Holding, held
from atoll.domain.sandbox import TERMINAL, Sandbox, State
from atoll.domain.spec import OnEnd, OnLeaseExpiry, OnLoss, PlacementPolicy, Spec
from atoll.domain.template import Template
from atoll.domain.warmth import COUNT_MAX, OWN_CLIENT, OWN_TEAM, WarmPolicy
from atoll.planning import claiming, resolve, warming
from atoll.planning.claiming import pool_of
from atoll.planning.placing import ring
from atoll.planning.resolve import CreateRequest
from atoll.planning.stimuli import ReleaseRequested
from atoll.planning.warming import LIFE_S, Making, Wanted
from atoll.store import facts, operations, sandboxes, tenancy, warmth
from atoll.store.engine import Store
from atoll.store.payloads import Sealed
from atoll.telemetry import metrics as m

Payload = Callable[[str], tuple[Sealed, str]]
"""What the guest of the sandbox of this id gets, sealed, and its digest."""
ROOM_S: Final = 20.0
"""So long it is waited for guests to go."""
LOOK_AGAIN_S: Final = 1.0
CHOICES: Final = 16
"""Of spread: a host is named anyway."""


@dataclass(slots=True, kw_only=True)
class Warming:
    """One per control process."""

    store: Store
    clock: Clock
    dice: Dice
    reconciler: Reconciler
    orders: Orders
    templates: Templates
    configuration: Configuration
    manifests: Manifests | None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there may be something to make or to give up."""
    pools: frozenset[str] = frozenset()
    """Of which guests may be there: what is not in it need not be asked for."""
    short_of: dict[str, Spec] = field(default_factory=dict)
    """Sandboxes that have found no room since it was looked last."""
    pressed: bool = False
    """Room was taken from guests since it was looked last."""

    # Policies.

    async def all(self, caller: Caller) -> Sequence[WarmView]:
        """As Service.warm_policies."""
        _operator(caller)
        policies, guests = await self.store.read(lambda conn: (warmth.policies(conn), warmth.guests(conn)))
        found: list[WarmView] = []
        for policy in policies:
            wanted = await self.resolved(policy)
            mine = [] if isinstance(wanted, AtollError) else [guest for guest in guests if guest.pool == wanted.pool]
            ready = sum(guest.state is State.READY for guest in mine)
            starting = sum(guest.state in warming.KEPT for guest in mine) - ready
            template = await self.store.read(lambda conn, policy=policy: tenancy.template(conn, policy.template_id))  # type: ignore[misc]
            found.append(WarmView(policy, policy.template_id if template is None else template.name, ready, starting))
        return found

    async def put(self, caller: Caller, reference: str, request: CreateRequest, *, count: int) -> WarmView:
        """As Service.keep_warm."""
        _operator(caller)
        if not 0 <= count <= COUNT_MAX:
            raise Refused(Code.INVALID_REQUEST, f"count {count} is outside 0..{COUNT_MAX}")
        template = await self.templates.get(caller, reference)
        spec = await self._spec(request, template)
        if pool_of(spec) is None:
            raise Refused(
                Code.NOT_SUPPORTED, f"class {spec.class_name} begins guests again that have ended; such ones cannot be made ahead"
            )
        now = self.clock.now()
        policy = WarmPolicy(template.id, spec.class_name, spec.cpu_millis, spec.memory_mib, spec.disk_mib, count, updated_at=now)
        most = self.configuration.current.deployment.warm_guests
        data: dict[str, str | int | float | None] = {"template": template.name, "class": spec.class_name, "count": count}
        data |= {"cpu_millis": spec.cpu_millis, "memory_mib": spec.memory_mib, "disk_mib": spec.disk_mib}

        def work(conn: sa.Connection) -> WarmPolicy:
            others = sum(one.count for one in warmth.policies(conn) if one.kind != policy.kind)
            if count and most is not None and others + count > most:
                raise Refused(Code.WARM_QUOTA, f"{others} guests are kept warm already, at most {most} are allowed", limit=most)
            done = warmth.put_policy(conn, policy)
            operations.audit(conn, Act(caller.actor(), Action.TEMPLATE_WARM, template.id, data=data), at=now)
            return done

        done = await self.store.write(work)
        self.changed.set()
        return WarmView(done, template.name, 0, 0)

    async def resolved(self, policy: WarmPolicy) -> Wanted | AtollError:
        """What this policy keeps, by the template's present build and the present document; or why that is nothing."""
        template = await self.store.read(lambda conn: tenancy.template(conn, policy.template_id))
        if template is None:
            return Refused(Code.TEMPLATE_NOT_FOUND, f"there is no template {policy.template_id} any more")
        request = CreateRequest(
            template=template.id,
            class_name=policy.class_name,
            cpu_millis=policy.cpu_millis,
            memory_mib=policy.memory_mib,
            disk_mib=policy.disk_mib,
        )
        try:
            spec = await self._spec(request, template)
        except AtollError as error:
            return error
        pool = pool_of(spec)
        return Refused(Code.NOT_SUPPORTED, "its class begins guests again") if pool is None else Wanted(policy, pool, spec)

    async def _spec(self, request: CreateRequest, template: Template) -> Spec:
        policy = resolve.class_of(request, self.configuration.current)
        # As a create resolves it, or nobody could claim what is kept warm.
        spec = resolve.resolve(request, template=template, policy=policy)
        spec = self.reconciler.directory.on_its_rung(spec, policy.rungs(), now=self.clock.now())
        return spec if self.manifests is None else replace(spec, manifest=await self.manifests.of(template))

    # Guests.

    async def make(self, one: Making, *, beside: frozenset[str]) -> bool:
        """Begin one guest. False where another process has made enough meanwhile. *Errors*: those of the store."""
        wanted, now = one.wanted, self.clock.now()
        template = await self.store.read(lambda conn: tenancy.template(conn, wanted.policy.template_id))
        if template is None:
            return False
        sandbox_id = SandboxId(new_id(Prefix.SANDBOX, self.dice))
        # Nothing of any team is in it: what a create brings comes with its claim.
        sealed, digest = self.orders.seal(sandbox_id, env=dict(template.env), files=[], exposes=False)
        sandbox = Sandbox(
            id=sandbox_id,
            revision=1,
            team_id=OWN_TEAM,
            client_id=OWN_CLIENT,
            state=State.PENDING,
            spec=_ahead(wanted.spec, one.prefer_host),
            generation=1,
            created_at=now,
            end_at=None,
            end_revision=0,
            payload_digest=digest,
            deadline_at=now,
            claimable=wanted.pool,
        )

        def work(conn: sa.Connection) -> None:
            made = warmth.accept(
                conn, sandbox, wanted.policy, payload=sealed, most=one.most, beside=beside, event_id=self.reconciler.event_id()
            )
            if not made:
                raise Refused(Code.WARM_SURPLUS, "there are as many as are wanted")

        self.store.require_room()
        try:
            placed = await self.reconciler.accept(sandbox, work)
        except Refused as refused:
            if refused.code is Code.WARM_SURPLUS:
                return False
            raise
        await self.reconciler.settle(sandbox_id, known=placed)
        return True

    # Claims.

    def shortage(self, sandbox: Sandbox) -> None:
        """For the reconciler: no host has room for it. What is made ahead goes first."""
        if sandbox.claimable is None and self.pools:
            self.short_of[sandbox.id] = sandbox.spec
            self.changed.set()

    async def make_room(self, sandbox: Sandbox) -> bool:
        """Give guests up so that a sandbox at rest can come back, and wait until they are gone. False: that would not be enough, or takes long."""
        if not self.pools:
            return False
        guests, found = await self.store.read(lambda conn: (warmth.guests(conn), facts.load(conn, sandbox.id)))
        if found is None:
            return False
        spec, need = sandbox.spec, None
        if found.placement is not None and found.placement.holding is not Holding.NONE:
            # It comes back where it is, and holds some of what it needs.
            spec = replace(spec, require_host=found.placement.host_id)
            need = found.placement.vector - held(found.placement)
        gone = warming.give_up(spec, guests, list(self.reconciler.directory.adverts()), now=self.clock.now(), need=need)
        for sandbox_id in gone:
            await self.reconciler.apply(
                sandbox_id, ReleaseRequested(str(Code.WARM_GIVEN_UP)), about=lambda known: known.sandbox.team_id == OWN_TEAM
            )
        if gone:
            self.pressed = True
            self.reconciler.meter.metrics.count(m.WARM_GIVEN_UP, by=len(gone))
        return bool(gone) and await self._are_gone(gone)

    async def _are_gone(self, sandbox_ids: Sequence[str]) -> bool:
        until = self.clock.boot() + ROOM_S
        for sandbox_id in sandbox_ids:
            with self.reconciler.hub.watch(sandbox_id) as changed:
                while True:
                    changed.clear()
                    now = await self.store.read(lambda conn, sandbox_id=sandbox_id: sandboxes.get(conn, sandbox_id))  # type: ignore[misc]
                    if now is None or now.state in TERMINAL:
                        break
                    left_s = until - self.clock.boot()
                    if left_s <= 0:
                        return False
                    # Another replica's word of it may be lost.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(min(left_s, LOOK_AGAIN_S)):
                            await changed.wait()
        return True

    async def claim(
        self, wanted: Sandbox, *, own_env: bool, payload: Payload, admit: Callable[[sa.Connection, Sandbox], None]
    ) -> facts.Committed | None:
        """Give the create that would make `wanted` a guest that is there; None: there is none, and nothing was committed.

        `admit`: looks first, in the same transaction, and records the create. *Errors*: those of `admit`; IntegrityError when its request
        id is taken.
        """
        pool = claiming.may_claim(wanted.spec, own_env=own_env) if self.pools else None
        if pool is None or pool not in self.pools:
            return None
        there = await self.store.read(lambda conn: warmth.candidates(conn, pool))
        among = self._in_order(there, wanted)
        if not among:
            self.reconciler.meter.metrics.count(m.WARM_CLAIMS, "none")
            self.changed.set()
            return None
        done = await self.reconciler.claim(wanted, among, payload=payload, admit=admit)
        self.reconciler.meter.metrics.count(m.WARM_CLAIMS, "none" if done is None else "claimed")
        self.changed.set()
        return done

    def _in_order(self, there: Sequence[tuple[str, str]], wanted: Sandbox) -> list[str]:
        """Those that it may have: the host that it prefers first, then in an order of its own, so that racers begin at different ones."""
        hosts = {host_id: self.reconciler.directory.host(host_id) for _, host_id in there}
        now, spec = self.clock.now(), wanted.spec
        fit = {host_id: host for host_id, host in hosts.items() if claiming.suits(host, spec, now=now) and host is not None}
        mine = ring(wanted.id)

        def rank(one: tuple[str, str]) -> tuple[bool, int]:
            host = fit[one[1]]
            return spec.prefer_host not in (host.id, host.name), ring(one[0]) ^ mine

        return [sandbox_id for sandbox_id, _ in sorted((one for one in there if one[1] in fit), key=rank)]


def _ahead(spec: Spec, prefer_host: str) -> Spec:
    """As a guest of this spec is made ahead: where nobody is kept waiting, and tried once; it ends by itself when it has become old."""
    return replace(
        spec,
        timeout_s=int(LIFE_S),
        timeout_s_max=int(LIFE_S),
        on_end=OnEnd.KILL,
        # Lost, or not heard of for long, it is made anew: nobody is there who would give it a word, or resume it.
        on_loss=OnLoss.END,
        on_lease_expiry=OnLeaseExpiry.END,
        auto_resume=False,
        no_capacity_s=0.0,
        attempts_max=1,
        placement_policy=PlacementPolicy.SPREAD,
        placement_choices=CHOICES,
        prefer_host=prefer_host,
        require_host=None,
    )


def _operator(caller: Caller) -> None:
    if not caller.operator:
        raise Refused(Code.FORBIDDEN, "only operators see and change what is kept warm")

"""The invariants can fail: each fence that is broken on purpose is noticed, and by the promise that it stands for."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from atoll.agent import agent as agents
from atoll.agent import handshake, leases, session, settling, steps
from atoll.base.units import ZERO
from atoll.control.loops.fencing import SKEW_S, Fencing
from atoll.control.loops.following import Following
from atoll.control.loops.warming import WarmKeeper
from atoll.control.sandboxes import warming
from atoll.control.sessions.orders import Orders
from atoll.domain.command import Kind as Wanted
from atoll.domain.host import LEASE_S
from atoll.domain.placement import Holding
from atoll.planning import claiming, placing, reconcile, replacing, storing
from atoll.planning import restoring as planning_restoring
from atoll.planning.fleet import Fleet
from atoll.store import facts, hints, hosts, moments, restoring, tallies
from atoll.store.prepared import Prepared
from atoll.store.tables import HOSTS, SANDBOXES
from atoll.testing.sim.scenario import Fault, Kind, Scenario, Step, Wish
from atoll.testing.sim.shrink import shrink, signature
from atoll.testing.sim.story import simulate
from atoll.testing.sim.world import World
from atoll.wire import agent as wire

pytestmark = pytest.mark.usefixtures("quiet")

Break = Callable[[pytest.MonkeyPatch], None]

BUSY = tuple(Step(1.0 + n / 5, n, Wish.CREATE, 100) for n in range(8))
ONE = (Step(1.0, 0, Wish.CREATE, 600),)
CALM = Scenario(seed=1, hosts=1, replicas=1, fate_s=120.0, steps=ONE)


def with_faults(*faults: Fault, **changes: Any) -> Scenario:
    return replace(CALM, faults=faults, **changes)


def a_host_is_not_locked(patch: pytest.MonkeyPatch) -> None:
    """Two replicas sum a host's holdings beside each other: write skew."""
    patch.setattr(facts, "_HOST_LOCKED", Prepared(sa.select(HOSTS).where(HOSTS.c.id == sa.bindparam("of_id"))))


def revisions_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """What was decided on an older row is written all the same."""
    late = SANDBOXES.c.revision >= sa.bindparam("read")
    patch.setattr(facts, "_CHANGED_SANDBOX", Prepared(sa.update(SANDBOXES).where(SANDBOXES.c.id == sa.bindparam("of_id"), late)))


def a_gap_is_not_made_good(patch: pytest.MonkeyPatch) -> None:
    """What others told while the connection was broken is never read."""

    async def nothing(_self: Following) -> None:
        return

    patch.setattr(Following, "_everything", nothing)


def nobody_is_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hints, "sandbox", lambda _conn, _sandbox_id: None)


def hosts_give_no_account(patch: pytest.MonkeyPatch) -> None:
    """An agent takes a store that was restored for the one that it knows."""

    async def settle(self: settling.Settling, incarnation: str) -> None:
        await self.ledger.keep_incarnation(incarnation)

    patch.setattr(settling.Settling, "follow", settle)


def a_restore_is_no_other_life(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restoring, "after", lambda *lives, chance: lives[0])


def what_waited_is_placed_after_a_restore(patch: pytest.MonkeyPatch) -> None:
    """Though it may have got a host since the backup."""
    patch.setattr(restoring, "_end_unplaced", lambda _conn, **_: None)


def an_outlived_replica_goes_on(patch: pytest.MonkeyPatch) -> None:
    """It began before the restore, and answers agents as if nothing had happened."""

    class Whichever(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, _other: object) -> bool:
            return True

        def __ne__(self, _other: object) -> bool:
            return False

    right = hosts.session
    patch.setattr(hosts, "session", lambda conn, host_id: replace(right(conn, host_id), incarnation=Whichever()))
    patch.setattr(restoring, "require_life", lambda _conn, _incarnation: None)


def a_lease_of_another_replica_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Each counts from the last poll that came to itself."""

    def left_s(self: Fencing, host: Any) -> float:
        _, since = self._renewed.setdefault(host.id, (None, self.clock.boot()))
        return since + LEASE_S + SKEW_S - self.clock.boot()

    patch.setattr(Fencing, "_left_s", left_s)


def nobody_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A guest that was ready is replaced by itself."""
    patch.setattr(replacing, "waiting_for_word", replacing.next_generation)


def a_certificate_frees(patch: pytest.MonkeyPatch) -> None:
    """The client's word about the outside counts as one about the host."""
    right = reconcile._authorized

    def freeing(known: Any, stimulus: Any, now: float) -> Any:
        outcome = right(known, stimulus, now)
        if outcome is None or not outcome.older:
            return outcome
        gone = tuple(replace(one, holding=Holding.NONE, vector=ZERO) for one in outcome.older)
        return replace(outcome, older=gone, sandbox=replace(outcome.sandbox, unseen=0))

    patch.setattr(reconcile, "_authorized", freeing)


def capacity_is_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placing, "refusal", lambda _host, _spec, *, used: None)
    patch.setattr(Fleet, "choose", lambda self, _spec, **_: next((advert.host.id for advert in self.adverts()), None))


def a_clock_frees(patch: pytest.MonkeyPatch) -> None:
    """A deadline that is missed counts as an absence."""
    tick = reconcile._tick

    def hasty(facts: Any, now: float) -> Any:
        sandbox, placement = facts.sandbox, facts.placement
        if sandbox.state == "releasing" and sandbox.deadline_at is not None and now >= sandbox.deadline_at:
            return reconcile._gone(facts, placement, None, now)
        return tick(facts, now)

    patch.setattr(reconcile, "_tick", hasty)


def a_fence_frees_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fencing, "_left_s", lambda _self, _host: 0.0)


def the_lease_ends_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(leases, "_lapsed", lambda _record: None)


def absence_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    async def blind(_driver: Any, _placement_id: str) -> list[str]:
        return []

    patch.setattr(steps, "_look", blind)


def ends_are_counted_too_long(patch: pytest.MonkeyPatch) -> None:
    longer = leases.rule_of

    def late(end: wire.End, *, sent_boot: float) -> Any:
        return longer(end, sent_boot=sent_boot + 300.0)

    patch.setattr(agents, "Session", _with_rule(late))


def ends_are_counted_from_another_time(patch: pytest.MonkeyPatch) -> None:
    right = leases.rule_of

    def early(end: wire.End, *, sent_boot: float) -> Any:
        return right(end, sent_boot=sent_boot - 60.0)

    patch.setattr(agents, "Session", _with_rule(early))


def _with_rule(rule: Any) -> Any:
    from atoll.agent import session

    class Session(session.Session):
        async def _take_ends(self, ends: Any, sent_boot: float) -> bool:
            before, session.rule_of = session.rule_of, rule
            try:
                return await super()._take_ends(ends, sent_boot)
            finally:
                session.rule_of = before

        async def _take(self, answer: Any, sent_boot: float) -> bool:
            before, session.rule_of = session.rule_of, rule
            try:
                return await super()._take(answer, sent_boot)
            finally:
                session.rule_of = before

    return Session


def control_does_not_say_what_was_carried_out(patch: pytest.MonkeyPatch) -> None:
    said = Orders.command

    async def forgetful(self: Orders, *args: Any, **options: Any) -> Any:
        command, payload = await said(self, *args, **options)
        return command.model_copy(update={"carried_out": False}), payload

    patch.setattr(Orders, "command", forgetful)


def payloads_leave_unseen(patch: pytest.MonkeyPatch) -> None:
    from atoll.planning import reconcile

    patch.setattr(reconcile, "_exposed", lambda *_: None)


def what_was_exposed_is_replaced(patch: pytest.MonkeyPatch) -> None:
    from atoll.agent import steps
    from atoll.planning import replacing

    patch.setattr(replacing, "may_replace", lambda sandbox: sandbox.started_at is None and sandbox.attempts < sandbox.spec.attempts_max)
    meet = steps.Steps._meet

    async def fails_at_last(self: Any, record: Any, address: str) -> Any:
        await meet(self, record, address)
        raise RuntimeError("after its guest was given everything")

    patch.setattr(steps.Steps, "_meet", fails_at_last)


def payloads_are_not_sealed(patch: pytest.MonkeyPatch) -> None:
    from atoll.store.sealing import Sealer

    patch.setattr(Sealer, "seal", lambda _self, clear, **_: clear)
    patch.setattr(Sealer, "open", lambda _self, sealed, **_: sealed)


def a_removed_one_is_still_wanted(patch: pytest.MonkeyPatch) -> None:
    away = reconcile._ordered_away

    def undecided(placement: Any, reason: str) -> Any:
        after = away(placement, reason)
        return replace(after, desired=Wanted.ENSURE_RUNNING) if after is not placement else after

    patch.setattr(reconcile, "_ordered_away", undecided)


def a_guest_is_ready_before_it_is_initialised(patch: pytest.MonkeyPatch) -> None:
    async def at_once(_self: Any, _record: Any, _address: str) -> str:
        return "1"

    patch.setattr(steps.Steps, "_meet", at_once)


def an_earlier_save_counts_for_a_later_one(patch: pytest.MonkeyPatch) -> None:
    """What the store had of a sandbox before it ran again is taken for what it was suspended with."""
    right, last = storing.stored, dict[str, Any]()

    def stale(sandbox: Any, report: Any, *, now: float) -> Any:
        if report.moment is None and sandbox.id in last:
            report = replace(report, moment=last[sandbox.id])
        last.setdefault(sandbox.id, report.moment)
        if last[sandbox.id] is None:
            del last[sandbox.id]
        return right(sandbox, report, now=now)

    patch.setattr(storing, "stored", stale)


def what_is_needed_is_collected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(moments, "needed", lambda _conn: set())


def nothing_is_collected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(World, "collect", lambda _world: None)


def what_rests_in_the_store_is_not_ordered_away(patch: pytest.MonkeyPatch) -> None:
    """Its copy is wanted running, as if nobody had left it."""
    away = storing.ordered_away

    def kept(placement: Any, reason: str) -> Any:
        after = away(placement, reason)
        rests = placement.holding is Holding.SAVED and placement.desired is Wanted.ENSURE_SUSPENDED
        return replace(after, desired=Wanted.ENSURE_RUNNING, desired_reason=storing.RESUMED) if rests else after

    patch.setattr(storing, "ordered_away", kept)


def a_claimed_guest_is_still_claimable(patch: pytest.MonkeyPatch) -> None:
    right = claiming.claimed

    def claimed(found: Any, stimulus: Any, now: float) -> Any:
        outcome = right(found, stimulus, now)
        return outcome and replace(outcome, sandbox=replace(outcome.sandbox, claimable=found.sandbox.claimable))

    patch.setattr(claiming, "claimed", claimed)


def a_claimed_guest_keeps_what_it_was_made_with(patch: pytest.MonkeyPatch) -> None:
    """Its agent takes what was ready for nobody for what is ready."""
    for module in (steps, handshake, session):
        patch.setattr(module, "is_claimed", lambda _record: False)


def what_is_made_ahead_is_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tallies, "_counts", lambda _team_id: True)


def guests_of_an_old_build_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(claiming, "_FIXED", tuple(name for name in claiming._FIXED if name not in ("image", "manifest")))
    anew = functools.lru_cache(claiming.pool_of.__wrapped__)
    for module in (claiming, warming):
        patch.setattr(module, "pool_of", anew)


def guests_that_nobody_wants_stay(patch: pytest.MonkeyPatch) -> None:
    async def kept(_self: WarmKeeper, _sandbox_id: str, _why: Any) -> None:
        return

    patch.setattr(WarmKeeper, "_release", kept)


def whose_it_is_is_not_asked_after_a_restore(patch: pytest.MonkeyPatch) -> None:
    """On record it was nobody's; its host knows better."""
    patch.setattr(planning_restoring, "_claimed_since", lambda sandbox, *_: sandbox)


MOVED = (
    Step(1.0, 0, Wish.CREATE, 900),
    Step(5.0, 0, Wish.SUSPEND),
    Step(20.0, 0, Wish.RESUME, 900),
    Step(30.0, 0, Wish.SUSPEND),
    Step(50.0, 0, Wish.RESUME, 900),
)
STORED = replace(CALM, hosts=2, stored=True, local_s=1.0, steps=MOVED)
RESTS = replace(STORED, steps=MOVED[:2], fate_s=400.0)
TWO = replace(CALM, replicas=2)
WARM = (Step(1.0, 0, Wish.WARM, count=3), Step(20.0, 1, Wish.CROWD, 900, count=5))
WARMED = replace(CALM, hosts=2, steps=(*WARM, Step(60.0, 0, Wish.REBUILD), Step(90.0, 0, Wish.WARM, count=1)))
WARM_RESTORED = replace(
    CALM,
    hosts=2,
    faults=(Fault(15.0, Kind.RESTORE, for_s=10.0),),
    steps=(*WARM[:1], Step(18.0, 1, Wish.CROWD, 900, count=3), Step(40.0, 2, Wish.CROWD, 900, count=3)),
)
RESTORED = with_faults(Fault(3.0, Kind.RESTORE, for_s=5.0), steps=(*ONE, Step(4.0, 1, Wish.CREATE, 600)))
FULL = with_faults(
    *(Fault(2.0, Kind.DRAIN, target=n, for_s=3.0) for n in range(2)),
    Fault(3.0, Kind.RESTORE, for_s=5.0),
    Fault(7.5, Kind.PARTITION, for_s=60.0, word="both"),
    # The backup knows the hosts as drained.
    *(Fault(9.0, Kind.DRAIN, target=n, for_s=1.0) for n in range(2)),
    steps=(Step(2.5, 0, Wish.CREATE, 600),),
    hosts=2,
)
REPLACED = replace(CALM, hosts=2, on_loss="replace", on_lease_expiry="keep", fate_s=300.0)
AUTHORIZED = tuple(Step(float(at), 0, Wish.AUTHORIZE) for at in range(60, 300, 10))
RELEASES = (*ONE, Step(5.0, 0, Wish.RELEASE))
CASES = [
    (hosts_give_no_account, RESTORED, r"has plc_\w+, which nobody wants|is on no record"),
    (a_restore_is_no_other_life, RESTORED, r"has plc_\w+, which nobody wants|is on no record|CONFLICT"),
    (nobody_is_waited_for, replace(REPLACED, hosts=1, faults=(Fault(5.0, Kind.REBOOT, for_s=2.0),)), "is replaced without a word"),
    (a_gap_is_not_made_good, replace(TWO, faults=(Fault(0.5, Kind.HINTS_LOST, for_s=30.0),)), "control . routes"),
    (nobody_is_told, TWO, "control . routes"),
    (capacity_is_not_summed, replace(CALM, steps=BUSY), "has granted more than it has"),
    (
        a_clock_frees,
        with_faults(Fault(4.0, Kind.PARTITION, for_s=200.0, word="both"), steps=RELEASES),
        r"is released and runs|runs and holds nothing",
    ),
    (a_fence_frees_at_once, with_faults(Fault(5.0, Kind.VANISH, word="fence")), r"and runs on|runs and holds nothing"),
    (the_lease_ends_nothing, with_faults(Fault(5.0, Kind.VANISH, word="fence"), fate_s=500.0), "is failed and runs on"),
    (a_removed_one_is_still_wanted, replace(CALM, steps=RELEASES), "is still releasing"),
    (a_guest_is_ready_before_it_is_initialised, CALM, "was believed ready and was never initialised"),
    (absence_is_not_looked_at, with_faults(Fault(3.0, Kind.STUCK, for_s=60.0), steps=RELEASES), "was believed absent and is there"),
    (ends_are_counted_too_long, replace(CALM, steps=(Step(1.0, 0, Wish.CREATE, 30),)), "should have ended"),
    (ends_are_counted_from_another_time, replace(CALM, steps=(Step(1.0, 0, Wish.CREATE, 100),)), "too early"),
    (
        control_does_not_say_what_was_carried_out,
        with_faults(
            Fault(5.0, Kind.AGENT_CRASH, word="disk", for_s=100.0), Fault(40.0, Kind.REBOOT, word="wiped", for_s=2.0), fate_s=200.0
        ),
        # A second guest would be begun, but gets nothing: that one fence is broken is noticed by the next one.
        "another guest is begun in its place|ends for BOOTSTRAP_DELIVERED: it was ready",
    ),
    (payloads_are_not_sealed, CALM, "a secret is at rest"),
    (
        an_earlier_save_counts_for_a_later_one,
        replace(STORED, faults=(Fault(25.0, Kind.MOMENTS_AWAY, for_s=18.0),)),
        r"comes back as plc_\w+ with memory 1, and had 2",
    ),
    (what_is_needed_is_collected, RESTS, "rests in the artifact store, which does not have it"),
    (nothing_is_collected, RESTS, "the artifact store still has"),
    (what_rests_in_the_store_is_not_ordered_away, RESTS, r"and its sandbox has left it|has plc_\w+"),
    (payloads_leave_unseen, CALM, "nobody has written down as exposed"),
    (a_claimed_guest_is_still_claimable, WARMED, "and for anybody to take"),
    (a_claimed_guest_keeps_what_it_was_made_with, WARMED, "its guest has not got what that brought|comes to rest|still provisioning"),
    (what_is_made_ahead_is_counted, WARMED, "are somebody's, and what is counted is"),
    (guests_of_an_old_build_stay, WARMED, "of a build that is none any more"),
    (guests_that_nobody_wants_stay, WARMED, "are kept warm, and|of a build that is none any more"),
    (whose_it_is_is_not_asked_after_a_restore, WARM_RESTORED, "was somebody's"),
    (what_was_exposed_is_replaced, CALM, r"was given its payload as \w+, and is replaced without a word"),
]


@functools.cache
def goes_well(scenario: Scenario) -> bool:
    """As nothing is broken yet; several cases have one scenario."""
    return simulate(scenario).error is None


@pytest.mark.parametrize(("breaking", "scenario", "noticed"), CASES, ids=[f"{case[0].__name__}-{n}" for n, case in enumerate(CASES)])
def test_a_broken_fence_is_noticed(breaking: Break, scenario: Scenario, noticed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert goes_well(scenario), "the scenario itself breaks something"
    breaking(monkeypatch)
    error = simulate(scenario).error
    assert error is not None, "nobody noticed"
    assert re.search(noticed, str(error)), error


LATE = replace(CALM, replicas=3, fate_s=20.0, faults=(Fault(0.5, Kind.STORE_LATE, for_s=20.0, share=1.0),))
CROWD = tuple(Step(1.0, n, Wish.CREATE, 20) for n in range(12))
RUSH = tuple(Step(1.0 + n / 4, n % 2, (Wish.CREATE, Wish.EXTEND, Wish.RELEASE)[n % 3], 20 + n) for n in range(60))
SOON = 25
"""Within so many seeds a broken fence is noticed that chance has to find."""
FOUND_BY_CHANCE = [
    (
        a_certificate_frees,
        replace(REPLACED, faults=(Fault(5.0, Kind.PARTITION, for_s=280.0, word="both"),), steps=(*ONE, *AUTHORIZED)),
        "runs and holds nothing|runs twice",
    ),
    (what_waited_is_placed_after_a_restore, FULL, "runs twice"),
    (
        a_lease_of_another_replica_is_forgotten,
        replace(TWO, fate_s=500.0, faults=(Fault(110.0, Kind.VANISH, word="fence"),)),
        r"is failed and runs on|runs and holds nothing",
    ),
    (
        an_outlived_replica_goes_on,
        replace(TWO, steps=RESTORED.steps, faults=(Fault(3.0, Kind.RESTORE, for_s=5.0), Fault(7.5, Kind.CONTROL_FREEZE, for_s=3.0))),
        r".",
    ),
    (a_host_is_not_locked, replace(LATE, steps=CROWD), "has granted more than it has"),
    (revisions_are_not_compared, replace(LATE, steps=RUSH), "from revision"),
]


@pytest.mark.parametrize(("breaking", "scenario", "noticed"), FOUND_BY_CHANCE, ids=[case[0].__name__ for case in FOUND_BY_CHANCE])
def test_chance_finds_a_broken_fence_soon(breaking: Break, scenario: Scenario, noticed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(SOON):
        with monkeypatch.context() as broken:
            breaking(broken)
            error = simulate(replace(scenario, seed=seed)).error
        if error is not None:
            assert re.search(noticed, str(error)), error
            assert simulate(replace(scenario, seed=seed)).error is None, "the scenario itself breaks something"
            return
    pytest.fail(f"nobody noticed in {SOON} seeds")


def test_what_fails_is_shrunk_to_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole world that breaks a promise, down to the partition and the release that are needed for it."""
    a_clock_frees(monkeypatch)
    noise = tuple(Fault(float(n), kind, for_s=1.0, share=0.2) for n, kind in enumerate((Kind.SLOW, Kind.DRAIN, Kind.STORE_SLOW), start=20))
    steps = (*RELEASES, Step(30.0, 1, Wish.CREATE, 100), Step(31.0, 1, Wish.EXTEND, 200))
    broken = simulate(with_faults(Fault(4.0, Kind.PARTITION, for_s=200.0, word="both"), *noise, steps=steps))
    assert broken.error is not None
    smallest = shrink(broken, tries_max=40)
    assert signature(smallest.error) == signature(broken.error)
    assert [fault.kind for fault in smallest.scenario.faults] == [Kind.PARTITION]
    assert [step.wish for step in smallest.scenario.steps] == [Wish.CREATE, Wish.RELEASE]
    assert simulate(Scenario.from_json(smallest.scenario.to_json())).trace == smallest.trace, "played again, it is another story"

"""Ends and the lease as numbers: what is enforced when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.agent.intake import judge
from atoll.agent.leases import Deadlines, rule_of
from atoll.agent.record import EndRule, with_end
from atoll.domain.spec import OnLeaseExpiry
from atoll.wire.agent import End
from tests.unit.agent.test_intake import PLACEMENT, command


class Clock:
    """Both readings move on their own."""

    def __init__(self):
        self.wall, self.up = 1_800_000_000.0, 1000.0

    def now(self):
        return self.wall

    def boot(self):
        return self.up


class Sleeper:
    """Nobody sleeps here."""

    def poke(self):
        return None


class Scene:
    """One record, and what was decided about it."""

    def __init__(self, expiry=OnLeaseExpiry.END, lease_until=None):
        spec = replace(command().spec, on_lease_expiry=expiry)
        self.record = judge(None, command(spec=spec), epoch="epo_1", boot_id="b", quarantine=False).record
        self.clock = Clock()
        self.decided = []
        self.deadlines = Deadlines(clock=self.clock, alarm=Sleeper(), records=[self.record], decide=self.decide, lease_until=lease_until)

    def decide(self, placement_id, make):
        after = make(self.record)
        if after is not None:
            self.decided.append((placement_id, after.ended_by))

    def end_in(self, seconds, revision=1):
        rule = EndRule(revision, self.clock.boot() + seconds)
        self.record = with_end(self.record, rule)
        self.deadlines.watch(PLACEMENT, rule)

    def pass_s(self, seconds, *, wall=None):
        self.clock.up += seconds
        self.clock.wall += seconds if wall is None else wall
        self.deadlines.enforce()


def test_an_end_is_counted_from_the_sending():
    assert rule_of(End(placement_id="p", revision=3, remaining_s=20.0), sent_boot=100.0) == EndRule(3, 120.0)


def test_an_answer_that_is_overtaken_shortens_nothing():
    scene = Scene()
    assert scene.deadlines.renew(sent_boot=1000.0, lease_s=300.0) == 1300.0
    assert scene.deadlines.renew(sent_boot=990.0, lease_s=300.0) == 1300.0
    assert scene.deadlines.renew(sent_boot=1001.0, lease_s=10.0) == 1300.0
    assert scene.deadlines.renew(sent_boot=1010.0, lease_s=300.0) == 1310.0


@pytest.mark.parametrize("hour", [3600.0, -3600.0])
def test_an_hour_s_step_of_the_wall_clock_ends_nothing_and_keeps_nothing_too_long(hour):
    scene = Scene(lease_until=1300.0)
    scene.end_in(100.0)
    scene.pass_s(99.0, wall=hour)
    assert scene.decided == []
    scene.pass_s(1.5, wall=-2 * hour)
    assert scene.decided == [(PLACEMENT, "end_at")]


@pytest.mark.parametrize("hour", [3600.0, -3600.0])
def test_an_hour_s_step_moves_no_lease(hour):
    scene = Scene(lease_until=1300.0)
    scene.pass_s(299.0, wall=hour)
    assert not scene.deadlines.lapsed
    assert scene.decided == []
    scene.pass_s(1.5, wall=hour)
    assert scene.deadlines.lapsed
    assert scene.decided == [(PLACEMENT, "lease")]


def test_a_lease_that_comes_too_late_is_none():
    """The answer was so long on its way that what it gives has run out already."""
    scene = Scene(lease_until=1300.0)
    scene.pass_s(301.0)
    assert scene.decided == [(PLACEMENT, "lease")]
    scene.deadlines.renew(sent_boot=scene.clock.boot() - 310.0, lease_s=300.0)
    assert scene.deadlines.lapsed
    scene.deadlines.renew(sent_boot=scene.clock.boot(), lease_s=300.0)
    assert not scene.deadlines.lapsed


@pytest.mark.parametrize(("expiry", "may"), [(OnLeaseExpiry.END, False), (OnLeaseExpiry.KEEP, True), (OnLeaseExpiry.SUSPEND, False)])
def test_whether_a_guest_may_be_begun_without_a_lease(expiry, may):
    scene = Scene(expiry, lease_until=1300.0)
    assert scene.deadlines.may_start(scene.record)
    scene.clock.up += 301.0
    assert scene.deadlines.may_start(scene.record) is may

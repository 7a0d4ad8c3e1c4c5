from dataclasses import replace

import pytest

from atoll.base.units import ZERO, Vector
from atoll.domain.machine import IllegalMove
from atoll.domain.placement import Grant, Holding, Observed, Report, Stale, grant, held, observe
from tests.builders import placement, sandbox

PLACEMENT = placement(sandbox(), generation=3, seq=5, observed=Observed.STARTING, applied_revision=2, address="10.64.0.2")


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (Report(6, Observed.RUNNING, generation=2), Stale.GENERATION),
        (Report(6, Observed.RUNNING, generation=4), Stale.GENERATION),
        (Report(5, Observed.RUNNING, generation=3), Stale.SEQUENCE),
        (Report(1, Observed.ABSENT, generation=3), Stale.SEQUENCE),
    ],
)
def test_a_stale_report_says_why_and_changes_nothing(report: Report, why: Stale) -> None:
    assert observe(PLACEMENT, report) is why


def test_a_tombstone_absorbs() -> None:
    gone = replace(PLACEMENT, observed=Observed.ABSENT)
    assert observe(gone, Report(99, Observed.RUNNING, generation=3)) is Stale.TOMBSTONE


def test_a_report_is_the_whole_state() -> None:
    seen = observe(PLACEMENT, Report(7, Observed.RUNNING, 3, applied_revision=1, address="10.64.0.9", ready=True, detail="up"))
    assert not isinstance(seen, Stale)
    assert (seen.observed, seen.seq, seen.ready, seen.address, seen.detail) == (Observed.RUNNING, 7, True, "10.64.0.9", "up")
    assert seen.applied_revision == 2, "what was carried out stays carried out"
    later = observe(seen, Report(8, Observed.RUNNING, 3))
    assert not isinstance(later, Stale)
    assert later.ready is False
    assert later.detail is None
    assert later.address == "10.64.0.9", "an address that is not repeated still stands"


@pytest.mark.parametrize(
    ("holding", "expected"),
    [
        (Holding.RESERVED, Vector(1000, 512, 2048, 1)),
        (Holding.ACTIVE, Vector(1000, 512, 2048, 1)),
        (Holding.PAUSED, Vector(0, 512, 2048, 1)),
        (Holding.STOPPED, Vector(0, 0, 2048, 0)),
        (Holding.SAVED, Vector(0, 0, 2048, 0)),
        (Holding.CLEANUP_PENDING, Vector(1000, 512, 2048, 1)),
        (Holding.NONE, ZERO),
    ],
)
def test_what_a_holding_counts_for(holding: Holding, expected: Vector) -> None:
    assert held(replace(PLACEMENT, holding=holding)) == expected


def test_nothing_comes_after_none() -> None:
    gone = grant(PLACEMENT, Grant.GONE)
    assert gone.holding is Holding.NONE
    for event in Grant:
        with pytest.raises(IllegalMove):
            grant(gone, event)

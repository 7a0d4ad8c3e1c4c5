"""What the machine holds against what the journal says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.agent.inventory import Fate, take_stock
from atoll.agent.record import Record
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.drivers.port import Held

READY = {"observed": Observed.RUNNING, "ready": True, "applied_revision": 1}


def record(n=1, **more) -> Record:
    return replace(Record(f"plc_{n}", f"i{n}", "tea", 1, Kind.ENSURE_RUNNING, 1, "c", "d", "boot"), **more)


def held(n=1, sandbox="same", generation=1) -> Held:
    return Held(f"plc_{n}", f"i{n}" if sandbox == "same" else sandbox, generation, (f"thing {n}",))


@pytest.mark.parametrize(
    ("known", "fate"),
    [
        (record(**READY), Fate.ADOPT),
        (record(), Fate.RESUME),
        (record(observed=Observed.STARTING), Fate.RESUME),
        (record(ended_by="end_at", **READY), Fate.RESUME),
        (record(desired=Kind.ENSURE_ABSENT, desired_revision=2, **READY), Fate.RESUME),
        (record(desired_revision=2, **READY), Fate.ADOPT),
        (record(observed=Observed.ABSENT), Fate.REST),
        (record(observed=Observed.ERROR, failed_revision=1), Fate.REST),
        (record(boot_id="earlier", **READY), Fate.LOST),
        (record(boot_id="earlier"), Fate.LOST),
        (record(boot_id="earlier", observed=Observed.ABSENT), Fate.REST),
    ],
)
@pytest.mark.parametrize("on_machine", [True, False])
def test_fates(known, fate, on_machine):
    # What is absent and held all the same is a stranger, tested below.
    stock = take_stock([known], [held()] if on_machine and not known.absent else [], boot_id="boot")
    assert stock.fates == {"plc_1": fate}
    assert stock.strangers == {}


def test_what_the_journal_does_not_know_is_a_stranger():
    stock = take_stock([record(1, **READY)], [held(1), held(2), held(2)], boot_id="boot")
    assert stock.strangers == {"plc_2": ("thing 2", "thing 2")}
    assert stock.fates == {"plc_1": Fate.ADOPT}
    assert not stock.mismatched


@pytest.mark.parametrize("thing", [held(1, sandbox="i9"), held(1, generation=2)])
def test_only_exact_matches_are_adopted(thing):
    stock = take_stock([record(1, **READY)], [held(1), thing], boot_id="boot")
    assert stock.fates == {}
    assert stock.mismatched == {"plc_1"}
    assert stock.strangers == {"plc_1": ("thing 1",)}


def test_a_mark_without_details_contradicts_nothing():
    assert take_stock([record(1, **READY)], [held(1, sandbox=None, generation=None)], boot_id="boot").fates == {"plc_1": Fate.ADOPT}


def test_what_should_be_gone_and_is_not_is_a_stranger():
    stock = take_stock([record(1, observed=Observed.ABSENT)], [held(1)], boot_id="boot")
    assert stock.strangers == {"plc_1": ("thing 1",)}
    assert not stock.mismatched

"""What a machine believes is so where it goes on, or it does not go on there."""

import pytest

from atoll.drivers.machines import birth
from atoll.drivers.machines.birth import CLOCK, PROCESSOR, ROOT, differs
from atoll.drivers.qemu.machine import _at_once

BORN = {ROOT: "a" * 64, CLOCK: "2595000", PROCESSOR: "AuthenticAMD 25 1 1"}


@pytest.mark.parametrize(
    ("here", "fits"),
    [
        (BORN, True),
        ({}, True),
        ({**BORN, ROOT: "b" * 64}, False),
        ({**BORN, PROCESSOR: "AuthenticAMD 25 17 1"}, False),
        ({**BORN, CLOCK: "2595900"}, True),
        ({**BORN, CLOCK: "2599000"}, False),
        ({**BORN, CLOCK: "2591000"}, False),
        ({**BORN, CLOCK: "no number"}, True),
    ],
)
def test_what_differs_is_said(here, fits) -> None:
    assert (differs(BORN, here) == "") is fits
    assert (differs(here, BORN) == "") is fits


def test_an_earlier_release_has_noted_nothing() -> None:
    assert differs({}, BORN) == ""


def test_a_processor_is_known_by_maker_family_and_model() -> None:
    words = birth.processor().split()
    assert len(words) >= 3


def test_counters_are_read_where_nothing_came_between() -> None:
    """A process that stood still between its two readings would be told wrong: of some tries the closest counts."""
    ticks, moments = iter(range(1000, 2000)), iter([0, 50, 100, 107, 200, 290, *range(300, 9000, 30)])
    assert _at_once(lambda: next(ticks), lambda: next(moments)) == (1001, 103)

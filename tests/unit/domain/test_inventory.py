"""What a machine has, what it registered, and when the two disagree."""

import pytest

from atoll.base.units import Vector
from atoll.domain.inventory import (
    CAPACITY,
    CLOCK,
    Inventory,
    Overcommit,
    Registered,
    capacity,
    conditions,
    differences,
    from_json,
    inventory_of,
    to_json,
)

MACHINE = Inventory(8, 16_000, 200_000)


def test_capacity_is_what_is_left_times_the_overcommit():
    reserve = Vector(cpu_millis=1000, memory_mib=2000, disk_mib=50_000, slots=3)
    assert capacity(MACHINE, reserve=reserve, overcommit=Overcommit(4.0, 1.0, 2.0), slots=100) == Vector(28_000, 14_000, 300_000, 97)


def test_a_reserve_beyond_the_machine_leaves_nothing_and_not_less():
    assert capacity(MACHINE, reserve=Vector(9_000, 20_000, 300_000, 200), overcommit=Overcommit(), slots=100) == Vector()


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (MACHINE, 0),
        (Inventory(8, 15_900, 198_000), 0),
        (Inventory(8, 16_200, 203_000), 0),
        (Inventory(7, 16_000, 200_000), 1),
        (Inventory(9, 16_000, 200_000), 1),
        (Inventory(8, 15_000, 200_000), 1),
        (Inventory(8, 32_000, 200_000), 1),
        (Inventory(8, 16_000, 100_000), 1),
        (Inventory(4, 8_000, 100_000), 3),
    ],
)
def test_more_and_less_than_was_registered_are_differences_beyond_what_kernels_round(seen, words):
    assert len(differences(MACHINE, seen)) == words


@pytest.mark.parametrize(
    "value",
    [
        None,
        Registered(MACHINE),
        Registered(MACHINE, Vector(1, 2, 3, 4), Overcommit(1.5, 2.0, 3.0), "10.65.0.0/16"),
    ],
)
def test_it_is_kept_whole(value):
    assert from_json(to_json(value)) == value


def test_facts_that_do_not_say_are_no_inventory():
    assert inventory_of({}) is None
    assert inventory_of({"cpu_count": "two", "memory_mib": "1", "disk_mib": "1"}) is None
    assert inventory_of({"cpu_count": "2", "memory_mib": "1", "disk_mib": "3"}) == Inventory(2, 1, 3)


def test_what_is_known_of_a_condition_is_said():
    found = dict(
        conditions([CAPACITY, CLOCK, "runtime.boot"], registered=Registered(MACHINE), reported=Inventory(4, 16_000, 200_000), skew_s="-7.5")
    )
    assert found[CAPACITY] == "cores: 8 registered, 4 there"
    assert "-7.5 s" in found[CLOCK]
    assert found["runtime.boot"] == ""

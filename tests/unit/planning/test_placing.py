from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import Code
from atoll.base.units import ZERO, Vector
from atoll.domain.host import Admin
from atoll.domain.spec import Isolation, Origin, PlacementPolicy, SaveMode, Spec
from atoll.planning.fleet import Fleet
from atoll.planning.placing import (
    Advert,
    Filter,
    Objection,
    Sum,
    candidates,
    drawing,
    explain,
    objections,
    refusal,
    turns,
)
from tests.builders import IMAGE, NOW, host, spec


def advert(used: Vector = ZERO, **changes: Any) -> Advert:
    return Advert(host(**changes), used)


def words(found: list[Objection]) -> list[str]:
    assert all(one.detail for one in found), "each says what it compared"
    return [one.filter.value for one in found]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"admin": Admin.DRAINING}, "HOST_NOT_ACTIVE"),
        ({"admin": Admin.DISABLED}, "HOST_NOT_ACTIVE"),
        ({"seen_at": None}, "HOST_NOT_HEALTHY"),
        ({"seen_at": NOW - 31}, "HOST_NOT_HEALTHY"),
        ({"problems": ("disk.free",)}, "HOST_CHECK_FAILED"),
        ({"arch": "aarch64"}, "ARCH_MISMATCH"),
        ({"protocol_min": 2, "protocol_max": 3}, "PROTOCOL_UNSUPPORTED"),
        ({"isolations": frozenset({"shared-kernel"})}, "ISOLATION_UNAVAILABLE"),
        ({"capacity": Vector(999, 8192, 65536, 64)}, "INSUFFICIENT_CPU"),
        ({"capacity": Vector(16000, 511, 65536, 64)}, "INSUFFICIENT_MEMORY"),
        ({"capacity": Vector(16000, 8192, 2047, 64)}, "INSUFFICIENT_DISK"),
        ({"capacity": Vector(16000, 8192, 65536, 0)}, "INSUFFICIENT_SLOTS"),
    ],
)
def test_why_a_host_may_not_hold_it(changes: dict[str, Any], reason: str) -> None:
    against = advert(**changes)
    assert words(objections(against, spec(), now=NOW)) == [reason]
    assert candidates([against], spec(), sandbox_id="i1", now=NOW) == []


@pytest.mark.parametrize(
    ("asked", "changes", "reason"),
    [
        ({"regions": ("eu", "us")}, {"region": "local"}, "REGION_MISMATCH"),
        ({"labels": (("disk", "ssd"),)}, {"labels": {"disk": "hdd"}}, "LABEL_MISMATCH"),
        ({"labels": (("disk", "ssd"),)}, {}, "LABEL_MISMATCH"),
        ({"require_host": "hst_other"}, {}, "OTHER_HOST_REQUIRED"),
    ],
)
def test_why_a_host_does_not_suit(asked: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    assert words(objections(advert(**changes), spec(**asked), now=NOW)) == [reason]


def test_a_host_that_suits_has_nothing_against_it() -> None:
    fit = advert(region="eu", labels={"disk": "ssd", "rack": "7"}, name="big")
    assert objections(fit, spec(regions=("eu",), labels=(("disk", "ssd"),), require_host="big"), now=NOW) == []
    assert objections(fit, spec(require_host=fit.host.id), now=NOW) == []
    assert objections(fit, spec(isolation=Isolation.SHARED_KERNEL), now=NOW) == []


def order(adverts: list[Advert], asked: Spec | None = None, **options: Any) -> list[str]:
    return [c.host_id for c in candidates(adverts, asked or spec(), sandbox_id="i1", now=NOW, **options)]


def test_hosts_are_packed_full_before_empty_ones_are_begun() -> None:
    empty, half, full = advert(), advert(used=Vector(1000, 4096, 0, 0)), advert(used=Vector(1000, 7680, 0, 0))
    assert order([empty, full, half]) == [full.host.id, half.host.id, empty.host.id]


def test_the_image_counts_more_than_the_room_and_the_origin_more_than_the_image() -> None:
    packed_without = advert(used=Vector(0, 7680, 0, 0), images=frozenset())
    with_image = advert(images=frozenset({IMAGE}))
    assert order([packed_without, with_image]) == [with_image.host.id, packed_without.host.id]
    for called in (packed_without.host.id, packed_without.host.name):
        preferring = spec(prefer_host=called)
        assert order([packed_without, with_image], preferring) == [packed_without.host.id, with_image.host.id]


def test_a_preferred_host_that_does_not_fit_is_no_reason_to_wait() -> None:
    full, other = advert(used=Vector(0, 8192, 0, 0)), advert()
    assert order([full, other], spec(prefer_host=full.host.id)) == [other.host.id]
    assert order([other], spec(prefer_host="nobody")) == [other.host.id]


@pytest.mark.parametrize("count", [2, 3, 5, 8, 30])
def test_each_of_equal_hosts_is_as_often_the_first(count: int) -> None:
    """Whatever their names are; and where the first has no room left on its disk, the rest are its heirs."""
    equal = [advert(id=f"hst_{count}_{n}") for n in range(count)]
    fleet = Fleet()
    fleet.load(equal)
    racers = 400 * count
    firsts = Counter(fleet.choose(spec(), sandbox_id=f"i{n}", now=NOW) for n in range(racers))
    assert set(firsts) == {one.host.id for one in equal}
    assert all(320 < share < 480 for share in firsts.values()), firsts  # 400 by chance +- 4 standard deviations
    if count < 5:
        return
    gone = equal[0].host.id
    heirs = Counter(fleet.choose(spec(), sandbox_id=f"i{n}", now=NOW, excluded=[gone]) for n in range(racers))
    gained = [heirs[one.host.id] - firsts[one.host.id] for one in equal[1:]]
    assert sum(gained) == firsts[gone]
    assert max(gained) <= firsts[gone] * 0.6, "one neighbour takes it all"


@given(st.integers(1, 500), st.text(max_size=8))
def test_a_turn_is_when_the_drawing_comes_to_it(count: int, sandbox_id: str) -> None:
    drawn = list(drawing(count, sandbox_id))
    assert sorted(drawn) == list(range(count))
    assert [turns(count, sandbox_id)(index) for index in drawn] == list(range(count))


def test_hosts_that_refused_are_not_asked_again() -> None:
    one, two = advert(), advert()
    assert order([one, two], excluded=[one.host.id]) == [two.host.id]


def test_equal_hosts_are_tried_in_another_order_by_each_sandbox() -> None:
    equal = [advert(id=f"hst_{n}") for n in range(4)]
    firsts = {candidates(equal, spec(), sandbox_id=f"i{n}", now=NOW)[0].host_id for n in range(400)}
    assert firsts == {a.host.id for a in equal}


def test_spread_asks_the_emptiest_of_those_that_are_drawn() -> None:
    empty, half, full = advert(), advert(used=Vector(1000, 4096, 0, 0)), advert(used=Vector(1000, 7000, 0, 0))
    asked = spec(placement_policy=PlacementPolicy.SPREAD)
    found = candidates([full, empty, half], asked, sandbox_id="i1", now=NOW)
    assert [c.host_id for c in found] == [empty.host.id, half.host.id, full.host.id]
    drawn = candidates([full, empty, half], asked, sandbox_id="i1", now=NOW, draw=lambda fit: [a for a in fit if a is not empty])
    assert [c.host_id for c in drawn] == [half.host.id, full.host.id]


@pytest.mark.parametrize("count", [0, 1, 2, 7, 12, 64, 1000])
def test_a_drawing_gives_each_number_once_and_another_order_to_each_sandbox(count: int) -> None:
    orders = [list(drawing(count, f"i{n}")) for n in range(5)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert count < 7 or len({tuple(order) for order in orders}) > 1


def test_the_summary_counts_reasons_for_people() -> None:
    def said(*adverts: Advert) -> str:
        return str(explain(adverts, spec(), sandbox_id="i1", now=NOW))

    found = said(advert(admin=Admin.DRAINING), advert(seen_at=None), advert(arch="riscv", seen_at=None))
    assert found == "3 host(s): ARCH_MISMATCH x1, HOST_NOT_ACTIVE x1, HOST_NOT_HEALTHY x2"
    assert said() == "no host is registered"
    assert said(advert()) == "1 host(s): all refused at reservation"


def test_an_explanation_has_a_word_for_each_host() -> None:
    first, second = advert(used=Vector(0, 4096, 0, 0)), advert(images=frozenset())
    refused, small = advert(name="refused"), advert(capacity=Vector(500, 100, 65_536, 64), name="small")
    told = explain([small, second, refused, first], spec(), sandbox_id="i1", now=NOW, excluded=[refused.host.id])
    assert [(v.advert.host.id, v.rank, v.refused, v.image) for v in told.verdicts] == [
        (first.host.id, 1, False, True),
        (second.host.id, 2, False, False),
        (refused.host.id, None, True, True),
        (small.host.id, None, False, True),
    ]
    assert told.candidates == 2
    assert [str(one.detail) for one in told.verdicts[-1].objections] == ["500 millicores free, 1000 needed", "100 MiB free, 512 needed"]


def test_a_sum_says_for_how_many_hosts_a_filter_is_the_only_one() -> None:
    adverts = [advert(admin=Admin.DRAINING), advert(admin=Admin.DRAINING, seen_at=None), advert(seen_at=None), advert()]
    told = explain(adverts, spec(), sandbox_id="i1", now=NOW)
    assert told.sums == (Sum(Filter.HOST_NOT_ACTIVE, 2, 1), Sum(Filter.HOST_NOT_HEALTHY, 2, 1))


def test_the_host_that_has_it_is_judged_as_if_it_had_not() -> None:
    full = advert(capacity=Vector(1000, 512, 2048, 1), used=Vector(1000, 512, 2048, 1))
    assert explain([full], spec(), sandbox_id="i1", now=NOW).candidates == 0
    assert explain([full], spec(), sandbox_id="i1", now=NOW, holds=full.host.id).candidates == 1


def test_what_would_have_to_be_fetched_needs_a_host_that_can_go_on_from_it() -> None:
    wanted = spec(origin=Origin("", SaveMode.FULL, moment="sha256:" + "1" * 64, kind="oci/gvisor/x86_64/runsc 1"))
    able, other = host(moments=frozenset({"oci/gvisor/x86_64/runsc 1"})), host(moments=frozenset({"oci/gvisor/x86_64/runsc 2"}))
    assert objections(Advert(able, ZERO), wanted, now=NOW) == []
    against = objections(Advert(other, ZERO), wanted, now=NOW)
    assert [(one.filter, one.detail) for one in against] == [
        ("MOMENT_UNSUPPORTED", "oci/gvisor/x86_64/runsc 2, not oci/gvisor/x86_64/runsc 1")
    ]
    fleet = Fleet()
    fleet.load([Advert(able, ZERO), Advert(other, ZERO)])
    assert fleet.choose(wanted, sandbox_id="i1", now=NOW) == able.id
    assert fleet.removed(wanted, now=NOW) == {Filter.MOMENT_UNSUPPORTED: 1}
    there = spec(origin=Origin("snp_x", SaveMode.FULL))
    assert objections(Advert(other, ZERO), there, now=NOW) == [], "it has a copy of that"


def test_every_filter_can_be_met() -> None:
    """Each is in one of the tables above."""
    import ast
    from pathlib import Path

    texts = {node.value for node in ast.walk(ast.parse(Path(__file__).read_text())) if isinstance(node, ast.Constant)}
    assert {one.value for one in Filter} <= texts


@pytest.mark.parametrize(
    ("changes", "used", "code"),
    [
        ({}, ZERO, None),
        ({}, Vector(15_000, 7680, 63_488, 63), None),
        ({}, Vector(15_001, 0, 0, 0), Code.INSUFFICIENT_CPU),
        ({}, Vector(0, 7681, 0, 0), Code.INSUFFICIENT_MEMORY),
        ({}, Vector(0, 0, 63_489, 0), Code.INSUFFICIENT_DISK),
        ({}, Vector(0, 0, 0, 64), Code.INSUFFICIENT_SLOTS),
        ({"admin": Admin.DRAINING}, ZERO, Code.HOST_NOT_ACTIVE),
        ({"problems": ("disk.free",)}, ZERO, Code.HOST_UNSUITABLE),
        ({"isolations": frozenset({"shared-kernel"})}, ZERO, Code.HOST_UNSUITABLE),
        ({"arch": "aarch64"}, ZERO, Code.HOST_UNSUITABLE),
        # An agent that was not heard of for long grants all the same: its record does, and the lease decides later.
        ({"seen_at": None}, ZERO, None),
    ],
)
def test_what_the_host_s_own_record_says(changes: dict[str, Any], used: Vector, code: Code | None) -> None:
    assert refusal(host(**changes), spec(), used=used) is code

"""Placing under chance: who is asked suits, in one order for all replicas; who is not asked is told why; and nothing is granted twice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.ids import HostId
from atoll.base.units import ZERO, Vector
from atoll.domain.host import Admin
from atoll.domain.spec import PlacementPolicy, Spec
from atoll.planning.fleet import Fleet
from atoll.planning.placing import Advert, candidates, drawing, explain, refusal, ring
from tests.builders import IMAGE, NOW, host, spec

vectors = st.builds(Vector, st.integers(0, 4000), st.integers(0, 2048), st.integers(0, 8192), st.integers(0, 4))
adverts = st.builds(
    lambda used, capacity, changes: Advert(host(capacity=capacity, **changes), used),
    vectors,
    vectors,
    st.fixed_dictionaries(
        {},
        optional={
            "admin": st.sampled_from(Admin),
            "seen_at": st.sampled_from([None, NOW, NOW - 29, NOW - 31, NOW - 100]),
            "images": st.sampled_from([frozenset(), frozenset({IMAGE})]),
            "isolations": st.sampled_from([frozenset({"gvisor"}), frozenset({"shared-kernel"})]),
            "problems": st.sampled_from([(), ("check",)]),
            "region": st.sampled_from(["local", "eu"]),
        },
    ),
)
specs = st.builds(
    spec,
    cpu_millis=st.integers(1, 2000),
    memory_mib=st.integers(1, 1024),
    disk_mib=st.integers(1, 4096),
    regions=st.sampled_from([(), (), ("eu",)]),
    image=st.sampled_from([IMAGE, "another"]),
    placement_policy=st.sampled_from(PlacementPolicy),
    placement_choices=st.integers(2, 4),
)
sandbox_ids = st.integers(0, 50).map("i{}".format)


@given(st.lists(adverts, max_size=6), specs, st.randoms(use_true_random=False))
def test_every_host_is_a_candidate_or_has_a_reason(known: list[Advert], asked: Spec, shuffled: random.Random) -> None:
    found = candidates(known, asked, sandbox_id="i1", now=NOW)
    told = explain(known, asked, sandbox_id="i1", now=NOW)
    assert {c.host_id for c in found} == {v.advert.host.id for v in told.verdicts if not v.objections}
    assert [c.host_id for c in found] == [v.advert.host.id for v in told.verdicts if v.rank is not None]
    by_id = {advert.host.id: advert for advert in known}
    for candidate in found:
        advert = by_id[HostId(candidate.host_id)]
        assert refusal(advert.host, asked, used=advert.used) is None
    reordered = known.copy()
    shuffled.shuffle(reordered)
    assert candidates(reordered, asked, sandbox_id="i1", now=NOW) == found, "the order of the directory decided"


@given(vectors, st.lists(st.tuples(st.booleans(), vectors), max_size=40))
def test_a_host_never_grants_more_than_it_has(capacity: Vector, steps: list[tuple[bool, Vector]]) -> None:
    """Reservations and returns in any order: what the record allows, summed, stays within the capacity."""
    granted: list[Vector] = []
    record = host(capacity=capacity)
    for give_back, need in steps:
        if give_back and granted:
            granted.pop()
            continue
        used = sum(granted, ZERO)
        asked = spec(cpu_millis=need.cpu_millis, memory_mib=need.memory_mib, disk_mib=need.disk_mib)
        if refusal(record, asked, used=used) is None:
            granted.append(asked.vector())
        assert capacity.lacks(sum(granted, ZERO)) == []


def expected(known: list[Advert], asked: Spec, sandbox_id: str, *, excluded: list[str]) -> str | None:
    """What the fleet must answer, by looking at every host."""

    def drawn(fit: Sequence[Advert]) -> Sequence[Advert]:
        circle = sorted(known, key=lambda advert: (ring(advert.host.id), advert.host.id))
        order = [circle[number] for number in drawing(len(circle), sandbox_id)]
        return [advert for advert in order if advert in fit][: asked.placement_choices]

    found = candidates(known, asked, sandbox_id=sandbox_id, now=NOW, excluded=excluded, draw=drawn)
    return found[0].host_id if found else None


@settings(max_examples=400)
@given(st.lists(adverts, max_size=12), specs, sandbox_ids, st.data())
def test_the_fleet_answers_as_if_it_had_looked_at_every_host(
    known: list[Advert], asked: Spec, sandbox_id: str, data: st.DataObject
) -> None:
    ids = [str(advert.host.id) for advert in known]
    excluded = data.draw(st.lists(st.sampled_from(ids), unique=True)) if ids else []
    pin = data.draw(st.sampled_from([None, None, None, "nobody", *ids, *(a.host.name for a in known)]))
    preferred = data.draw(st.sampled_from([None, "nobody", *ids, *(a.host.name for a in known)]))
    asked = replace(asked, require_host=pin, prefer_host=preferred)
    fleet = Fleet()
    fleet.load(known)
    chosen = fleet.choose(asked, sandbox_id=sandbox_id, now=NOW, excluded=excluded)
    assert chosen == expected(known, asked, sandbox_id, excluded=excluded)
    assert fleet.summary(asked, now=NOW) == str(explain(known, asked, sandbox_id=sandbox_id, now=NOW))


@given(st.lists(adverts, min_size=1, max_size=8), st.data(), specs)
def test_a_fleet_that_was_changed_is_as_one_that_was_made_so(known: list[Advert], data: st.DataObject, asked: Spec) -> None:
    fleet = Fleet()
    fleet.load(known)
    present = {advert.host.id: advert for advert in known}
    for _ in range(data.draw(st.integers(0, 20))):
        one = present[data.draw(st.sampled_from(sorted(present)))]
        match data.draw(st.sampled_from(["use", "change", "remove", "rename"])):
            case "use":
                one = Advert(one.host, data.draw(vectors))
            case "change":
                one = Advert(
                    replace(
                        one.host,
                        images=data.draw(st.sampled_from([frozenset(), frozenset({IMAGE})])),
                        admin=data.draw(st.sampled_from(Admin)),
                    ),
                    one.used,
                )
            case "rename":
                one = Advert(replace(one.host, name=data.draw(st.sampled_from("xyz")) + one.host.id), one.used)
            case _ if len(present) > 1:
                del present[one.host.id]
                fleet.remove(one.host.id)
                fleet.remove(one.host.id)
                continue
            case _:
                continue
        present[one.host.id] = one
        fleet.put(one)
    assert len(fleet) == len(present)
    assert {advert.host.id: advert for advert in fleet.adverts()} == present
    pins = [None, *(advert.host.name for advert in present.values())]
    for pin in pins:
        wanted = replace(asked, require_host=pin)
        answer = fleet.choose(wanted, sandbox_id="i1", now=NOW)
        assert answer == expected(list(present.values()), wanted, "i1", excluded=[])


def test_traits_of_hosts_that_have_gone_are_forgotten() -> None:
    fleet = Fleet()
    for number in range(1000):
        fleet.load([Advert(host(labels={"name": str(number)}), ZERO)])
    assert len(fleet._of_trait) < 100
    assert fleet.choose(spec(labels=(("name", "999"),)), sandbox_id="i1", now=NOW) is not None
    assert fleet.choose(spec(labels=(("name", "1"),)), sandbox_id="i1", now=NOW) is None

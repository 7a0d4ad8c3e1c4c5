"""Placing under chance: who is asked suits, in one order for all replicas; who is not asked is told why; and nothing is granted twice."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from atoll.base.units import ZERO, Vector
from atoll.domain.host import Admin
from atoll.planning.placing import Advert, candidates, explain, refusal
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
    regions=st.sampled_from([(), ("eu",)]),
)


@given(st.lists(adverts, max_size=6), specs, st.randoms(use_true_random=False))
def test_every_host_is_a_candidate_or_has_a_reason(known: list[Advert], asked: object, shuffled: random.Random) -> None:
    found = candidates(known, asked, sandbox_id="i1", now=NOW)  # type: ignore[arg-type]
    reasons = explain(known, asked, now=NOW)  # type: ignore[arg-type]
    assert {c.host_id for c in found} == {host_id for host_id, against in reasons.items() if not against}
    by_id = {advert.host.id: advert for advert in known}
    for candidate in found:
        advert = by_id[candidate.host_id]  # type: ignore[index]
        assert refusal(advert.host, used=advert.used, need=asked.vector()) is None  # type: ignore[attr-defined]
    reordered = known.copy()
    shuffled.shuffle(reordered)
    assert candidates(reordered, asked, sandbox_id="i1", now=NOW) == found, "the order of the directory decided"  # type: ignore[arg-type]


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
        if refusal(record, used=used, need=need) is None:
            granted.append(need)
        assert capacity.lacks(sum(granted, ZERO)) == []

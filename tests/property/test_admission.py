"""The token bucket under chance: never more than its burst at once nor its rate over time, and a promise to wait is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import Unavailable
from atoll.domain.deployment import ClientLimits, DeploymentLimits, Rate, TeamLimits
from atoll.planning.admission import Bucket, Buckets, Limits

rates = st.floats(0.1, 100)
bursts = st.floats(1, 50)
pauses = st.lists(st.floats(0, 2), min_size=1, max_size=80)


@given(rates, bursts, pauses)
def test_no_window_sees_more_than_burst_and_rate(rate: float, burst: float, waits: list[float]) -> None:
    bucket = Bucket(rate, burst, burst, at=0.0)
    now, taken = 0.0, []
    for wait in waits:
        now += wait
        try:
            bucket.take(boot=now)
        except Unavailable:
            continue
        taken.append(now)
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            allowed = burst + (taken[last] - taken[first]) * rate
            assert last - first + 1 <= allowed + 1e-6


@given(rates, bursts, pauses)
def test_who_waits_as_told_is_served(rate: float, burst: float, waits: list[float]) -> None:
    bucket = Bucket(rate, burst, burst, at=0.0)
    now = 0.0
    for wait in waits:
        now += wait
        try:
            bucket.take(boot=now)
        except Unavailable as refused:
            now += refused.retry_after_s + 1e-6
            bucket.take(boot=now)


@given(rates, rates, rates, st.lists(st.tuples(st.floats(0, 1), st.sampled_from("ab"), st.sampled_from("tu")), max_size=60))
def test_no_scope_sees_more_than_its_own_rate(client: float, team: float, whole: float, asked: list[tuple[float, str, str]]) -> None:
    limits = Limits(ClientLimits(Rate(client, 3)), TeamLimits(Rate(team, 4)), DeploymentLimits(Rate(whole, 5)))
    buckets, now = Buckets(), 0.0
    taken: dict[tuple[str, str], list[float]] = {}
    for wait, name, of_team in asked:
        now += wait
        try:
            buckets.take(limits, client=of_team + name, team=of_team, boot=now)
        except Unavailable:
            continue
        for key in (("client", of_team + name), ("team", of_team), ("deployment", "")):
            taken.setdefault(key, []).append(now)
    allowed = {"client": (client, 3), "team": (team, 4), "deployment": (whole, 5)}
    for (scope, _), times in taken.items():
        rate, burst = allowed[scope]
        assert len(times) <= burst + (times[-1] - times[0]) * rate + 1e-6

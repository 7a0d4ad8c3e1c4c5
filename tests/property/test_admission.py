"""The token bucket under chance: never more than its burst at once nor its rate over time, and a promise to wait is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import Unavailable
from atoll.planning.admission import Bucket

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

from hypothesis import given
from hypothesis import strategies as st

from atoll.programs.restarts import DELAY_S_MAX, FORGIVEN_AFTER_S, Restarts


def test_the_first_restart_is_immediate_and_later_ones_wait_longer() -> None:
    now = Restarts()
    delays = []
    for _ in range(12):
        now = now.died(ran_s=0.1)
        delays.append(now.delay_s)
    assert delays[0] == 0.0
    assert delays[1:4] == [0.25, 0.5, 1.0]
    assert delays[-1] == DELAY_S_MAX


def test_a_child_that_ran_well_is_forgiven() -> None:
    now = Restarts()
    for _ in range(5):
        now = now.died(ran_s=1.0)
    assert now.delay_s > 0
    now = now.died(ran_s=FORGIVEN_AFTER_S)
    assert (now.delay_s, now.total) == (0.0, 6)


@given(st.lists(st.floats(min_value=0, max_value=1000), max_size=200))
def test_the_delay_is_bounded_and_every_death_is_counted(runs: list[float]) -> None:
    now = Restarts()
    for ran_s in runs:
        now = now.died(ran_s=ran_s)
        assert 0.0 <= now.delay_s <= DELAY_S_MAX
    assert now.total == len(runs)

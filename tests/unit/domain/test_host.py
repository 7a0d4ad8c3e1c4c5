import pytest

from atoll.domain.host import LOST_AFTER_S, SUSPECT_AFTER_S, Health, health
from atoll.wire.agent import POLL_PARK_S_MAX
from tests.builders import NOW, host


@pytest.mark.parametrize(
    ("age_s", "expected"),
    [
        (None, Health.UNKNOWN),
        (-5.0, Health.HEALTHY),
        (0.0, Health.HEALTHY),
        (SUSPECT_AFTER_S - 0.001, Health.HEALTHY),
        (SUSPECT_AFTER_S, Health.SUSPECT),
        (LOST_AFTER_S - 0.001, Health.SUSPECT),
        (LOST_AFTER_S, Health.LOST),
        (1e9, Health.LOST),
    ],
)
def test_health_follows_from_the_age_of_the_last_poll(age_s: float | None, expected: Health) -> None:
    assert health(host(seen_at=None if age_s is None else NOW - age_s), now=NOW) is expected


def test_a_parked_poll_does_not_make_its_host_suspect() -> None:
    assert POLL_PARK_S_MAX < SUSPECT_AFTER_S

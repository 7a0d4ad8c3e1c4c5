import pytest

from atoll.base.errors import Code, Refused, Unavailable
from atoll.planning.admission import Bucket, DeploymentLimits, Usage, admit
from tests.builders import team

LIMITS = DeploymentLimits(max_sandboxes=50)
TEAM = team(max_sandboxes=10, max_records=20)


@pytest.mark.parametrize(
    ("usage", "code"),
    [
        (Usage(10, 0, 10), Code.TEAM_SANDBOX_QUOTA),
        (Usage(0, 20, 0), Code.RECORDS_QUOTA),
        (Usage(0, 0, 50), Code.DEPLOYMENT_SANDBOX_QUOTA),
        (Usage(11, 21, 51), Code.TEAM_SANDBOX_QUOTA),
    ],
)
def test_a_full_quota_refuses_with_its_own_code(usage: Usage, code: Code) -> None:
    with pytest.raises(Refused) as refused:
        admit(TEAM, usage, LIMITS)
    assert refused.value.code is code


def test_the_last_place_is_given() -> None:
    admit(TEAM, Usage(9, 19, 49), LIMITS)


def test_a_bucket_gives_its_burst_then_its_rate() -> None:
    bucket = Bucket(rate_per_s=2.0, burst=3.0, level=3.0, at=100.0)
    for _ in range(3):
        bucket.take(boot=100.0)
    with pytest.raises(Unavailable) as refused:
        bucket.take(boot=100.0)
    assert refused.value.code is Code.RATE_LIMITED
    assert refused.value.retry_after_s == 1.0
    bucket.take(boot=100.5)
    with pytest.raises(Unavailable):
        bucket.take(boot=100.5)


def test_a_slow_bucket_says_how_long_to_wait() -> None:
    bucket = Bucket(rate_per_s=0.1, burst=1.0, level=0.0, at=0.0)
    with pytest.raises(Unavailable) as refused:
        bucket.take(boot=2.0)
    assert refused.value.retry_after_s == pytest.approx(8.0)
    bucket.take(boot=2.0 + refused.value.retry_after_s)


def test_a_refusal_costs_nothing() -> None:
    bucket = Bucket(rate_per_s=1.0, burst=1.0, level=0.0, at=0.0)
    for _ in range(100):
        with pytest.raises(Unavailable):
            bucket.take(boot=0.5)
    bucket.take(boot=1.0)

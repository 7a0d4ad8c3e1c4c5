from dataclasses import astuple, replace

import pytest

from atoll.base.errors import Code, Refused, Unavailable
from atoll.domain.deployment import ClientLimits, Deployment, DeploymentLimits, Rate, TeamLimits
from atoll.planning.admission import Bucket, Buckets, Limits, Usage, admit, admit_active_host, admit_host, near

LIMITS = Limits(ClientLimits(sandboxes=5), TeamLimits(sandboxes=10, records=20), DeploymentLimits(sandboxes=50, records=100))
NONE = Limits(ClientLimits(None, None), TeamLimits(None, None, None), DeploymentLimits(None, None, None, None, None))
FULL = Usage(5, 10, 20, 50, 100)
ORDER = [
    Code.CLIENT_SANDBOX_QUOTA,
    Code.TEAM_SANDBOX_QUOTA,
    Code.RECORDS_QUOTA,
    Code.DEPLOYMENT_SANDBOX_QUOTA,
    Code.DEPLOYMENT_RECORDS_QUOTA,
]


@pytest.mark.parametrize(("name", "code"), list(zip(Usage.__slots__, ORDER, strict=True)))
def test_a_full_quota_refuses_with_its_own_code(name: str, code: Code) -> None:
    for count in (getattr(FULL, name), getattr(FULL, name) + 1):
        with pytest.raises(Refused) as refused:
            admit(replace(Usage(0, 0, 0, 0, 0), **{name: count}), LIMITS)
        assert refused.value.code is code
        assert refused.value.detail == {"limit": getattr(FULL, name)}


def test_the_narrowest_scope_speaks_first() -> None:
    with pytest.raises(Refused) as refused:
        admit(FULL, LIMITS)
    assert refused.value.code is Code.CLIENT_SANDBOX_QUOTA


def test_the_last_place_is_given() -> None:
    admit(Usage(*(count - 1 for count in astuple(FULL))), LIMITS)


def test_a_limit_of_nothing_gives_nothing_and_no_limit_gives_everything() -> None:
    with pytest.raises(Refused):
        admit(Usage(0, 0, 0, 0, 0), replace(LIMITS, team=TeamLimits(sandboxes=0)))
    admit(Usage(*[10**12] * 5), NONE)


@pytest.mark.parametrize("name", Usage.__slots__)
def test_near_is_what_a_few_more_would_reach(name: str) -> None:
    far = replace(Usage(0, 0, 0, 0, 0), **{name: getattr(FULL, name) - 4})
    assert not near(far, LIMITS, margin=3)
    assert near(far, LIMITS, margin=4)
    assert not near(Usage(*[10**12] * 5), NONE, margin=10**6)


def test_a_team_of_its_own_limits_has_those() -> None:
    deployment = Deployment(teams={"acme": TeamLimits(sandboxes=7)})
    assert Limits.of(deployment, team="acme").team.sandboxes == 7
    assert Limits.of(deployment, team="other").team == deployment.team


def test_hosts_have_quotas_for_being_registered_and_for_being_active() -> None:
    limits = DeploymentLimits(registered_hosts=3, active_hosts=2)
    admit_host(2, limits)
    admit_active_host(1, limits)
    with pytest.raises(Refused) as registered:
        admit_host(3, limits)
    with pytest.raises(Refused) as active:
        admit_active_host(2, limits)
    assert (registered.value.code, active.value.code) == (Code.HOST_QUOTA, Code.ACTIVE_HOST_QUOTA)
    admit_host(10**9, NONE.deployment)
    admit_active_host(10**9, NONE.deployment)


def rates(client: Rate | None = None, team: Rate | None = None, deployment: Rate | None = None) -> Limits:
    return Limits(ClientLimits(client), TeamLimits(team), DeploymentLimits(deployment))


def refusal(buckets: Buckets, limits: Limits, *, client: str = "a", team: str = "t", boot: float = 0.0) -> str | None:
    try:
        buckets.take(limits, client=client, team=team, boot=boot)
    except Unavailable as refused:
        return str(refused.detail["scope"])
    return None


def test_each_scope_has_a_rate_of_its_own() -> None:
    buckets = Buckets()
    limits = rates(Rate(1, 2), Rate(1, 3), Rate(1, 4))
    assert [refusal(buckets, limits) for _ in range(3)] == [None, None, "client"]
    assert [refusal(buckets, limits, client="b") for _ in range(2)] == [None, "team"]
    assert [refusal(buckets, limits, client="c", team="u") for _ in range(2)] == [None, "deployment"]


def test_a_refused_request_is_told_the_longest_wait() -> None:
    buckets = Buckets()
    limits = rates(Rate(1, 1), Rate(0.1, 1))
    buckets.take(limits, client="a", team="t", boot=0.0)
    with pytest.raises(Unavailable) as refused:
        buckets.take(limits, client="a", team="t", boot=0.0)
    assert (refused.value.code, refused.value.retry_after_s) == (Code.RATE_LIMITED, 10.0)


def test_a_refused_request_takes_from_no_bucket() -> None:
    buckets = Buckets()
    limits = rates(Rate(1, 1), Rate(1, 2))
    assert refusal(buckets, limits) is None
    for _ in range(50):
        assert refusal(buckets, limits) == "client"
    assert refusal(buckets, limits, client="b") is None, "the team's bucket was emptied by refusals"


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_replicas_pass_together_what_one_would(replicas: int) -> None:
    limits = rates(Rate(21, 42))
    each = [Buckets() for _ in range(replicas)]

    def passed(boot: float) -> int:
        return sum(_passes(buckets, limits, boot, replicas) for buckets in each for _ in range(200))

    assert 42 - replicas < passed(0.0) <= 42
    assert 20 - replicas <= passed(1.0) <= 21 + replicas


def test_who_is_left_alone_has_all_of_it() -> None:
    buckets, limits = Buckets(), rates(Rate(10, 20))
    assert sum(_passes(buckets, limits, 0.0, 2) for _ in range(50)) == 10
    assert sum(_passes(buckets, limits, 1.0, 1) for _ in range(50)) == 10


def _passes(buckets: Buckets, limits: Limits, boot: float, replicas: int) -> bool:
    try:
        buckets.take(limits, client="a", team="t", boot=boot, replicas=replicas)
    except Unavailable:
        return False
    return True


def test_another_rate_counts_at_once() -> None:
    buckets = Buckets()
    assert [refusal(buckets, rates(Rate(1, 5))) for _ in range(2)] == [None, None]
    assert [refusal(buckets, rates(Rate(1, 2))) for _ in range(3)] == [None, None, "client"]
    assert refusal(buckets, rates()) is None, "no limit, no bucket"


def test_buckets_of_those_who_are_gone_are_forgotten() -> None:
    buckets = Buckets(kept_max=100)
    limits = rates(Rate(1, 2))
    for number in range(1000):
        assert refusal(buckets, limits, client=f"c{number}", boot=number * 1.0) is None
    assert len(buckets._kept) <= 100
    busy = [refusal(buckets, limits, client="busy", boot=1000.0) for _ in range(3)]
    assert busy == [None, None, "client"]


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

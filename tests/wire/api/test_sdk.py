"""The unmodified public SDK (current version) against the API: what it sends we understand, what we answer it parses."""

from __future__ import annotations

import datetime as dt
import subprocess
from pathlib import Path

import pytest
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    NotFoundException,
    RateLimitException,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
)
from e2b.exceptions import ServiceBusyException

from atoll.base.errors import Code, Refused, Unavailable
from atoll.wire.guest import ENVD_VERSION

pytestmark = pytest.mark.sdk

OLD_PYTHON = Path(__file__).resolve().parents[3] / "build" / "venv-e2b-2.45" / "bin" / "python"
NOBODY = "i" + "0" * 20


def test_life(served) -> None:
    sandbox = Sandbox.create(timeout=60, metadata={"who": "me"}, envs={"A": "1"}, **served.opts)
    assert sandbox.sandbox_domain == "localhost:3000"
    assert sandbox.get_host(8080) == f"8080-{sandbox.sandbox_id}.localhost:3000"
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.metadata == {"who": "me"}
    assert info.state is SandboxState.RUNNING
    assert info.envd_version == ENVD_VERSION
    assert (info.cpu_count, info.memory_mb) == (1, 512)
    assert (info.end_at - info.started_at).total_seconds() == pytest.approx(60, abs=0.01)
    assert info.allow_internet_access is True
    assert info.lifecycle == {"on_timeout": "kill", "auto_resume": False}
    sandbox.set_timeout(120)
    assert (sandbox.get_info().end_at - dt.datetime.now(dt.UTC)).total_seconds() == pytest.approx(120, abs=5)
    again = Sandbox.connect(sandbox.sandbox_id, timeout=10, **served.opts)
    assert again.sandbox_id == sandbox.sandbox_id
    assert (again.get_info().end_at - dt.datetime.now(dt.UTC)).total_seconds() == pytest.approx(120, abs=5)
    assert again._envd_access_token == sandbox._envd_access_token
    assert sandbox.kill() is True
    assert sandbox.kill() is False
    with pytest.raises(NotFoundException, match=sandbox.sandbox_id):
        sandbox.get_info()
    with pytest.raises(NotFoundException):
        sandbox.set_timeout(5)
    with pytest.raises(NotFoundException):
        Sandbox.connect(sandbox.sandbox_id, **served.opts)


def test_list(served) -> None:
    mine = {"list": "sdk & more=%41"}
    made = [Sandbox.create(timeout=60, metadata={**mine, "n": str(n)}, **served.opts) for n in range(5)]
    paginator = Sandbox.list(query=SandboxQuery(metadata=mine, state=[SandboxState.RUNNING]), limit=2, **served.opts)
    found = []
    while paginator.has_next:
        page = paginator.next_items()
        assert len(page) <= 2
        found += [one.sandbox_id for one in page]
    assert found == [one.sandbox_id for one in reversed(made)]
    one = Sandbox.list(query=SandboxQuery(metadata={**mine, "n": "3"}), **served.opts).next_items()
    assert [info.sandbox_id for info in one] == [made[3].sandbox_id]
    assert Sandbox.list(query=SandboxQuery(state=[SandboxState.PAUSED]), **served.opts).next_items() == []
    oldest = Sandbox.list(query=SandboxQuery(metadata=mine), order="asc", limit=1, **served.opts).next_items()
    assert oldest[0].sandbox_id == made[0].sandbox_id
    later = Sandbox.list(query=SandboxQuery(metadata=mine, started_after=made[3].get_info().started_at), **served.opts).next_items()
    assert [info.sandbox_id for info in later] == [made[4].sandbox_id, made[3].sandbox_id]
    for template, count in (("base", 5), ("none", 0)):
        assert len(Sandbox.list(query=SandboxQuery(metadata=mine, template=template), **served.opts).next_items()) == count
    for sandbox in made:
        sandbox.kill()


def test_idempotency_key(served) -> None:
    first = Sandbox.create(timeout=60, idempotency_key="sdk-1", **served.opts)
    again = Sandbox.create(timeout=60, idempotency_key="sdk-1", **served.opts)
    assert first.sandbox_id == again.sandbox_id
    with pytest.raises(SandboxException) as refused:
        Sandbox.create(timeout=61, idempotency_key="sdk-1", **served.opts)
    assert refused.value.status_code == 422
    first.kill()


def test_network(served) -> None:
    sandbox = Sandbox.create(
        timeout=60, allow_internet_access=False, network={"allow_out": ["8.8.8.8"], "allow_public_traffic": False}, **served.opts
    )
    info = sandbox.get_info()
    assert info.allow_internet_access is False
    assert info.network == {"allow_out": ["8.8.8.8"], "allow_public_traffic": False}
    assert sandbox.traffic_access_token
    sandbox.kill()


def test_failures_become_the_sdks_exceptions(served) -> None:
    with pytest.raises(AuthenticationException):
        Sandbox.create(**{**served.opts, "api_key": "e2b_" + "0" * 40})
    with pytest.raises(SandboxException, match="none"):
        Sandbox.create("none", **served.opts)
    with pytest.raises(SandboxException, match="mcp"):
        Sandbox.create("base", mcp={"exa": {"apiKey": "x"}}, **served.opts)
    with pytest.raises(SandboxException, match="volumeMounts"):
        Sandbox.create(volume_mounts={"/v": "v"}, **served.opts)
    served.service.fail_next = Refused(Code.TEAM_SANDBOX_QUOTA, "the team has enough")
    with pytest.raises(RateLimitException, match="the team has enough"):
        Sandbox.create(**served.opts)
    served.service.fail_next = Unavailable(Code.NO_CAPACITY, "no host has room")
    with pytest.raises(ServiceBusyException, match="no host has room"):
        Sandbox.create(**served.opts)
    # The failure was told once: the SDK did not repeat the request by itself, or this one would have been used up.
    assert served.service.fail_next is None


def test_snapshots_and_forks(served) -> None:
    sandbox = Sandbox.create(timeout=60, **served.opts)
    named = sandbox.create_snapshot(name="warm:v2", **served.opts)
    assert named.names == ["main/warm:v2"] or named.names[0].endswith("/warm:v2")
    bare = sandbox.create_snapshot(mode="filesystem", **served.opts)
    assert bare.names == []
    pages = Sandbox.list_snapshots(sandbox_id=sandbox.sandbox_id, limit=1, **served.opts)
    seen = []
    while pages.has_next:
        seen += [one.snapshot_id for one in pages.next_items()]
    assert sorted(seen) == sorted([named.snapshot_id, bare.snapshot_id])
    assert [one.snapshot_id for one in Sandbox.list_snapshots(name="warm", **served.opts).next_items()] == [named.snapshot_id]
    assert Sandbox.delete_snapshot(bare.snapshot_id, **served.opts) is True
    assert Sandbox.delete_snapshot(bare.snapshot_id, **served.opts) is False
    clones = sandbox.fork(timeout=30, count=2)
    assert [isinstance(one, Sandbox) for one in clones] == [True, True]
    assert len({one.sandbox_id for one in clones} | {sandbox.sandbox_id}) == 3
    served.service.fail_next = Unavailable(Code.NO_CAPACITY, "no host has room")
    failed, made = sandbox.fork(count=2)
    assert isinstance(failed, ServiceBusyException)
    assert isinstance(made, Sandbox)
    for one in (*clones, made):
        one.kill()
    sandbox.pause()
    with pytest.raises(SandboxException):
        sandbox.fork()
    sandbox.kill()
    with pytest.raises(SandboxNotFoundException):
        sandbox.create_snapshot()


def test_metrics(served) -> None:
    sandbox = Sandbox.create(timeout=60, **served.opts)
    found = sandbox.get_metrics()
    assert found
    assert (found[0].cpu_count, found[0].mem_total, found[0].disk_total) == (1, 512 << 20, 2048 << 20)
    assert (found[0].cpu_used_pct, found[0].mem_used, found[0].mem_cache, found[0].disk_used) == (12.5, 20 << 20, 4 << 20, 1 << 20)
    assert abs(found[0].timestamp - dt.datetime.now(dt.UTC)) < dt.timedelta(seconds=30)
    later = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)
    assert sandbox.get_metrics(start=later) == []
    assert len(sandbox.get_metrics(end=later)) == len(found)
    sandbox.kill()
    with pytest.raises(NotFoundException):
        sandbox.get_metrics()


async def test_metrics_async(served) -> None:
    sandbox = await AsyncSandbox.create(timeout=60, **served.opts)
    assert (await sandbox.get_metrics())[0].mem_total == 512 << 20
    assert await sandbox.kill() is True


def test_quota_is_not_retried(served) -> None:
    asked = len(served.service.requests)
    served.service.fail_next = Refused(Code.TEAM_SANDBOX_QUOTA, "full")
    with pytest.raises(RateLimitException):
        Sandbox.create(**served.opts)
    assert len(served.service.requests) == asked + 1


def test_a_rate_limit_is_retried_after_its_time(served) -> None:
    asked = len(served.service.requests)
    served.service.fail_next = Unavailable(Code.RATE_LIMITED, "slow down", retry_after_s=0.5)
    Sandbox.create(**served.opts).kill()
    assert len(served.service.requests) == asked + 2


def test_a_stranger_sees_nothing(served) -> None:
    sandbox = Sandbox.create(timeout=60, **served.opts)
    stranger = {**served.opts, "api_key": served.stranger_key}
    assert Sandbox.list(**stranger).next_items() == []
    assert Sandbox.kill(sandbox.sandbox_id, **stranger) is False
    with pytest.raises(NotFoundException):
        Sandbox.get_info(sandbox.sandbox_id, **stranger)
    assert sandbox.get_info().state is SandboxState.RUNNING
    sandbox.kill()


async def test_life_async(served) -> None:
    sandbox = await AsyncSandbox.create(timeout=60, metadata={"who": "async"}, **served.opts)
    assert (await sandbox.get_info()).metadata == {"who": "async"}
    await sandbox.set_timeout(120)
    again = await AsyncSandbox.connect(sandbox.sandbox_id, **served.opts)
    assert again.sandbox_id == sandbox.sandbox_id
    page = await AsyncSandbox.list(query=SandboxQuery(metadata={"who": "async"}), **served.opts).next_items()
    assert [one.sandbox_id for one in page] == [sandbox.sandbox_id]
    assert await sandbox.kill() is True
    assert await AsyncSandbox.kill(sandbox.sandbox_id, **served.opts) is False


OLD_SCRIPT = """
import sys
from e2b import Sandbox, NotFoundException, SandboxQuery
url, key = sys.argv[1:]
opts = {"api_key": key, "api_url": url, "sandbox_url": url}
sandbox = Sandbox.create(timeout=60, metadata={"old": "a&b=c d"}, envs={"A": "1"}, **opts)
info = sandbox.get_info()
assert info.metadata == {"old": "a&b=c d"}, info
assert info.state.value == "running", info
sandbox.set_timeout(90)
again = Sandbox.connect(sandbox.sandbox_id, timeout=5, **opts)
assert again.sandbox_id == sandbox.sandbox_id
found = Sandbox.list(query=SandboxQuery(metadata={"old": "a&b=c d"}), **opts).next_items()
assert [one.sandbox_id for one in found] == [sandbox.sandbox_id], found
assert sandbox.kill() is True
assert sandbox.kill() is False
try:
    sandbox.get_info()
except NotFoundException as error:
    assert sandbox.sandbox_id in str(error)
else:
    raise AssertionError("found after kill")
print("fine")
"""


def test_life_with_the_oldest_sdk(served) -> None:
    if not OLD_PYTHON.exists():
        pytest.skip(f"e2b 2.45 is not in {OLD_PYTHON.parents[1]}; `make test` makes that environment")
    ran = subprocess.run([OLD_PYTHON, "-c", OLD_SCRIPT, served.url, served.key], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (0, "fine\n"), ran.stderr
    assert served.service.requests[-1].secured


def test_pause_and_connect(served) -> None:
    sandbox = Sandbox.create("base", timeout=60, metadata={"who": "me"}, **served.opts)
    assert sandbox.pause()
    assert sandbox.pause() is False, "said again: it is paused already"
    info = sandbox.get_info()
    assert info.state.value == "paused"
    paused = Sandbox.list(query=SandboxQuery(state=[SandboxState.PAUSED]), **served.opts).next_items()
    assert [(one.sandbox_id, one.metadata) for one in paused] == [(sandbox.sandbox_id, {"who": "me"})]
    assert Sandbox.list(query=SandboxQuery(state=[SandboxState.RUNNING]), **served.opts).next_items() == []
    again = Sandbox.connect(sandbox.sandbox_id, timeout=90, **served.opts)
    assert again.get_info().state.value == "running"
    assert again.sandbox_id == sandbox.sandbox_id
    served.service.unresponsive.add(sandbox.sandbox_id)
    assert again.pause(), "without a healthy guest, too"
    assert Sandbox.kill(sandbox.sandbox_id, **served.opts)
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect(sandbox.sandbox_id, **served.opts)


def test_lifecycle_options(served) -> None:
    for lifecycle, on_end, mode in (
        ({"on_timeout": "pause"}, "suspend", "full"),
        ({"on_timeout": {"action": "pause", "mode": "filesystem"}}, "suspend", "filesystem"),
        ({"on_timeout": "kill"}, "kill", "full"),
    ):
        sandbox = Sandbox.create(lifecycle=lifecycle, **served.opts)
        asked = served.service.requests[-1]
        assert (asked.on_end.value, asked.end_mode.value) == (on_end, mode)
        sandbox.kill()

"""Sandboxes through the unmodified SDK: from create to gone."""

from __future__ import annotations

import concurrent.futures
import datetime as dt
import os
import time
import uuid

import httpx
import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    NotFoundException,
    Sandbox,
    SandboxException,
    SandboxNotRunningException,
    SandboxQuery,
    SandboxState,
)

FULL = os.environ.get("ATOLL_TEST_MATRICES") == "full"


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def test_create_run_kill(make) -> None:
    sandbox = make()
    assert sandbox.commands.run("echo hello").stdout == "hello\n"
    assert sandbox.commands.run("python3 -c 'print(6 * 7)'").stdout == "42\n"
    assert sandbox.is_running()
    assert sandbox.kill() is True
    assert not sandbox.is_running()
    assert sandbox.kill() is False
    assert Sandbox.kill(sandbox.sandbox_id) is False
    with pytest.raises(NotFoundException, match=sandbox.sandbox_id):
        sandbox.get_info()


def test_info(make) -> None:
    before = _now()
    sandbox = make(timeout=120, metadata={"purpose": "info", "ключ": "значение"})
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.metadata == {"purpose": "info", "ключ": "значение"}
    assert info.state is SandboxState.RUNNING
    assert info.name == "base"
    assert (info.cpu_count, info.memory_mb) == (1, 512)
    assert before - dt.timedelta(seconds=2) < info.started_at < _now() + dt.timedelta(seconds=1)
    assert 100 < (info.end_at - _now()).total_seconds() <= 121
    by_id = make(info.template_id)
    assert by_id.get_info().template_id == info.template_id


def test_create_by_every_name_of_a_template(make) -> None:
    for reference in ("base", "base:default"):
        assert make(reference).commands.run("true").exit_code == 0
    with pytest.raises(SandboxException, match="no-such-template"):
        make("no-such-template")


def test_environment_inside(make, product) -> None:
    sandbox = make(envs={"GREETING": "hello 'quoted' $x", "EMPTY": "", "UNI": "дом"})
    assert sandbox.commands.run('printf "%s|%s|%s" "$GREETING" "${EMPTY-unset}" "$UNI"').stdout == "hello 'quoted' $x||дом"
    assert sandbox.commands.run("printf %s $GREETING2", envs={"GREETING2": "per-command"}).stdout == "per-command"
    assert sandbox.commands.run('printf %s "$GREETING"', envs={"GREETING": "mine wins"}).stdout == "mine wins"
    info = sandbox.get_info()
    team = product.call("GET", "/v1/whoami").json()["team"]["id"]
    printed = sandbox.commands.run("env | grep ^E2B_ | sort").stdout.splitlines()
    assert printed == [
        "E2B_SANDBOX=true", f"E2B_SANDBOX_ID={sandbox.sandbox_id}", f"E2B_TEAM_ID={team}", f"E2B_TEMPLATE_ID={info.template_id}",
    ]  # fmt: skip
    for name, content in ((".E2B_SANDBOX", "true"), (".E2B_SANDBOX_ID", sandbox.sandbox_id), (".E2B_TEMPLATE_ID", info.template_id)):
        assert sandbox.files.read(f"/run/e2b/{name}").strip() == content


def test_list(make, stranger) -> None:
    mark = {"mark": uuid.uuid4().hex, "odd": "a&b=c d/é%41"}
    made = [make(metadata={**mark, "n": str(number)}) for number in range(3)]
    ids = [one.sandbox_id for one in made]
    paginator = Sandbox.list(query=SandboxQuery(metadata=mark), limit=2)
    found = []
    while paginator.has_next:
        found += [one.sandbox_id for one in paginator.next_items()]
    assert found == ids[::-1]
    ascending = Sandbox.list(query=SandboxQuery(metadata=mark), order="asc").next_items()
    assert [one.sandbox_id for one in ascending] == ids
    one = Sandbox.list(query=SandboxQuery(metadata={**mark, "n": "1"}, state=[SandboxState.RUNNING])).next_items()
    assert [info.sandbox_id for info in one] == [ids[1]]
    assert Sandbox.list(query=SandboxQuery(metadata=mark, state=[SandboxState.PAUSED])).next_items() == []
    assert len(Sandbox.list(query=SandboxQuery(metadata=mark, template="base")).next_items()) == 3
    later = Sandbox.list(query=SandboxQuery(metadata=mark, started_after=ascending[1].started_at)).next_items()
    assert [info.sandbox_id for info in later] == [ids[2], ids[1]]
    assert Sandbox.list(query=SandboxQuery(metadata=mark), api_key=stranger).next_items() == []
    made[0].kill()
    assert ids[0] not in [info.sandbox_id for info in Sandbox.list(query=SandboxQuery(metadata=mark)).next_items()]


def test_the_older_routes(product) -> None:
    made = product.call("POST", "/sandboxes", json={"templateID": "base", "timeout": 60, "metadata": {"v": "1"}})
    assert made.status_code == 201, made.text
    sandbox_id = made.json()["sandboxID"]
    try:
        assert "envdAccessToken" not in made.json()
        listed = product.call("GET", "/sandboxes?metadata=v%3D1").json()
        assert sandbox_id in [one["sandboxID"] for one in listed]
        assert int(product.call("GET", "/v2/sandboxes").headers["x-total-running"]) >= 1
        connected = product.call("POST", f"/sandboxes/{sandbox_id}/connect", json={"timeout": 10})
        assert connected.status_code == 200
        assert connected.json()["sandboxID"] == sandbox_id
        assert product.call("POST", f"/sandboxes/{sandbox_id}/refreshes", json={"duration": 300}).status_code == 204
        ends = dt.datetime.fromisoformat(product.call("GET", f"/sandboxes/{sandbox_id}-anything").json()["endAt"])
        assert 250 < (ends - _now()).total_seconds() <= 301
        # Not secured: the guest asks for no token.
        bare = httpx.get(f"{product.sandbox_url}/envs", headers={"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": "49983"})
        assert bare.status_code == 200
    finally:
        assert product.call("DELETE", f"/sandboxes/{sandbox_id}").status_code == 204


def test_a_secured_guest_wants_its_token(make, product) -> None:
    sandbox = make()
    assert product.inside(sandbox, "GET", "/envs", token=False).status_code == 401
    assert product.inside(sandbox, "GET", "/envs", headers={"X-Access-Token": "wrong"}).status_code == 401
    assert product.inside(sandbox, "GET", "/envs").status_code == 200


def test_connect_never_shortens(make) -> None:
    sandbox = make(timeout=300)
    again = Sandbox.connect(sandbox.sandbox_id, timeout=5)
    assert again.commands.run("echo $E2B_SANDBOX_ID").stdout.strip() == sandbox.sandbox_id
    assert (sandbox.get_info().end_at - _now()).total_seconds() > 200
    Sandbox.connect(sandbox.sandbox_id, timeout=1000)
    assert (sandbox.get_info().end_at - _now()).total_seconds() > 900
    sandbox.set_timeout(60)
    assert (sandbox.get_info().end_at - _now()).total_seconds() <= 61
    with pytest.raises(NotFoundException):
        Sandbox.connect("i" + "0" * 20)


@pytest.mark.parametrize("seconds", [3, pytest.param(10, marks=pytest.mark.long)])
def test_expiry_comes_in_time(make, seconds) -> None:
    sandbox = make(timeout=seconds)
    end = sandbox.get_info().end_at.timestamp()
    while sandbox.is_running():
        assert time.time() < end + 1.0, "it outlived its end by more than a second"
        time.sleep(0.05)
    assert time.time() > end - 1.0, "it ended more than a second before its time"
    # Its host ends it, and connections to it with that; control hears of it a moment later.
    gone_by = time.time() + 2.0
    while True:
        try:
            sandbox.get_info()
        except NotFoundException:
            break
        assert time.time() < gone_by, "it is still known two seconds after its end"
        time.sleep(0.02)


def test_a_timeout_that_is_moved_near_and_away(make) -> None:
    sandbox = make(timeout=5)
    sandbox.set_timeout(60)
    time.sleep(6)
    assert sandbox.is_running()
    sandbox.set_timeout(2)
    time.sleep(3.2)
    assert not sandbox.is_running()


def test_a_timeout_of_zero_ends_it(make) -> None:
    sandbox = make()
    sandbox.set_timeout(0)
    assert not sandbox.is_running()
    with pytest.raises(NotFoundException):
        sandbox.set_timeout(10)


@pytest.mark.parametrize("timeout", [0, -1, 10**9])
def test_timeouts_that_cannot_be(make, timeout) -> None:
    with pytest.raises(SandboxException) as refused:
        make(timeout=timeout)
    assert refused.value.status_code == 400


def test_idempotency_key(make, product) -> None:
    key = str(uuid.uuid4())
    first, again = make(idempotency_key=key), make(idempotency_key=key)
    assert first.sandbox_id == again.sandbox_id
    with pytest.raises(SandboxException) as refused:
        make(idempotency_key=key, timeout=301)
    assert refused.value.status_code == 422
    other = str(uuid.uuid4())
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(
                lambda _: product.call(
                    "POST", "/v2/sandboxes", json={"templateID": "base", "timeout": 60}, headers={"Idempotency-Key": other}
                ),
                range(4),
            )
        )
    made = {answer.json()["sandboxID"] for answer in answers if answer.status_code == 201}
    assert len(made) == 1
    assert all(answer.json().get("error_code") == "idempotency_in_progress" for answer in answers if answer.status_code == 409)
    assert {answer.status_code for answer in answers} <= {201, 409}
    Sandbox.kill(made.pop())


def test_kill_cuts_what_runs(make) -> None:
    sandbox = make()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = pool.submit(sandbox.commands.run, "sleep 300", timeout=0)
        handle = sandbox.commands.run("while :; do echo x; sleep 0.05; done", background=True, timeout=0)
        streaming = pool.submit(handle.wait)
        time.sleep(0.5)
        began = time.monotonic()
        sandbox.kill()
        for future in (running, streaming):
            with pytest.raises(SandboxNotRunningException, match="killed or reached"):
                future.result(timeout=10)
        assert time.monotonic() - began < 5
    with pytest.raises(SandboxNotRunningException):
        sandbox.commands.run("true")
    with pytest.raises(SandboxNotRunningException):
        sandbox.files.read("/etc/hostname")


def test_many_at_once() -> None:
    count = 12 if FULL else 4
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        made = list(pool.map(lambda _: Sandbox.create(timeout=120), range(count)))
        try:
            assert len({one.sandbox_id for one in made}) == count
            said = list(pool.map(lambda one: one.commands.run("cat /run/e2b/.E2B_SANDBOX_ID").stdout.strip(), made))
            assert said == [one.sandbox_id for one in made]
        finally:
            assert all(pool.map(lambda one: one.kill(), made))
    assert not any(one.is_running() for one in made)


def test_create_and_kill_again_and_again() -> None:
    for _ in range(30 if FULL else 5):
        sandbox = Sandbox.create(timeout=60)
        assert sandbox.commands.run("echo ok").stdout == "ok\n"
        assert sandbox.kill()
        assert not sandbox.is_running()


def test_sandboxes_share_nothing(make) -> None:
    one, other = make(), make()
    one.files.write("/tmp/secret", "mine")
    assert not other.files.exists("/tmp/secret")
    one.commands.run("sleep 100 &", background=True)
    assert "sleep 100" not in other.commands.run("ps aux || cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout


def test_another_teams_key(make, stranger) -> None:
    sandbox = make(metadata={"team": "ours"})
    with pytest.raises(NotFoundException):
        Sandbox.get_info(sandbox.sandbox_id, api_key=stranger)
    with pytest.raises(NotFoundException):
        Sandbox.connect(sandbox.sandbox_id, api_key=stranger)
    with pytest.raises(NotFoundException):
        Sandbox.set_timeout(sandbox.sandbox_id, 1, api_key=stranger)
    assert Sandbox.kill(sandbox.sandbox_id, api_key=stranger) is False
    assert sandbox.is_running()
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_" + "0" * 40)


def test_what_is_not_there_yet_says_so(make) -> None:
    sandbox = make()
    with pytest.raises(SandboxException, match="not supported"):
        sandbox.update_network({"deny_out": ["0.0.0.0/0"]})
    assert sandbox.is_running()


def test_a_guest_that_ends_is_released(make) -> None:
    sandbox = make()
    with pytest.raises((SandboxException, CommandExitException)):
        sandbox.commands.run("kill -9 -1; sleep 60", user="root", timeout=20)
    # Either the guest withstands it or the sandbox is gone with a reason: never something between.
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            alive = sandbox.is_running() and sandbox.commands.run("echo alive", timeout=5).stdout == "alive\n"
        except SandboxException:
            alive = False
        try:
            sandbox.get_info()
            listed = True
        except NotFoundException:
            listed = False
        if alive == listed:
            return
        time.sleep(0.2)
    pytest.fail("control and the edge do not agree about it")

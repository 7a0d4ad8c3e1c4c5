"""The unmodified SDKs are given guests that were made ahead: with what their creates bring, and nothing of anybody else's."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from atoll.domain.warmth import OWN_TEAM

HERE = Path(__file__).parent
NODE = HERE.parents[1] / "build" / "tools" / "node"
KEPT = 2
FULL_S = 120.0
IDENTITY = "hostname; cat /proc/sys/kernel/random/boot_id; head -c 32 /dev/urandom | base64; cat /run/e2b/.E2B_SANDBOX_ID"

Ready = Callable[[], set[str]]


@pytest.fixture(scope="module")
def ready(product) -> Iterator[Ready]:
    """Waits until as many are ready as are kept warm; their ids."""

    def there() -> set[str]:
        deadline = time.monotonic() + FULL_S
        while time.monotonic() < deadline:
            answer = product.call("GET", "/v1/sandboxes?team=*&state=ready&limit=100")
            assert answer.status_code == 200, answer.text
            found = {one["id"] for one in answer.json()["items"] if one["teamId"] == OWN_TEAM}
            if len(found) == KEPT:
                return found
            time.sleep(0.2)
        pytest.fail(f"{KEPT} guests were not ready within {FULL_S:.0f} s: {product.call('GET', '/v1/warm').text}")

    answer = product.call("PUT", "/v1/templates/base/warm", json={"count": KEPT})
    assert answer.status_code == 200, answer.text
    yield there
    product.call("PUT", "/v1/templates/base/warm", json={"count": 0})


def test_a_create_has_all_that_it_asked_for(ready: Ready, make) -> None:
    before = ready()
    sandbox = make(timeout=120, metadata={"of": "mine"}, envs={"MINE": "ä & b"})
    assert sandbox.sandbox_id in before, "it was made ahead"
    assert sandbox.commands.run('printf \'%s|%s\' "$MINE" "$E2B_SANDBOX_ID"').stdout == f"ä & b|{sandbox.sandbox_id}"
    assert sandbox.commands.run("echo $MINE", envs={"MINE": "of one command"}).stdout == "of one command\n"
    sandbox.files.write("/home/user/here", "content")
    assert sandbox.files.read("/home/user/here") == "content"
    info = sandbox.get_info()
    assert info.metadata == {"of": "mine"}
    left_s = (info.end_at - dt.datetime.now(dt.UTC)).total_seconds()
    assert 60 < left_s <= 121, "its life is that of the create, not of the guest"
    sandbox.set_timeout(300)
    assert (sandbox.get_info().end_at - dt.datetime.now(dt.UTC)).total_seconds() > 250
    assert [one.sandbox_id for one in Sandbox.list().next_items()].count(sandbox.sandbox_id) == 1
    assert sandbox.kill() is True
    assert sandbox.sandbox_id not in ready(), "it is never given again"


def test_two_creates_share_nothing(ready: Ready, make, product) -> None:
    before = ready()
    one, other = make(envs={"SECRET": "of the one"}), make(envs={"OTHER": "x"})
    assert {one.sandbox_id, other.sandbox_id} == before
    said = [sandbox.commands.run(IDENTITY).stdout.split() for sandbox in (one, other)]
    assert [words[0] for words in said] == [one.sandbox_id, other.sandbox_id], "each has its own host name"
    assert [words[3] for words in said] == [one.sandbox_id, other.sandbox_id]
    assert all(len({words[place] for words in said}) == 2 for place in (1, 2)), "boot and chance are its own"
    one.files.write("/home/user/secret", "s")
    one.commands.run("touch /tmp/trace; (sleep 300 &) ")
    assert other.commands.run("ls /home/user/secret /tmp/trace 2>/dev/null; env | grep SECRET; pgrep -x sleep; true").stdout == ""
    assert one._envd_access_token != other._envd_access_token
    refused = product.inside(other, "GET", "/envs", token=False, headers={"X-Access-Token": one._envd_access_token or ""})
    assert refused.status_code == 401


def test_nothing_was_there_before_it_was_somebodys(ready: Ready, make, product) -> None:
    before = ready()
    for name in before:
        assert product.inside(_Nobodys(name), "GET", "/envs", token=False).status_code in (404, 502), "nobody reaches what is nobody's"
    sandbox = make()
    assert sandbox.sandbox_id in before
    events = product.call("GET", f"/v1/sandboxes/{sandbox.sandbox_id}/events").json()["items"]
    assert events[0]["type"] == "sandbox.claimed"


class _Nobodys:
    """What `Product.inside` needs of a sandbox, of one that no SDK has."""

    _envd_access_token = None

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id


def test_the_javascript_sdk_as_well(ready: Ready, product) -> None:
    node = NODE if NODE.exists() else shutil.which("node")
    if node is None or not (HERE / "js" / "node_modules" / "e2b").exists():
        pytest.skip("node or the JavaScript packages are not here; `make test` installs both")
    environment = {**os.environ, **product.environment, "ATOLL_WARM": ",".join(sorted(ready()))}
    environment.pop("E2B_DEBUG", None)
    command = [node, "--test", HERE / "js" / "claiming" / "warm.mjs"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, f"{ran.stdout[-8000:]}\n{ran.stderr[-8000:]}"

"""What RUNs have beside their image, and images that begin with nothing, against a whole control: where secrets are, and where they are not."""

from __future__ import annotations

import asyncio
import base64
import io
import tarfile
from typing import Any

import pytest

from atoll.control.builds import mounting
from tests.sim.shop import Shop
from tests.sim.test_build_stages import copy, stage
from tests.sim.test_builds import begin, built, code_of, ended, request, run, shop, status, world
from tests.sim.world import World

__all__ = ["shop", "world"]

SECRET = "s3cr3t-of-the-tenant"
HIDDEN = base64.b64encode(SECRET.encode()).decode()


def secret(name: str = "token", **more: Any) -> dict[str, Any]:
    return {"kind": "secret", "id": name, "target": f"/run/secrets/{name}", "mode": "400", "owner": "7:8", **more}


def cache(name: str = "pip", **more: Any) -> dict[str, Any]:
    return {"kind": "cache", "id": name, "target": "/root/.cache", "owner": "0:0", "mode": "755", **more}


def where(world: World, text: str) -> list[str]:
    """Files of control that have a text in them."""
    return [str(path) for path in world.path.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


async def test_a_secret_is_a_file_and_a_variable_and_nowhere_else(world: World, shop: Shop) -> None:
    both = [secret(), {"kind": "secret", "id": "token", "target": "", "env": "TOKEN"}]
    done = await built(world, run(f"show {SECRET}", mounts=both), secrets={"token": HIDDEN})
    assert done["status"] == "ready", done
    ((path, content),) = shop.put
    assert path == "/.atoll/copy.tar"
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        (info,) = tar.getmembers()
        assert (info.uid, info.gid, info.mode) == (7, 8, 0o400)
        file = tar.extractfile(info)
        assert file is not None
        assert file.read() == SECRET.encode()
    environments = dict(shop.environments)
    assert environments[f"show {SECRET}"]["TOKEN"] == SECRET
    assert [text for text in shop.ran if text.startswith("script")] == [
        "script 0 /run/secrets/token secret -p  ",
        "script 0 /run/secrets/token",
    ]
    # Even a command that says it says nothing to the log.
    assert not any(SECRET in line for line in done["logs"]), done["logs"]
    assert not world.running.builds.secrets, "it is forgotten with its build"


async def test_a_secret_is_in_no_file_of_controls(world: World, shop: Shop) -> None:
    asked = await request(world)
    await begin(world, asked, run("hang", mounts=[secret()]), secrets={"token": HIDDEN})
    await shop.hanging.wait()
    assert where(world, SECRET) == []
    assert where(world, HIDDEN) == []
    assert SECRET not in repr(world.running.builds.secrets)
    shop.let_go.set()
    assert (await ended(world, asked))["status"] == "ready"
    assert where(world, SECRET) == []


@pytest.mark.parametrize("required", [True, False])
async def test_a_secret_that_was_not_given(world: World, shop: Shop, required: bool) -> None:
    done = await built(world, run("a", mounts=[secret(required=required)]))
    assert done["status"] == ("error" if required else "ready")
    if required:
        assert "secret 'token' was not given to this build: --secret id=token,src=FILE" in done["reason"]["message"]
    else:
        assert shop.ran == ["a"], "nothing is mounted, as with Docker"


async def test_its_value_is_not_in_a_steps_key_and_its_id_is(world: World, shop: Shop) -> None:
    await built(world, run("a", mounts=[secret()]), secrets={"token": HIDDEN})
    again = await built(world, run("a", mounts=[secret()]), secrets={"token": base64.b64encode(b"another").decode()})
    assert "CACHED [1/1] RUN a" in again["logs"]
    other = await built(world, run("a", mounts=[secret("other")]))
    assert "CACHED [1/1] RUN a" not in other["logs"]


async def test_secrets_go_with_the_control_process_that_had_them(world: World, shop: Shop) -> None:
    asked = await request(world)
    await begin(world, asked, run("hang"), run("after", mounts=[secret()]), secrets={"token": HIDDEN})
    await shop.hanging.wait()
    await world.restart()
    shop.let_go.set()
    done = await ended(world, asked)
    assert done["status"] == "error"
    assert "went with the control process that had them" in done["reason"]["message"]
    assert await code_of(world, asked) == "BUILD_FAILED"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"secrets": {"token": "no base64 " + SECRET}}, "'token' is not in base64"),
        ({"secrets": {"token": base64.b64encode(b"x" * 500_001).decode()}}, "more than 500000 bytes"),
    ],
)
async def test_what_is_no_secret_is_refused_without_saying_it(world: World, shop: Shop, body: dict[str, Any], words: str) -> None:
    asked = await request(world)
    path = f"/v2/templates/{asked['templateID']}/builds/{asked['buildID']}"
    answer = await world.call("POST", path, json={"fromTemplate": "base", "steps": [], **body})
    assert answer.status_code == 400
    assert words in answer.text
    assert SECRET not in answer.text


@pytest.mark.parametrize(
    "mount",
    [
        secret(""), secret(source="x"), {"kind": "secret", "id": "a", "target": "/x", "env": "1X"}, cache(env="X"), cache(target="/proc/x"),
        {"kind": "what", "id": "a", "target": "/x"}, secret(owner="user"), cache("a\x00b"),
    ],
    ids=str,
)  # fmt: skip
async def test_mounts_that_make_no_sense_are_refused(world: World, shop: Shop, mount: dict[str, Any]) -> None:
    asked = await request(world)
    path = f"/v2/templates/{asked['templateID']}/builds/{asked['buildID']}"
    answer = await world.call("POST", path, json={"fromTemplate": "base", "steps": [run("a", mounts=[mount])]})
    assert answer.status_code == 400, answer.text


async def test_a_key_for_ssh_is_an_agents_for_one_command(world: World, shop: Shop) -> None:
    mount = {"kind": "ssh", "id": "default", "target": ""}
    done = await built(world, run("clone", mounts=[mount]), secrets={"ssh:default": HIDDEN})
    assert done["status"] == "ready", done
    assert shop.put == [("/.atoll/ssh-key", SECRET.encode() + b"\n")]
    assert dict(shop.environments)["clone"]["SSH_AUTH_SOCK"] == "/.atoll/ssh/0.sock"
    assert shop.ran == ["script 0 user", "clone", "script 0"]
    missing = await built(world, run("again", mounts=[mount]))
    assert "ssh 'default' was not given to this build: --ssh default=KEYFILE" in missing["reason"]["message"]


async def test_a_cache_is_there_in_the_teams_next_build_and_in_no_other_teams(world: World, shop: Shop) -> None:
    await built(world, run("one", mounts=[cache()]))
    assert [text for text in shop.ran if "script" in text] == [
        "script 0 /root/.cache .  0:0 755", f"script /root/.cache {mounting.CACHE_BYTES_MAX >> 10}", "script 0 /root/.cache"
    ]  # fmt: skip
    assert not shop.put, "it began empty"
    await built(world, run("two", mounts=[cache()]))
    assert len(shop.put) == 1, "what the first has left"
    assert "script 0 /root/.cache . -p 0:0 755" in shop.ran
    await built(world, run("three", mounts=[cache("other")]))
    assert len(shop.put) == 1
    key = await world.team("neighbours")
    asked = (await world.call("POST", "/v3/templates", key=key, json={"name": "mine"})).json()
    path = f"/v2/templates/{asked['templateID']}/builds/{asked['buildID']}"
    await world.call("POST", path, key=key, json={"fromTemplate": "base", "steps": [run("four", mounts=[cache()])]})
    async with asyncio.timeout(10):
        while "four" not in shop.ran:
            await asyncio.sleep(0.02)
    assert len(shop.put) == 1


async def test_a_step_that_fails_leaves_its_cache_as_it_was(world: World, shop: Shop) -> None:
    await built(world, run("one", mounts=[cache()]))
    (kept,) = world.running.builds.uploads.glob("*/caches/*.tar")
    before = kept.read_bytes()
    failed = await built(world, run("false", mounts=[cache()]))
    assert failed["status"] == "error"
    assert kept.read_bytes() == before
    assert list(kept.parent.iterdir()) == [kept]


async def test_caches_have_a_limit_and_go_when_nobody_uses_them(world: World, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        await built(world, run(f"echo {number}", mounts=[cache(f"c{number}")]))
        await asyncio.sleep(0.02)
    folder = next(world.running.builds.uploads.glob("*/caches"))
    sizes = {path: path.stat().st_size for path in folder.iterdir()}
    monkeypatch.setattr(mounting, "TEAM_BYTES_MAX", max(sizes.values()) * 2 + 8)
    oldest = min(sizes, key=lambda path: path.stat().st_mtime)
    await built(world, run("echo 4", mounts=[cache("c4")]))
    assert not oldest.exists()
    assert len(list(folder.iterdir())) < 4
    mounting.forget(world.running.builds.uploads, before=world.clock.now() + 60)
    assert list(folder.iterdir()) == []


# Images that begin with nothing.


async def test_files_come_into_an_image_that_begins_with_nothing(world: World, shop: Shop) -> None:
    steps = [copy("out", "/", 0), {"type": "WORKDIR", "args": ["/srv"]}, run("serve"), copy("more", "/more", 0)]
    done = await built(world, *steps, stages=[stage("make", run("make"))], fromImage="scratch")
    assert done["status"] == "ready", done
    assert "FROM nothing" in done["logs"]
    said = [text.removeprefix("script").strip() for text in shop.ran if text.startswith("script")]
    # Until something has run in it, on a bench that has a shell, below a root of its own.
    assert said == ["out", "", "out /.atoll/scratch/", "", "", "/.atoll/scratch/srv user", "", "more", "more /more"]
    again = await built(world, *steps, stages=[stage("make", run("make"))], fromImage="scratch")
    assert sum("CACHED" in line for line in again["logs"]) == 5
    assert not [path for path in shop.passed if path.exists()]


@pytest.mark.parametrize(
    ("steps", "words"),
    [([], "nothing was copied into it"), ([run("a")], "nothing runs in an image that begins with nothing")],
)
async def test_an_image_of_nothing_is_refused(world: World, shop: Shop, steps: list[Any], words: str) -> None:
    done = await built(world, *steps, fromImage="scratch")
    assert done["status"] == "error"
    assert words in done["reason"]["message"]
    assert (await status(world, done))["status"] == "error"


# Where other images come from.


async def test_an_image_that_is_copied_from_is_known_by_its_digest(world: World, shop: Shop) -> None:
    stages = [stage("tools", fromImage="tools:latest")]
    await built(world, copy("a", "/a", 0), stages=stages)
    same = await built(world, copy("a", "/a", 0), stages=stages)
    assert "CACHED [1/1] COPY a /a" in same["logs"]
    shop.digests["registry:tools:latest"] = "moved on"
    moved = await built(world, copy("a", "/a", 0), stages=stages)
    assert "CACHED [1/1] COPY a /a" not in moved["logs"]


async def test_credentials_are_for_one_registry_whoever_begins_with_it(world: World, shop: Shop) -> None:
    mine = {"type": "registry", "username": "u", "password": "p"}
    stages = [
        stage("one", fromImage="reg.example:5000/a/b:1"),
        stage("two", fromImage="elsewhere.example/a:1"),
        stage("three", fromImage="a:1"),
    ]
    await built(
        world,
        copy("a", "/a", 0),
        copy("b", "/b", 1),
        copy("c", "/c", 2),
        stages=stages,
        fromImage="reg.example:5000/c",
        fromImageRegistry=mine,
    )
    asked = dict(shop.pulled)
    assert {source for source, credentials in asked.items() if credentials} == {
        "registry:reg.example:5000/c",
        "registry:reg.example:5000/a/b:1",
    }
    shop.pulled.clear()
    await built(world, copy("a", "/a", 0), copy("b", "/b", 1), stages=stages[:2], fromImageRegistry=mine, name="two")
    assert {source for source, credentials in shop.pulled if credentials} == {"registry:reg.example:5000/a/b:1"}, (
        "the first image that it names"
    )

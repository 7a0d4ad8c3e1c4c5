"""Imports: from acceptance to a template or a code, over a real store, with a program of our own in place of the real one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import Code, Refused
from atoll.control.artifacts.imports import ENV_BYTES_MAX, Imports, environment
from atoll.control.service import Caller
from atoll.domain.importing import ImportRequest, State
from atoll.domain.template import Template
from atoll.domain.tenancy import Role, Team
from atoll.images.artifacts import Folder
from atoll.images.carrier import Carrier
from atoll.images.library import Library
from atoll.store import imports as stored
from atoll.store import tenancy
from atoll.store.engine import Store
from tests.builders import NOW, client, spec, team, template

IMAGE = "sha256:" + "a" * 64
RECORD = {
    "digest": IMAGE, "layers": [], "bytes": 1, "env": ["A=1", "broken", "=x"], "user": "", "workingDir": "/w", "entrypoint": None, "cmd": None,
}  # fmt: skip


class Hand:
    """The clock; it stands still."""

    def now(self) -> float:
        return NOW

    def boot(self) -> float:
        return 0.0


def imports(store: Store, tmp_path: Path, *, answer: dict[str, Any] | None = None, script: str = "") -> Imports:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\ncat > /dev/null\n" + (script or f"echo '{json.dumps(answer)}'") + "\n")
    program.chmod(0o755)
    carrier, library = Carrier(program, tmp_path / "blobs"), Library(tmp_path, Folder(tmp_path), lambda: NOW)
    return Imports(store=store, clock=Hand(), dice=os.urandom, carrier=carrier, uploads=tmp_path / "uploads", library=library)  # type: ignore[arg-type]


def caller(team: Team, role: Role = Role.MEMBER) -> Caller:
    return Caller(team, replace(client(team), role=role))


def unfinished(part: Imports, name: str, *, age_s: float) -> Path:
    assert part.library is not None
    path = part.library.bench / "partial" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"half")
    os.utime(path, (NOW - age_s, NOW - age_s))
    return path


async def ended(part: Imports) -> None:
    await asyncio.gather(*part.tasks)


async def known(store: Store, team: Team) -> list[Template]:
    return [one for one in await store.read(lambda conn: tenancy.templates_for(conn, team.id)) if one.team_id == team.id]


async def test_an_image_becomes_a_template(store: Store, ours: Team, tmp_path: Path) -> None:
    part = imports(store, tmp_path, answer={"event": "done", "image": RECORD})
    asked = ImportRequest("web", "registry:x", memory_mib=256, start_command="serve", credentials={"password": "secret"})
    one = await part.begin(caller(ours), asked)
    assert one.state is State.RUNNING
    await ended(part)
    done = await part.get(caller(ours), one.id)
    assert (done.state, done.image, done.code) == (State.READY, IMAGE, None)
    assert "secret" not in repr(done) + repr(asked)
    (made,) = await known(store, ours)
    assert (made.id, made.image, made.memory_mib, made.default_user, made.default_workdir) == (done.template_id, IMAGE, 256, "user", "/w")
    assert (made.env, made.command, made.source) == ((("A", "1"),), ("/bin/sh", "-c", "serve"), "registry:x")
    again = await part.begin(caller(ours), asked)
    await ended(part)
    (newer,) = await known(store, ours)
    assert (newer.id, newer.build_id == made.build_id) == (made.id, False)
    assert {item.id for item in await part.all(caller(ours))} == {one.id, again.id}


@pytest.mark.parametrize("code", [Code.IMAGE_CORRUPT, Code.IMAGE_REFUSED, Code.HOST_DISK_FULL])
async def test_a_bad_image_leaves_what_was(store: Store, ours: Team, tmp_path: Path, code: Code) -> None:
    before = template(name="web", team_id=ours.id)
    await store.write(lambda conn: tenancy.put_template(conn, before))
    part = imports(store, tmp_path, answer={"event": "failed", "code": code.value, "message": "why"})
    one = await part.begin(caller(ours), ImportRequest("web", "registry:x"))
    await ended(part)
    done = await part.get(caller(ours), one.id)
    assert (done.state, done.code, done.message, done.template_id) == (State.FAILED, code.value, "why", None)
    assert [item.image for item in await known(store, ours)] == [before.image]


async def test_what_there_is_not_and_what_others_import_is_not_found(store: Store, ours: Team, tmp_path: Path) -> None:
    part = imports(store, tmp_path, answer={"event": "failed", "code": Code.IMAGE_ACCESS_DENIED.value, "message": "401"})
    one = await part.begin(caller(ours), ImportRequest("web", "registry:x"))
    await ended(part)
    assert (await part.get(caller(ours), one.id)).code == Code.IMAGE_ACCESS_DENIED
    other = team()
    for who, which in ((other, one.id), (ours, "imp_nothere0000000000000")):
        with pytest.raises(Refused) as refused:
            await part.get(caller(who), which)
        assert refused.value.code is Code.IMPORT_NOT_FOUND


async def test_what_a_killed_process_left_has_failed(store: Store, ours: Team, tmp_path: Path) -> None:
    part = imports(store, tmp_path, script="sleep 60")
    one = await part.begin(caller(ours), ImportRequest("web", "registry:x"))
    await part.close()
    assert (await part.get(caller(ours), one.id)).state is State.RUNNING
    later = imports(store, tmp_path, answer={})
    left = unfinished(later, "layer-dlv_1", age_s=1)
    await later.open(alone=False)
    assert left.exists(), "another replica's, maybe"
    await later.open(alone=True)
    assert not left.exists()
    done = await later.get(caller(ours), one.id)
    assert (done.state, done.code) == (State.FAILED, Code.IMPORT_INTERRUPTED)


@pytest.mark.parametrize(
    "source", ["", "registry:", "oci-layout:/etc", "archive:/etc/passwd", "archive:sha256:" + "b" * 64, "docker-archive:x"]
)
async def test_no_path_comes_from_a_client(store: Store, ours: Team, tmp_path: Path, source: str) -> None:
    part = imports(store, tmp_path, answer={})
    with pytest.raises(Refused) as caught:
        await part.begin(caller(ours), ImportRequest("web", source))
    assert caught.value.code is Code.INVALID_REQUEST
    assert not part.tasks


async def test_another_team_s_upload_is_not_ours(store: Store, ours: Team, tmp_path: Path) -> None:
    part = imports(store, tmp_path, answer={"event": "failed", "code": "IMAGE_CORRUPT", "message": "no"})
    place = tmp_path / "uploads" / ours.id
    place.mkdir(parents=True)
    (place / f"{'b' * 64}.tar").touch()
    stranger = replace(ours, id=type(ours.id)("tea_other"))
    with pytest.raises(Refused):
        await part.begin(caller(stranger), ImportRequest("web", "archive:sha256:" + "b" * 64))
    await part.begin(caller(ours), ImportRequest("web", "archive:sha256:" + "b" * 64 + ":v1"))
    await ended(part)
    assert list(place.iterdir()) == []


async def test_names_and_rights(store: Store, ours: Team, tmp_path: Path) -> None:
    await store.write(lambda conn: tenancy.put_template(conn, template(name="base", team_id=None)))
    part = imports(store, tmp_path, answer={})
    for asked, code in (
        (ImportRequest("Web", "registry:x"), Code.INVALID_REQUEST),
        (ImportRequest("../x", "registry:x"), Code.INVALID_REQUEST),
        (ImportRequest("base", "registry:x"), Code.INVALID_REQUEST),
        (ImportRequest("web", "registry:x", public=True), Code.FORBIDDEN),
    ):
        with pytest.raises(Refused) as caught:
            await part.begin(caller(ours), asked)
        assert caught.value.code is code
    assert list(await part.all(caller(ours))) == []


async def test_deleting(store: Store, ours: Team, tmp_path: Path, put: Callable[..., Any]) -> None:
    part = imports(store, tmp_path, answer={})
    one = template(name="web", team_id=ours.id)
    await store.write(lambda conn: tenancy.put_template(conn, one))
    used = await put(spec=spec(template_id=one.id))
    with pytest.raises(Refused) as caught:
        await part.delete(caller(ours), one)
    assert caught.value.code is Code.TEMPLATE_IN_USE
    assert used.spec.image in await store.read(stored.images_wanted)
    other = template(name="other", team_id=ours.id)
    await store.write(lambda conn: tenancy.put_template(conn, other))
    await part.delete(caller(ours), other)
    assert [item.id for item in await known(store, ours)] == [one.id]
    with pytest.raises(Refused) as caught:
        await part.delete(caller(ours), template(name="base", team_id=None))
    assert caught.value.code is Code.FORBIDDEN


async def test_what_killed_pulls_left_goes_and_what_is_being_written_stays(store: Store, tmp_path: Path) -> None:
    part = imports(store, tmp_path, answer={})
    await part.tidy()
    pulled = unfinished(part, "fetch-1", age_s=0)
    coming, left = unfinished(part, "layer-dlv_1", age_s=30), unfinished(part, "layer-dlv_2", age_s=3600)
    async with part.keeping():
        await part.tidy()
        assert pulled.exists(), "another build may be pulling it"
    await part.tidy()
    assert not pulled.exists()
    assert not left.exists()
    assert coming.exists(), "a host sends it, maybe for another replica"
    await part.tidy()


async def test_a_pull_that_began_while_tidying_waited_is_spared(store: Store, tmp_path: Path) -> None:
    part = imports(store, tmp_path, answer={})
    pulled = unfinished(part, "fetch-1", age_s=0)
    await part.collecting.acquire()
    tidying = asyncio.create_task(part.tidy())
    await asyncio.sleep(0)
    async with contextlib.AsyncExitStack() as stack:
        holding = asyncio.create_task(stack.enter_async_context(part.keeping()))
        await asyncio.sleep(0)
        part.collecting.release()
        await asyncio.gather(tidying, holding)
        assert pulled.exists()
    await part.tidy()
    assert not pulled.exists()


def test_too_much_environment_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        environment(["A=" + "x" * ENV_BYTES_MAX])
    assert caught.value.code is Code.IMAGE_REFUSED

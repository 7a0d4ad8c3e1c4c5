"""What left its hosts since a backup is found in the artifact store, and rests there; on both stores, beside a real folder."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from atoll.control.artifacts.moments import FRESH_S as MOMENTS_FRESH_S
from atoll.control.artifacts.moments import Moments
from atoll.control.artifacts.rests import FRESH_S, SWEEP_EVERY_S, Rests
from atoll.domain.account import Account
from atoll.domain.command import Kind
from atoll.domain.host import Host
from atoll.domain.moment import Moment
from atoll.domain.placement import Holding, Observed, Report
from atoll.domain.sandbox import Condition, Sandbox, State
from atoll.domain.spec import SaveMode
from atoll.domain.tenancy import Team
from atoll.images.artifacts import Folder
from atoll.planning.stimuli import Heard
from atoll.store import facts, payloads, restoring, schema
from atoll.store.engine import Store
from atoll.store.payloads import Sealed
from tests.builders import NOW, placement, sandbox
from tests.store.test_moments import ids, machine, taking

KIND = "oci/gvisor/x86_64"


class Scene:
    """A store, and a folder that outlives what it knows. Its clock is the files' own."""

    def __init__(self, store: Store, ours: Team, path: Path) -> None:
        self.store, self.ours = store, ours
        self.folder = Folder(path)
        self.at = 0.0
        self.rests = Rests(store, self.folder, lambda: self.at, ids)
        self.moments = Moments(store, self.folder, lambda: self.at, self.rests)

    async def ready(self, there: Host, **changes: Any) -> Sandbox:
        one = sandbox(team_id=self.ours.id, state=State.READY, started_at=NOW, end_at=NOW + 300, host_id=there.id, **changes)
        place = placement(one, host_id=there.id, holding=Holding.ACTIVE, observed=Observed.RUNNING, ready=True, applied_revision=1)

        def work(conn: sa.Connection) -> Sandbox:
            facts.accept(conn, replace(one, host_id=None), payload=Sealed(b"sealed"), event_id=ids())
            found = facts.load(conn, one.id)
            assert found is not None
            return facts.commit(
                conn, found, facts.Outcome(replace(found.sandbox, placement_id=place.id, host_id=there.id), place, ()), now=NOW, ids=ids
            ).sandbox

        return await self.store.write(work)

    async def upload(self, placement_id: str, memory: str) -> Moment:
        """What a host does with what it has saved; the answer is all that it ever hears."""
        pack = memory.encode()
        name = hashlib.sha256(pack).hexdigest()
        await self.folder.write(f"packs/sha256/{name}", pack)
        self.at = self.changed(f"packs/sha256/{name}") + 1.0
        said = {"driver": "oci", "isolation": "gvisor", "arch": "x86_64", "mode": "full", "image": "sha256:1", "runtime": ""}
        content = json.dumps({"version": 1, "facts": said, "packs": [{"sha256": name, "size": len(pack)}]}).encode()
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        await self.moments.take(placement_id, digest, content)
        return Moment(digest, len(pack), KIND)

    def changed(self, key: str) -> float:
        return (self.folder.local / key).stat().st_mtime

    def keys(self, prefix: str) -> set[str]:
        root = self.folder.local / prefix
        return {path.name for path in root.rglob("*") if path.is_file()} if root.exists() else set()

    async def take_back(self) -> None:
        await self.store.write(lambda conn: restoring.next_life(conn, now=NOW + 60, chance=os.urandom))

    async def hear(self, there: Host) -> None:
        await self.store.write(
            lambda conn: conn.execute(sa.update(facts.HOSTS).where(facts.HOSTS.c.id == there.id).values(seen_at=NOW + 61))
        )

    async def look(self, one: Sandbox) -> Sandbox:
        found = await self.store.read(lambda conn: facts.load(conn, one.id))
        assert found is not None
        return found.sandbox

    async def absent(self, one: Sandbox, *, ended_by: str | None = "exit", reason: str | None = "PLACEMENT_LOST") -> Sandbox:
        """Its host says that it has nothing of it."""
        report = Report(99, Observed.ABSENT, one.generation, reason=reason)
        done = await self.store.write(
            lambda conn: facts.advance_sandbox(
                conn, one.id, Heard(report, ended_by=ended_by, placement_id=one.placement_id), now=NOW + 62, ids=ids
            )
        )
        assert done is not None
        return done.sandbox


@pytest.fixture
async def scene(store: Store, ours: Team, tmp_path: Path) -> Scene:
    await store.write(lambda conn: schema.deployment(conn, install_id="ins_one", incarnation="1.first", now=NOW))
    return Scene(store, ours, tmp_path / "artifacts")


async def test_what_left_its_host_since_the_backup_is_suspended_again(scene: Scene) -> None:
    there, silent = await machine(scene.store), await machine(scene.store)
    one = await scene.ready(there)
    # Since the backup: saved, uploaded, and given up by its host.
    moment = await scene.upload(str(one.placement_id), "memory")
    await scene.take_back()
    assert await scene.rests.mark() == 1
    assert (await scene.look(one)).state is State.READY, "its host may have it"
    await scene.hear(there)
    after = await scene.absent(one)
    assert (after.state, after.rests_in_store, after.moment, after.save_mode) == (State.SUSPENDED, True, moment, SaveMode.FULL)
    assert after.conditions == {Condition.HOSTS_UNSETTLED}, "another host may have it as a newer generation"
    assert await scene.store.read(lambda conn: payloads.get(conn, one.id)) is not None, "it comes back with its environment and token"
    await scene.hear(silent)
    done = await scene.store.write(taking(after, there))
    assert done is not None
    assert (done.sandbox.state, done.placement.moment) == (State.RESUMING, moment.digest)


async def test_without_a_note_it_is_lost_as_before(scene: Scene) -> None:
    there = await machine(scene.store)
    one = await scene.ready(there)
    await scene.take_back()
    assert await scene.rests.mark() == 0
    await scene.hear(there)
    after = await scene.absent(one)
    assert (after.state.value, after.reason) == ("released", "PLACEMENT_LOST")


async def test_what_its_host_has_goes_on_and_is_marked_no_more(scene: Scene) -> None:
    """It was saved once, and has gone on where it was: the older memory is nobody's."""
    there = await machine(scene.store)
    one = await scene.ready(there)
    await scene.upload(str(one.placement_id), "memory")
    await scene.take_back()
    await scene.rests.mark()
    said = Account(
        str(one.placement_id),
        one.id,
        one.team_id,
        one.generation,
        Kind.ENSURE_RUNNING,
        3,
        one.spec,
        "once",
        ready=True,
        observed=Observed.RUNNING,
    )
    await scene.store.write(lambda conn: restoring.take(conn, said, host_id=there.id, now=NOW + 61, ids=ids))
    now = await scene.look(one)
    assert (now.state, now.moment, now.conditions) == (State.READY, None, frozenset())
    await scene.hear(there)
    assert (await scene.absent(now)).reason == "PLACEMENT_LOST", "what is lost after that is lost"


async def test_what_ended_by_itself_since_is_not_brought_back(scene: Scene) -> None:
    there = await machine(scene.store)
    one = await scene.ready(there)
    await scene.upload(str(one.placement_id), "memory")
    await scene.take_back()
    await scene.rests.mark()
    after = await scene.absent(one, reason="GUEST_EXITED")
    assert after.state.value == "released"


async def test_of_several_generations_the_newest_rests(scene: Scene) -> None:
    there = await machine(scene.store)
    one = await scene.ready(there)
    await scene.upload(str(one.placement_id), "older memory")
    # The next generation was begun since the backup, on another host, and has left it, too.
    next_one = placement(replace(one, generation=2), host_id=there.id)
    found = await scene.store.read(lambda conn: facts.load(conn, one.id))
    assert found is not None
    note = scene.folder.local / "rests" / str(next_one.id)
    newest = await scene.upload(str(one.placement_id), "newer memory")
    said = json.loads((scene.folder.local / "rests" / str(one.placement_id)).read_text())
    note.write_text(json.dumps({**said, "generation": 2}))
    await scene.upload(str(one.placement_id), "older memory")
    await scene.take_back()
    assert await scene.rests.mark() == 1
    after = await scene.look(one)
    assert (after.generation, after.rests_in_store, after.moment) == (2, True, newest)
    await scene.hear(there)
    # The placement on record is an earlier one now, and is waited for as such.
    gone = await scene.store.write(
        lambda conn: facts.advance_sandbox(
            conn, one.id, Heard(Report(99, Observed.ABSENT, 1), ended_by="command", placement_id=one.placement_id), now=NOW + 62, ids=ids
        )
    )
    assert gone is not None
    assert (gone.sandbox.rests_in_store, gone.sandbox.unseen) == (True, 0)


async def test_nothing_is_collected_before_every_host_has_said_what_it_has(scene: Scene) -> None:
    there = await machine(scene.store)
    one = await scene.ready(there)
    await scene.upload(str(one.placement_id), "memory")
    stranger = await scene.upload(str((await scene.ready(there)).placement_id), "of what the backup does not know")
    await scene.store.write(lambda conn: conn.execute(sa.delete(facts.PLACEMENTS).where(facts.PLACEMENTS.c.id != one.placement_id)))
    await scene.take_back()
    scene.at += 10 * MOMENTS_FRESH_S
    before = scene.keys("")
    assert (await scene.moments.collect()).keys == ()
    assert await scene.rests.sweep() == [], "it marks"
    await scene.hear(there)
    await scene.absent(one)
    await scene.moments.collect()
    left = scene.keys("")
    assert left < before
    assert stranger.digest.removeprefix("sha256:") not in left
    kept = (await scene.look(one)).moment
    assert kept is not None
    assert kept.digest.removeprefix("sha256:") in left, "what is marked is needed"


async def test_a_note_goes_once_its_sandbox_has_gone_on_or_ended(scene: Scene) -> None:
    there = await machine(scene.store)
    one, other = await scene.ready(there), await scene.ready(there)
    for each in (one, other):
        await scene.upload(str(each.placement_id), each.id)
    assert await scene.rests.sweep() == [], "what is young is not looked at: its host's word of it is still to come"
    scene.at += FRESH_S + 1
    rests = sa.update(facts.SANDBOXES).values(state="suspended").where(facts.SANDBOXES.c.id == one.id)
    await scene.store.write(lambda conn: conn.execute(rests))
    assert await scene.rests.sweep() == [other.placement_id]
    assert scene.keys("rests") == {str(one.placement_id)}
    await scene.take_back()
    await scene.store.write(lambda conn: conn.execute(sa.update(facts.SANDBOXES).values(state="ready")))
    assert await scene.rests.sweep() == []
    await scene.hear(there)
    assert await scene.rests.sweep() == [], "that it is gone comes a moment after its host has said what it has"
    scene.at += SWEEP_EVERY_S
    assert await scene.rests.sweep() == [one.placement_id]

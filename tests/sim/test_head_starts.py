"""Head starts: what a build keeps of its start command, which creates begin from it, and when it goes; with scripted agents."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from atoll.control.builds.workshop import SandboxWorkshop
from atoll.control.loops.relief import HEAD_START_UNUSED_S
from atoll.domain.building import Build, Result, State, client_of, version
from atoll.domain.snapshot import Copy
from atoll.domain.snapshot import State as Kept
from atoll.domain.spec import SaveMode
from atoll.store import builds, copies, hosts, moments, snapshots, tenancy
from atoll.wire import agent as wire
from tests import builders
from tests.builders import IMAGE
from tests.sim.test_moments import heard_of
from tests.sim.test_snapshots import state_of, until_gone
from tests.sim.world import Agent, World, failing, keeper, obedient

RESULT = Result(image=IMAGE, env=(("OF", "template"),), command=("/bin/serve",), command_user="user", ready_command=("/bin/ask",))


def shop_of(world: World) -> SandboxWorkshop:
    """The real one, without its store of images: nothing here is unpacked."""
    sandboxes: Any = world.running.service._sandboxes
    return SandboxWorkshop(sandboxes, None, None, None, None)  # type: ignore[arg-type]


async def built(world: World, build_id: str, *, name: str = "served") -> tuple[Build, str]:
    """A build of a template of that name that has come to its end; and what its workshop said."""
    team = await world.store.read(lambda conn: tenancy.team(conn, "default"))
    known = await world.store.read(lambda conn: builds.templates_of(conn, team.id, name))
    template = known[0] if known else builders.template(team_id=team.id, name=name, aliases=(name,), public=False, image="", build_id="")
    build = Build(
        build_id, 1, template.id, team.id, name, ("default",), State.BUILDING, template.cpu_millis, template.memory_mib, template.disk_mib,
        world.clock.now(),
    )  # fmt: skip

    def begin(conn: Any) -> None:
        if not known:
            tenancy.put_template(conn, template)
        builds.add(conn, build)

    await world.store.write(begin)
    said = await shop_of(world).try_out(build, RESULT)

    def end(conn: Any) -> None:
        builds.commit(conn, replace(build, state=State.READY, result=RESULT, finished_at=world.clock.now()))
        builds.tag(conn, template.id, "default", build_id, now=world.clock.now())
        tenancy.put_template(conn, version(template, build, RESULT, now=world.clock.now()))

    await world.store.write(end)
    await shop_of(world).retire()
    return build, said


async def kept(world: World, build: Build) -> str | None:
    found = await world.store.read(lambda conn: snapshots.head_start(conn, build.team_id, client_of(build.id)))
    return None if found is None else str(found.id)


async def first_words(world: World, sandbox_id: str) -> dict[str, Any]:
    items = (await world.call("GET", f"/v1/sandboxes/{sandbox_id}/events")).json()["items"]
    return dict(next(one["data"] for one in items if one["type"] == "sandbox.accepted"))


def begun(agent: Agent, sandbox_id: str) -> wire.Command:
    return next(one for one in reversed(agent.commands) if one.sandbox_id == sandbox_id)


async def test_a_build_keeps_its_start_command_and_creates_begin_with_it(world: World, agent: Agent) -> None:
    async with agent.at_work():
        before = await world.used(agent.host_id)
        build, said = await built(world, "00000000-0000-4000-8000-00000000000a")
        assert "kept as it runs (3 MiB)" in said
        moment = await kept(world, build)
        assert moment is not None
        async with asyncio.timeout(10):
            while (await world.used(agent.host_id)).disk_mib != before.disk_mib + 3:
                await asyncio.sleep(0.01)  # Its sandbox goes; what is kept is counted in the host's disk.
        assert (await world.call("GET", "/v1/snapshots")).json()["items"] == [], "no list shows it"
        assert (await world.call("DELETE", f"/v1/snapshots/{moment}")).status_code == 404
        made = await world.create(template="served")
        assert made["origin"] is None
        assert (await first_words(world, made["id"]))["head_start"] == moment
        spec = begun(agent, made["id"]).spec
        assert spec is not None
        assert spec.origin is not None
        assert (spec.origin.snapshot_id, spec.origin.or_boot, spec.prefer_host, spec.require_host) == (moment, True, agent.host_id, None)
        assert agent.payloads[made["id"]].env["OF"] == "template"
        for body, because in (
            ({"size": {"memoryMib": 1024}}, "memory_mib"), ({"class": "shared-kernel"}, "isolation"),
        ):  # fmt: skip
            if (answer := await world.call("POST", "/v1/sandboxes", json={"template": "served", **body})).status_code == 201:
                words = await first_words(world, answer.json()["id"])
                assert words["head_start"] == "none"
                assert because in words["because"]
                other = begun(agent, answer.json()["id"]).spec
                assert other is not None
                assert other.origin is None
            else:
                assert "class" in body, answer.text
        assert "head_start" not in await first_words(world, (await world.create())["id"]), "base has no start command"


async def test_it_goes_with_its_build_and_with_its_template(world: World, agent: Agent) -> None:
    async with agent.at_work():
        first, _ = await built(world, "00000000-0000-4000-8000-00000000000a")
        old = await kept(world, first)
        second, _ = await built(world, "00000000-0000-4000-8000-00000000000b")
        new = await kept(world, second)
        assert old is not None
        assert new is not None
        await until_gone(world, old)
        assert await state_of(world, new) is Kept.READY
        assert (await world.call("DELETE", "/v1/templates/served")).status_code in (200, 204)
        await until_gone(world, new)
        assert not agent.kept


async def test_a_build_that_is_run_again_keeps_the_newest_alone(world: World, agent: Agent) -> None:
    async with agent.at_work():
        build, _ = await built(world, "00000000-0000-4000-8000-00000000000a")
        first = await kept(world, build)
        assert first is not None
        await shop_of(world).try_out(build, RESULT)
        again = await kept(world, build)
        assert again != first
        await shop_of(world).retire()
        await until_gone(world, first)
        assert await kept(world, build) == again


async def test_who_begins_from_it_is_waited_for(world: World, agent: Agent) -> None:
    async with agent.at_work():
        build, _ = await built(world, "00000000-0000-4000-8000-00000000000a")
        moment = await kept(world, build)
        assert moment is not None
        agent.script = lambda command: None  # It takes its time to begin.
        late = await world.accept(template="served")
        await built_anew(world)
        assert await state_of(world, moment) is Kept.READY, "somebody is being begun from it"
        await world.release(late)
        agent.script = obedient
        await shop_of(world).retire()
        await until_gone(world, moment)


async def built_anew(world: World) -> None:
    """The template has a version that keeps nothing; its older one is named by nothing."""

    def other(conn: Any) -> None:
        team = tenancy.team(conn, "default")
        assert team is not None
        (mine,) = builds.templates_of(conn, team.id, "served")
        tenancy.put_template(conn, replace(mine, build_id="00000000-0000-4000-8000-00000000000f"))
        builds.tag(conn, mine.id, "default", "00000000-0000-4000-8000-00000000000f", now=world.clock.now())

    await world.store.write(other)
    await shop_of(world).retire()


@pytest.mark.parametrize("how", ["files", "full"])
async def test_what_cannot_be_kept_is_no_condition_of_a_build(world: World, agent: Agent, how: str) -> None:
    def keeping(order: wire.SnapshotOrder) -> wire.SnapshotSeen | None:
        if order.wish is wire.SnapshotWish.DROP:
            return keeper(order)
        if how == "files":
            return keeper(order).model_copy(update={"save_mode": SaveMode.FILES})
        return wire.SnapshotSeen(id=order.id, state=wire.SnapshotState.FAILED, code="HOST_DISK_FULL", message="no room")

    agent.keeping = keeping
    async with agent.at_work():
        build, said = await built(world, "00000000-0000-4000-8000-00000000000a")
        assert "begins it anew" in said
        assert ("keeps no memory" if how == "files" else "HOST_DISK_FULL") in said
        assert await kept(world, build) is None
        made = await world.create(template="served")
        assert "head_start" not in await first_words(world, made["id"])
        async with asyncio.timeout(10):
            while agent.kept:
                await asyncio.sleep(0.01)


async def test_what_fails_with_it_begins_without(world: World, agent: Agent) -> None:
    async with agent.at_work():
        await built(world, "00000000-0000-4000-8000-00000000000a")

        def script(command: wire.Command) -> Any:
            return (
                failing("GUEST_BOOT_TIMEOUT")(command)
                if command.spec is not None and command.spec.origin is not None
                else obedient(command)
            )

        agent.script = script
        made = await world.create(template="served")
        assert made["state"] == "ready"
        assert made["generation"] == 2


async def test_a_host_that_boots_it_has_its_reason_in_the_history(world: World, agent: Agent) -> None:
    async with agent.at_work():
        await built(world, "00000000-0000-4000-8000-00000000000a")
        agent.script = lambda command: (
            {**done, "reason": "SNAPSHOT_UNAVAILABLE", "detail": "not here"}
            if (done := obedient(command)) and done["observed"] == "running"
            else done
        )
        made = await world.create(template="served")
        items = (await world.call("GET", f"/v1/sandboxes/{made['id']}/events")).json()["items"]
        (ready,) = [one["data"] for one in items if one["type"] == "sandbox.ready"]
        assert (ready["reason"], ready["detail"]) == ("SNAPSHOT_UNAVAILABLE", "not here")


async def test_an_environment_of_its_own_is_for_commands_that_begin_later(world: World, agent: Agent) -> None:
    async with agent.at_work():
        build, _ = await built(world, "00000000-0000-4000-8000-00000000000a")
        moment = await kept(world, build)
        for path, body in (
            ("/v1/sandboxes", {"template": "served", "env": {"MINE": "1"}}),
            ("/sandboxes", {"templateID": "served", "envVars": {"MINE": "1"}}),
        ):
            answer = await world.call("POST", path, json=body)
            assert answer.status_code == 201, answer.text
            sandbox_id = answer.json().get("id") or answer.json()["sandboxID"]
            assert (await first_words(world, sandbox_id))["head_start"] == moment
            spec = begun(agent, sandbox_id).spec
            assert spec is not None
            assert spec.origin is not None
            await agent.fetch(begun(agent, sandbox_id))
            env = agent.payloads[sandbox_id].env
            assert (env["MINE"], env["OF"]) == ("1", "template")


# Where several hosts could have it.

KIND = "fake/gvisor/x86_64"
DIGEST = "sha256:" + "5" * 64


@pytest.fixture
async def other(world: World, agent: Agent) -> Agent:
    """A second host, of the same kind, on which nothing is built. What the first keeps is in the store at once."""

    def keeping(order: wire.SnapshotOrder) -> wire.SnapshotSeen:
        stored = {"moment": DIGEST, "moment_size": 2 << 20, "moment_kind": KIND}
        return keeper(order) if order.wish is wire.SnapshotWish.DROP else keeper(order).model_copy(update=stored)

    agent.moments, agent.keeping = (KIND,), keeping
    await agent.poll()
    return await closed(world, "other", KIND)


async def closed(world: World, name: str, kind: str) -> Agent:
    """A host that takes nothing yet."""
    made = await world.agent(name, token=await world.token(name), moments=(kind,))
    await turn(world, made, "drain")
    return made


async def turn(world: World, agent: Agent, verb: str) -> None:
    answer = await world.call("POST", f"/v1/hosts/{agent.host_id}/{verb}")
    assert answer.status_code == 200, answer.text


async def test_another_host_that_fits_fetches_it_and_any_other_boots(world: World, agent: Agent, other: Agent) -> None:
    strange = await closed(world, "strange", "fake/gvisor/aarch64")
    async with agent.at_work(), other.at_work(), strange.at_work():
        build, _ = await built(world, "00000000-0000-4000-8000-00000000000a")
        moment = await kept(world, build)
        assert moment is not None
        await turn(world, other, "activate")
        await turn(world, strange, "activate")
        await heard_of(world, agent, other, strange)
        assert (await world.create(template="served"))["placement"]["hostId"] == agent.host_id, "where it is"
        await turn(world, agent, "drain")
        made = await world.create(template="served")
        assert made["placement"]["hostId"] == other.host_id, "it can go on from it"
        spec = begun(other, made["id"]).spec
        assert spec is not None
        assert spec.origin is not None
        assert (spec.origin.snapshot_id, spec.origin.moment, spec.origin.or_boot) == (moment, DIGEST, True)
        assert DIGEST in await world.store.read(lambda conn: moments.fetchable(conn, other.host_id))
        await turn(world, other, "drain")
        last = await world.create(template="served")
        assert last["placement"]["hostId"] == strange.host_id, "no host is left out"
        spec = begun(strange, last["id"]).spec
        assert spec is not None
        assert spec.origin is not None
        assert (spec.origin.or_boot, spec.origin.moment) == (True, None), "there is nothing for it to fetch"
        why = (await world.call("GET", f"/v1/sandboxes/{last['id']}/placement")).text
        assert "MOMENT_UNSUPPORTED" not in why


async def test_it_outlives_its_host_and_its_moment_goes_with_its_build(world: World, agent: Agent, other: Agent) -> None:
    async with other.at_work():
        async with agent.at_work():
            first, _ = await built(world, "00000000-0000-4000-8000-00000000000a")
            moment = await kept(world, first)
        assert moment is not None
        await turn(world, other, "activate")
        assert (await world.call("POST", f"/v1/hosts/{agent.host_id}/disable", json={"off": True})).status_code == 200
        async with asyncio.timeout(10):
            while (found := await world.store.read(lambda conn: snapshots.get(conn, moment))).copy is not Copy.NONE:
                await asyncio.sleep(0.01)
        assert found.state is Kept.READY
        made = await world.create(template="served")
        assert made["placement"]["hostId"] == other.host_id
        spec = begun(other, made["id"]).spec
        assert spec is not None
        assert spec.origin is not None
        assert (spec.origin.moment, spec.prefer_host) == (DIGEST, None)
        await world.release(made["id"])
        assert await world.store.read(moments.needed) == {DIGEST}
        await built_anew(world)
        await until_gone(world, moment)
        async with asyncio.timeout(10):
            while await world.store.read(moments.needed):
                await asyncio.sleep(0.01)


async def test_what_fails_with_one_that_was_fetched_begins_without_on_any_host(world: World, agent: Agent, other: Agent) -> None:
    async with agent.at_work(), other.at_work():
        await built(world, "00000000-0000-4000-8000-00000000000a")
        await turn(world, other, "activate")

        def script(command: wire.Command) -> Any:
            fails = command.spec is not None and command.spec.origin is not None
            return failing("GUEST_BOOT_TIMEOUT")(command) if fails else obedient(command)

        agent.script = other.script = script
        made = await world.create(template="served")
        assert (made["state"], made["generation"]) == ("ready", 2)
        placement = (await world.facts(made["id"])).placement
        assert placement is not None
        assert placement.origin_moment is None, "it has nothing to fetch"


async def fetched(world: World, agent: Agent, other: Agent) -> str:
    """A head start of the first host, from which a sandbox has begun on the other, that is gone again."""
    build, _ = await built(world, "00000000-0000-4000-8000-00000000000a")
    moment = await kept(world, build)
    assert moment is not None
    await turn(world, other, "activate")
    made = await world.create(template="served", preferHost="other")
    assert made["placement"]["hostId"] == other.host_id
    await world.release(made["id"])
    await world.until(made["id"], "released")
    return moment


async def disk(world: World, agent: Agent) -> int:
    return (await world.used(agent.host_id)).disk_mib


async def until_holds(world: World, agent: Agent, disk_mib: int) -> None:
    async with asyncio.timeout(10):
        while await disk(world, agent) != disk_mib:
            await asyncio.sleep(0.01)


async def test_what_a_host_fetches_counts_from_the_grant_until_it_is_seen_gone(world: World, agent: Agent, other: Agent) -> None:
    async with agent.at_work(), other.at_work():
        build, _ = await built(world, "00000000-0000-4000-8000-00000000000a")
        moment = await kept(world, build)
        assert moment is not None
        await turn(world, other, "activate")
        other.script = lambda command: None  # It takes its time.
        late = await world.accept(template="served", preferHost="other")
        await world.until(late, "provisioning")
        placement = (await world.facts(late)).placement
        assert placement is not None
        assert await disk(world, other) == placement.vector.disk_mib + 3, "before anything is fetched"
        other.script = obedient
        await world.release(late)
        await world.until(late, "released")
        await until_holds(world, other, 3)
        again = await world.create(template="served", preferHost="other")
        assert await disk(world, other) == placement.vector.disk_mib + 3, "it is fetched once"
        await world.release(again["id"])
        await world.until(again["id"], "released")
        world.running.relief.due.set()
        await heard_of(world, agent, other)
        assert await disk(world, other) == 3, "creates may come that begin from it"
        dropped: list[str] = []

        def dropping(order: wire.SnapshotOrder) -> wire.SnapshotSeen | None:
            dropped.append(order.id)
            return keeper(order)

        other.keeping = dropping
        world.clock.pass_s(HEAD_START_UNUSED_S + 1)
        world.running.relief.due.set()
        await until_holds(world, other, 0)
        assert dropped == [moment]


async def test_a_copy_goes_at_once_with_what_it_is_of(world: World, agent: Agent, other: Agent) -> None:
    async with agent.at_work(), other.at_work():
        moment = await fetched(world, agent, other)
        await built_anew(world)
        assert await state_of(world, moment) in (Kept.DELETING, Kept.DELETED)
        world.running.relief.due.set()
        await until_holds(world, other, 0)


async def test_a_copy_goes_at_once_when_its_disk_is_wanted(world: World, agent: Agent, other: Agent) -> None:
    async with agent.at_work(), other.at_work():
        await fetched(world, agent, other)
        await until_holds(world, other, 3)
        host = await world.store.read(lambda conn: hosts.by_id(conn, other.host_id))
        assert host is not None
        most = host.capacity.disk_mib
        await turn(world, agent, "drain")
        big = await world.create(size={"diskMib": int(most * 0.9)})
        assert big["placement"]["hostId"] == other.host_id
        await until_holds(world, other, int(most * 0.9))


async def test_a_create_that_finds_no_room_has_what_was_fetched_go(world: World, agent: Agent, other: Agent) -> None:
    async with agent.at_work(), other.at_work():
        await fetched(world, agent, other)
        await turn(world, agent, "drain")
        host = await world.store.read(lambda conn: hosts.by_id(conn, other.host_id))
        assert host is not None
        whole = await world.create(size={"diskMib": host.capacity.disk_mib - 1})
        assert (whole["state"], whole["placement"]["hostId"]) == ("ready", other.host_id)
        assert await disk(world, other) == host.capacity.disk_mib - 1, "nothing more than it has"


async def test_where_there_is_no_room_for_a_head_start_the_guest_boots(world: World, agent: Agent, other: Agent) -> None:
    async with agent.at_work(), other.at_work():
        build, _ = await built(world, "00000000-0000-4000-8000-00000000000a")
        assert await kept(world, build) is not None
        await turn(world, other, "activate")
        await turn(world, agent, "drain")
        await heard_of(world, agent, other)
        host = await world.store.read(lambda conn: hosts.by_id(conn, other.host_id))
        assert host is not None
        probe = await world.create(template="served")
        need = (await world.facts(probe["id"])).placement
        assert need is not None
        await world.release(probe["id"])
        await world.until(probe["id"], "released")
        world.clock.pass_s(HEAD_START_UNUSED_S + 1)
        world.running.relief.due.set()
        await until_holds(world, other, 0)
        filler = await world.create(size={"diskMib": host.capacity.disk_mib - need.vector.disk_mib - 1})
        made = await world.create(template="served")
        assert (made["state"], made["placement"]["hostId"], made["generation"]) == ("ready", other.host_id, 1)
        placement = (await world.facts(made["id"])).placement
        assert placement is not None
        assert placement.origin_moment is None, "it would not fit beside it"
        assert await disk(world, other) == host.capacity.disk_mib - 1
        await world.release(filler["id"])


async def test_what_a_host_names_that_was_never_counted_counts_and_goes(world: World, agent: Agent, other: Agent) -> None:
    """As after an upgrade, or a backup of before."""
    async with agent.at_work(), other.at_work():
        moment = await fetched(world, agent, other)
        await world.store.write(lambda conn: copies.lost(conn, other.host_id))
    later = other.next_run()
    told = (await later.poll(kept=[moment])).snapshots
    assert told == [], "creates may come that begin from it"
    assert await disk(world, other) == 3
    world.clock.pass_s(HEAD_START_UNUSED_S + 1)
    await world.running.relief.step()
    (told,) = (await later.poll(kept=[moment])).snapshots
    assert (told.id, told.wish) == (moment, wire.SnapshotWish.DROP)


async def test_a_copy_is_no_more_once_its_host_is_fenced(world: World, agent: Agent, other: Agent) -> None:
    async with agent.at_work(), other.at_work():
        await fetched(world, agent, other)
    assert (await world.call("POST", f"/v1/hosts/{other.host_id}/disable", json={"off": True})).status_code == 200
    await until_holds(world, other, 0)

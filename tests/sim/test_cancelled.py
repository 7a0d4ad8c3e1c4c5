"""Callers that are cancelled inside their commit: what is durable then is told all the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from atoll.base.secret import Secret
from atoll.base.units import ZERO
from atoll.domain.host import Admin, AdminEvent
from atoll.planning.stimuli import EndMoved, ReleaseRequested
from tests.sim.world import OPERATOR_KEY, Agent, World


class Slow:
    """A store whose word of a commit takes its time."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.committed = asyncio.Event()
        self.gate = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def write(self, work: Any, *, tell: Any = None, doubt: Any = None) -> Any:
        return await asyncio.shield(asyncio.ensure_future(self._write(work, tell)))

    async def _write(self, work: Any, tell: Any) -> Any:
        result = await self._store.write(work)
        self.committed.set()
        await self.gate.wait()
        if tell is not None:
            tell(result)
        return result


@contextlib.asynccontextmanager
async def cancelled(owner: Any, attribute: str, call: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """`call`, cancelled once its commit is durable; then the store says that it is."""
    store = getattr(owner, attribute)
    slow = Slow(store)
    setattr(owner, attribute, slow)
    try:
        task = asyncio.ensure_future(call)
        async with asyncio.timeout(5):
            await slow.committed.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        yield
        slow.gate.set()
        for _ in range(10):
            await asyncio.sleep(0)
    finally:
        setattr(owner, attribute, store)


async def test_a_release_wakes_who_waits_and_the_host(world: World, agent: Agent) -> None:
    sandbox_id = await world.accept()
    await agent.wanted()
    running = world.running
    with running.reconciler.hub.watch(sandbox_id) as waiting, running.reconciler.hub.work_for(agent.host_id) as work:
        async with cancelled(running.reconciler, "store", running.reconciler.apply(sandbox_id, ReleaseRequested())):
            assert not waiting.is_set(), "it is told when it is known to be durable"
        assert waiting.is_set()
        assert work.is_set()


async def test_a_new_end_is_told_to_edges(world: World, agent: Agent) -> None:
    async with agent.at_work():
        made = await world.create()
    routes, reconciler = world.running._routes, world.running.reconciler
    before = routes.cursor
    async with cancelled(reconciler, "store", reconciler.apply(made["id"], EndMoved(world.clock.now() + 5000))):
        assert routes.cursor == before
    assert routes.cursor > before


async def test_what_a_cancelled_placing_uses_is_known(world: World, agent: Agent) -> None:
    sandbox_id = await world.accept(requireHost="nobody")
    reconciler = world.running.reconciler
    known = await world.facts(sandbox_id)
    free = replace(known.sandbox, spec=replace(known.sandbox.spec, require_host=None))

    def used() -> object:
        return next(one.used for one in reconciler.directory.adverts() if one.host.id == agent.host_id)

    assert used() == ZERO
    async with cancelled(reconciler, "store", reconciler.place(free)):
        pass
    assert used() != ZERO


async def test_a_revoked_key_is_forgotten(world: World, agent: Agent) -> None:
    made = (await world.call("POST", "/v1/keys", json={"name": "doomed"})).json()
    keys = world.running.keys
    assert (await world.call("GET", "/v1/sandboxes", key=made["secret"])).status_code == 200
    caller = await keys.authenticate(Secret(OPERATOR_KEY))
    async with cancelled(keys, "_store", keys.revoke(caller, made["key"]["id"])):
        pass
    assert (await world.call("GET", "/v1/sandboxes", key=made["secret"])).status_code == 401


async def test_a_drained_host_is_known_as_one(world: World, agent: Agent) -> None:
    hosts = world.running.service._hosts
    caller = await world.running.keys.authenticate(Secret(OPERATOR_KEY))
    async with cancelled(hosts, "store", hosts.set_admin(caller, agent.host_id, AdminEvent.DRAIN, off=False)):
        pass
    known = world.running.reconciler.directory.host(agent.host_id)
    assert known is not None
    assert known.admin is Admin.DRAINING


async def test_a_renewed_lease_counts_for_a_fence(world: World, agent: Agent) -> None:
    """Or what the host holds would be counted as gone while its agent may still act."""
    sessions = world.running.sessions
    world.clock.pass_s(10)
    before = dict(world.running.fencing._renewed)
    host = await sessions.host_of(agent.credential)
    async with cancelled(sessions, "_store", sessions.poll(host, agent.message())):
        pass
    assert world.running.fencing._renewed[agent.host_id] > before[agent.host_id]

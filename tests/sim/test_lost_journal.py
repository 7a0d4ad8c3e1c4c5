"""An agent that has lost its database counts its observations from one again. It is believed, and everything can be ended.

Control took each of them for an old one: sandboxes stayed ready with nobody to end them, deletes stayed releasing for ever.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.base.ids import Prefix
from atoll.base.units import ZERO
from atoll.control.sessions.sessions import FRESH_S
from atoll.domain.placement import Observed
from atoll.wire import agent as wire
from tests.builders import fresh
from tests.sim.world import Agent, World


async def with_two_ready(world: World, agent: Agent) -> tuple[str, str]:
    """Two ready sandboxes, seen often enough that their sequence numbers are high."""
    made = []
    for _ in range(2):
        await world.accept()
        command = await agent.wanted()
        for _ in range(5):
            agent.see(command.placement_id, observed=Observed.STARTING)
            await agent.observe()
        agent.see(command.placement_id, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
        await agent.observe()
        made.append(command.sandbox_id)
    return made[0], made[1]


def amnesiac(agent: Agent) -> Agent:
    """The host's next run, without the database of the last one."""
    return replace(
        agent, epoch=fresh(Prefix.EPOCH), previous_epoch=None, poll_seq=0, commands=[], payloads={},
        holds={}, ends={}, tombstones=[], unheard={}, seqs={}, generations={},
    )  # fmt: skip


async def test_what_it_cannot_explain_ends_with_a_reason(world: World, agent: Agent) -> None:
    ready = await with_two_ready(world, agent)
    world.clock.pass_s(FRESH_S + 1)
    again = amnesiac(agent)

    def refuse(command: wire.Command) -> dict[str, object]:
        if command.kind == "ensure_absent":
            return {"observed": Observed.ABSENT}
        return {"observed": Observed.ERROR, "reason": "HOST_QUARANTINED", "applied_revision": 0}

    again.script = refuse
    async with again.at_work():
        for sandbox_id in ready:
            assert (await world.until(sandbox_id, "failed"))["reason"] == "HOST_QUARANTINED"
    assert await world.used(agent.host_id) == ZERO


async def test_a_delete_is_confirmed(world: World, agent: Agent) -> None:
    ready = await with_two_ready(world, agent)
    world.clock.pass_s(FRESH_S + 1)
    again = amnesiac(agent)
    for sandbox_id in ready:
        await world.release(sandbox_id)
    # Each is carried out and told once: a real agent keeps its tombstone and does not see more than that.
    for command in (await again.poll()).commands:
        await again.obey(command)
    assert [(await world.show(sandbox_id))["state"] for sandbox_id in ready] == ["released", "released"]
    assert await world.used(agent.host_id) == ZERO


async def test_a_run_that_has_it_is_still_held_to_its_sequence_numbers(world: World, agent: Agent) -> None:
    (sandbox_id, _) = await with_two_ready(world, agent)
    placement = next(one for one, (of, _) in agent.generations.items() if of == sandbox_id)
    successor = agent.next_run()
    await successor.poll()
    old = wire.Observation(placement_id=placement, sandbox_id=sandbox_id, generation=1, seq=1, observed=Observed.ABSENT)
    await successor.observe(old)
    assert (await world.show(sandbox_id))["state"] == "ready"

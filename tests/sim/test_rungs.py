"""The default class gives what the strongest living host offers, warm guests too; and an answer says what a sandbox has."""

from __future__ import annotations

from atoll.wire import agent as wire
from tests.sim.test_warm import keep, until_warm, warm_ids
from tests.sim.world import Agent, World

MACHINES = ("gvisor", "vm")


async def test_where_a_host_boots_machines_the_default_class_gives_one(world: World) -> None:
    agent = await world.agent(isolations=MACHINES, drivers=(wire.DriverState(isolation="vm", name="firecracker", saves="full"),))
    async with agent.at_work():
        made = await world.create()
        shown = (await world.call("GET", f"/v1/sandboxes/{made['id']}")).json()
        assert shown["isolation"] == "vm"
        assert shown["machine"] == {"driver": "firecracker", "hardware": "virtualized", "saves": "full"}
        await keep(world, 1)
        await until_warm(world, 1)
        before = await warm_ids(world)
        claimed = await world.create()
        assert claimed["id"] in before, "what is kept warm is what a create gives"
        assert claimed["isolation"] == "vm"


async def test_without_one_it_gives_gvisor_and_says_what_is_not_known(world: World, agent: Agent) -> None:
    async with agent.at_work():
        made = await world.create()
        assert made["isolation"] == "gvisor"
        assert made["machine"] == {"driver": None, "hardware": None, "saves": None}

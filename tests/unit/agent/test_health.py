"""When the drivers' probes are run again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from atoll.agent.config import AgentConfig
from atoll.agent.doctor import Finding
from atoll.agent.health import LOOK_EVERY_S, PROBE_AGAIN_S, Health
from atoll.agent.inventory import Quarantine
from atoll.base.errors import Code, Refused
from atoll.domain.spec import Isolation
from atoll.drivers.port import Capabilities, Probe
from atoll.wire.agent import HostFacts, ImageCacheState


class Time:
    at = 1000.0

    def now(self):
        return self.at

    def boot(self):
        return self.at


@dataclass
class Driver:
    """Its probe finds what `ok` says."""

    ok: bool = True
    probes: int = 0
    capabilities: Capabilities = field(
        default_factory=lambda: Capabilities(name="scripted", isolation=Isolation.GVISOR, arch="x86_64", stop_keeps_disk=False)
    )

    async def probe(self):
        self.probes += 1
        return [Probe("scripted.boot", self.ok, "")]

    async def images(self):
        return []


@dataclass
class Looks:
    """The host's cheap checks."""

    ok: bool = True

    async def run(self):
        return [Finding("host.disk", "disk", self.ok, "", fatal=True)]


@pytest.fixture
def stand(tmp_path: Path):
    driver, time, looks = Driver(), Time(), Looks()
    facts = HostFacts(arch="x86_64", cpu_count=1, memory_mib=1024, disk_mib=1024)
    config = AgentConfig(state_directory=tmp_path, control_url="http://127.0.0.1:1", facts=facts)
    health = Health(config, {Isolation.GVISOR: driver}, Quarantine(), time)
    health._cheap = looks
    return health, driver, time, looks


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_probe_that_fails_is_run_again_when_the_host_comes_right(stand):
    health, driver, time, looks = stand
    driver.ok = looks.ok = False
    await health.probe()
    keeping = asyncio.create_task(health.keep_probing())
    assert (await health.compose()).isolations == []
    await settled()
    assert driver.probes == 1
    driver.ok = looks.ok = True
    time.at += LOOK_EVERY_S + 1
    await health.compose()
    await settled()
    assert driver.probes == 2
    assert (await health.compose()).isolations == ["gvisor"]
    keeping.cancel()


async def test_what_it_keeps_of_images_is_told_and_a_look_that_fails_says_what_was_seen_last(stand):
    health, _driver, time, _looks = stand
    await health.probe()
    assert (await health.compose()).image_cache is None
    state = ImageCacheState(trees=3, tree_bytes=30)
    health._config = replace(health._config, image_cache=lambda: state)
    time.at += LOOK_EVERY_S + 1
    assert (await health.compose()).image_cache == state

    def broken() -> ImageCacheState:
        raise Refused(Code.SETUP_FAILED, "the file cannot be used")

    health._config = replace(health._config, image_cache=broken)
    time.at += LOOK_EVERY_S + 1
    assert (await health.compose()).image_cache == state


async def test_a_host_that_stays_as_it_is_is_not_probed_before_its_time(stand):
    health, driver, time, _looks = stand
    driver.ok = False
    await health.probe()
    keeping = asyncio.create_task(health.keep_probing())
    for _ in range(3):
        time.at += LOOK_EVERY_S + 1
        await health.compose()
        await settled()
    assert driver.probes == 1
    assert time.at < 1000.0 + PROBE_AGAIN_S
    keeping.cancel()


async def test_only_what_failed_is_tried_again_unless_a_placement_made_the_host_doubtful(tmp_path: Path):
    """A machine that is emulated boots for half a minute: not again and again because there is no other kind here."""
    works, fails, time = Driver(), Driver(ok=False), Time()
    facts = HostFacts(arch="x86_64", cpu_count=1, memory_mib=1024, disk_mib=1024)
    config = AgentConfig(state_directory=tmp_path, control_url="http://127.0.0.1:1", facts=facts)
    health = Health(config, {Isolation.VM_EMULATED: works, Isolation.VM: fails}, Quarantine(), time)
    looks = health._cheap = Looks()
    await health.probe()
    keeping = asyncio.create_task(health.keep_probing())
    for number in range(2):
        for looks.ok in (False, True):
            time.at += LOOK_EVERY_S + 1
            await health.compose()
        await settled()
        assert (works.probes, fails.probes) == (1, 2 + number)
    told = (await health.compose()).drivers
    assert [(one.isolation, one.name, one.saves) for one in told] == [("vm-emulated", "scripted", None)]
    health.suspect(Code.START_FAILED)
    for looks.ok in (False, True):
        time.at += LOOK_EVERY_S + 1
        await health.compose()
    await settled()
    assert (works.probes, fails.probes) == (2, 4)
    keeping.cancel()


async def test_a_host_that_came_right_before_a_doubt_is_probed_no_sooner_for_it(stand):
    health, driver, time, looks = stand
    looks.ok = False
    await health.probe()
    await health.compose()
    looks.ok = True
    time.at += LOOK_EVERY_S + 1
    await health.compose()
    keeping = asyncio.create_task(health.keep_probing())
    await settled()
    health.suspect(Code.START_FAILED)
    await settled()
    assert driver.probes == 1
    keeping.cancel()


async def test_what_one_driver_has_found_counts_while_another_one_still_tries(tmp_path: Path):
    """A guest that is emulated boots for a long time: those behind other drivers need not wait for it."""

    class Slow(Driver):
        gate = asyncio.Event()

        async def probe(self):
            await self.gate.wait()
            return await super().probe()

    quick, slow = Driver(), Slow(ok=True)
    facts = HostFacts(arch="x86_64", cpu_count=1, memory_mib=1024, disk_mib=1024)
    config = AgentConfig(state_directory=tmp_path, control_url="http://127.0.0.1:1", facts=facts)
    drivers = {Isolation.VM: slow, Isolation.GVISOR: quick}
    health = Health(config, drivers, Quarantine(), Time(), recalled=["shared-kernel"])
    health._cheap = Looks()
    probing = asyncio.create_task(health.probe())
    await settled()
    assert (await health.compose()).isolations == ["gvisor"]
    slow.gate.set()
    await probing
    assert (await health.compose()).isolations == ["gvisor", "vm"]

    again = Health(config, drivers, Quarantine(), Time(), recalled=["vm", "gvisor"])
    again._cheap = Looks()
    slow.gate.clear()
    quick.ok = False
    probing = asyncio.create_task(again.probe())
    await settled()
    assert (await again.compose()).isolations == ["vm"], "what an earlier run found counts until this one knows better"
    slow.gate.set()
    await probing
    assert (await again.compose()).isolations == ["vm"]

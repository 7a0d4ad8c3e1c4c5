"""The agent's composition root: this machine's drivers, its identity, and the agent that joins them to control. Runs as root.

A host that has no credential yet enrols with the one-use token that `up` left for it, and removes the token once the credential is on the
disk. `sweep` is what `down` does when the agent has ended: everything with this instance's mark is removed, by the same drivers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from atoll.base.errors import AtollError, Code, OutcomeUnknown, Refused, Unavailable
from atoll.base.secret import Secret
from atoll.base.units import Vector
from atoll.programs import instance
from atoll.programs.clock import SystemClock
from atoll.programs.layout import USER, Layout, bin_directory, cache_directory, layout_of
from atoll.programs.settling import settle_down
from atoll.telemetry import events
from atoll.telemetry.log import configure, get_logger

if TYPE_CHECKING:
    from atoll.agent.config import AgentConfig, Identity
    from atoll.domain.spec import Isolation
    from atoll.drivers.port import Driver

NAME: Final = "agent"
CPU_OVERCOMMIT: Final = 16
MEMORY_OVERCOMMIT: Final = 1
DISK_OVERCOMMIT: Final = 8
"""Disks of sandboxes are sparse; what is really free is looked at again when one is made."""
SLOTS: Final = 2048
ENROLL_S: Final = 120.0
_ENROLL_EVERY_S: Final = 0.25

log = get_logger()


def capacity(facts_cpu: int, facts_memory_mib: int, free_disk_mib: int) -> Vector:
    """What this machine registers, overcommit applied. *Units*: cores, MiB."""
    return Vector(
        cpu_millis=facts_cpu * 1000 * CPU_OVERCOMMIT,
        memory_mib=facts_memory_mib * MEMORY_OVERCOMMIT,
        disk_mib=free_disk_mib * DISK_OVERCOMMIT,
        slots=SLOTS,
    )


def drivers(place: Layout, config: instance.Config, *, host_id: str) -> dict[Isolation, Driver]:
    """The drivers of this machine by what they isolate with: gVisor by runsc, a shared kernel by crun or runc. They share one slot pool."""
    from atoll.domain.spec import Isolation
    from atoll.drivers.oci.build import oci_driver, slot_pool
    from atoll.drivers.oci.config import OciConfig, RuntimeKind
    from atoll.drivers.port import Mark
    from atoll.images.carrier import Carrier
    from atoll.images.unpacking import Unpacking

    mark = Mark(config.install_id, host_id)
    pool = slot_pool(mark, subnet=config.subnet)
    binaries = bin_directory()
    unpacking = Unpacking(Carrier(binaries / "atoll-io", place.blobs), place.images)

    def of(kind: RuntimeKind) -> OciConfig:
        return OciConfig(
            runtime=kind,
            state_dir=place.sandboxes,
            run_dir=place.run / "oci",
            image_cache=cache_directory(),
            guest_binary=binaries / "atoll-guest",
            mark=mark,
            runsc=binaries / "runsc",
            crun=_found("crun"),
            runc=_found("runc"),
            unpacking=unpacking,
        )

    return {
        Isolation.GVISOR: oci_driver(of(RuntimeKind.RUNSC), pool),
        Isolation.SHARED_KERNEL: oci_driver(of(RuntimeKind.CRUN), pool),
    }


def _found(name: str) -> Path:
    return Path(shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin") or f"/usr/bin/{name}")


def agent_config(place: Layout, config: instance.Config) -> AgentConfig:
    """Where the agent keeps its things and whom it dials."""
    from atoll.agent.config import AgentConfig
    from atoll.agent.facts import read_facts

    return AgentConfig(
        state_directory=place.agent,
        control_url=config.control_url,
        facts=read_facts(place.agent),
        agent_version=version("atoll"),
        resolver=(str(bin_directory() / "atoll-io"), "dns", "--user", USER),
    )


async def identity(place: Layout, config: instance.Config, settings: AgentConfig) -> Identity:
    """Who this host is: by its credential, or by enrolling now. *Errors*: Refused SETUP_FAILED, ENROLLMENT_*."""
    from atoll.agent.config import load_identity

    known = load_identity(settings.credential_path)
    if known is None:
        known = await _enroll(place, config, settings)
    elif known.install_id != config.install_id:
        raise Refused(Code.SETUP_FAILED, f"the credential in {settings.credential_path} is of another install ({known.install_id})")
    place.enrollment_token.unlink(missing_ok=True)
    return known


async def _enroll(place: Layout, config: instance.Config, settings: AgentConfig) -> Identity:
    from atoll.agent.enrollment import enroll
    from atoll.agent.facts import free_mib
    from atoll.agent.transport import HttpTransport

    try:
        token = Secret(place.enrollment_token.read_text().strip())
    except FileNotFoundError:
        raise Refused(
            Code.ENROLLMENT_TOKEN_INVALID,
            f"this host has neither a credential nor a token in {place.enrollment_token}",
            hint="Run `atoll up`.",
        ) from None
    facts = settings.facts
    amount = capacity(facts.cpu_count, facts.memory_mib, free_mib(place.sandboxes))
    deadline = time.monotonic() + ENROLL_S
    while True:
        transport = HttpTransport(config.control_url)
        try:
            return await enroll(settings, token, registrar=transport, name=config.host_name, capacity=amount)
        except (Unavailable, OutcomeUnknown) as error:
            if time.monotonic() > deadline:
                raise
            log.debug(events.CONTROL_LOST, error=error.message)
        finally:
            await transport.close()
        await asyncio.sleep(_ENROLL_EVERY_S)


async def run(place: Layout, config: instance.Config) -> int:
    """Be the agent until SIGTERM; the process's exit status."""
    from atoll.agent.agent import Agent
    from atoll.agent.transport import HttpTransport
    from atoll.programs.heard import Heard

    settings = agent_config(place, config)
    who = await identity(place, config, settings)
    agent = Agent(
        settings,
        who,
        drivers=drivers(place, config, host_id=who.host_id),
        clock=SystemClock(),
        dice=os.urandom,
        transport=HttpTransport(config.control_url, who.credential),
        on_answer=Heard(place.agent_health, version("atoll")),
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop)
    settle_down()
    log.info(events.PROCESS_STARTED, pid=os.getpid(), host_id=who.host_id)
    try:
        return await agent.run()
    finally:
        log.info(events.PROCESS_STOPPED)


def main() -> None:
    """Run until SIGTERM."""
    import uvloop

    configure(NAME, os.environ.get("ATOLL_LOG_LEVEL", "info"))
    place = layout_of()
    try:
        config = instance.load(place)
        status = uvloop.run(run(place, config))
    except AtollError as error:
        log.error(events.PROCESS_FAILED, code=error.code, message=error.message, hint=error.hint)  # noqa: TRY400 - the message is all of it
        sys.exit(1)
    sys.exit(status)


def join(place: Layout) -> str:
    """Enrol this machine; its host id. *Errors*: as `identity`."""
    config = instance.load(place)
    settings = agent_config(place, config)
    return asyncio.run(identity(place, config, settings)).host_id


async def sweep(place: Layout, config: instance.Config) -> list[str]:
    """Remove everything on this machine that carries this instance's mark; what was removed. The agent must have ended.

    *Idempotency*: nothing left is fine. *Errors*: Refused CLEANUP_FAILED names what is still there; AGENT_LOCKED when an agent runs.
    """
    from atoll.agent.config import load_identity

    known = load_identity(place.credential)
    if known is None:
        return []
    removed: list[str] = []
    failures: list[str] = []
    with agent_stopped(place):
        opened: list[Driver] = []
        try:
            for driver in drivers(place, config, host_id=known.host_id).values():
                await driver.open(no_news)
                opened.append(driver)
                for held in await driver.held():
                    try:
                        await driver.remove(held.placement_id)
                        removed.append(held.placement_id)
                    except AtollError as error:
                        failures.append(error.message)
        finally:
            for driver in reversed(opened):
                await driver.close()
    if failures:
        raise Refused(Code.CLEANUP_FAILED, f"not everything could be removed: {'; '.join(failures)}", hint="Run `atoll down` again.")
    return removed


@contextlib.contextmanager
def agent_stopped(place: Layout) -> Iterator[None]:
    """Hold the agent's place, so that none starts meanwhile. *Errors*: Refused AGENT_LOCKED."""
    from atoll.agent.lock import Lock

    with Lock(place.agent / "lock"):
        yield


async def no_news(_placement_id: str, _reason: str) -> None:
    """What ends during a sweep was ended by it."""


if __name__ == "__main__":
    main()

"""The agent's composition root: this machine's drivers, its identity, and the agent that joins them to control. Runs as root.

How this machine is a host (`hosting.py`) says who control is and which drivers there are. A host that has no credential yet enrols with the
one-use token that `up` or `agent join` left for it, and removes the token once the credential is on the disk. `sweep` is what `down` does
when the agent has ended: everything with this host's mark is removed, by the same drivers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from atoll.base.errors import AtollError, Code, OutcomeUnknown, Refused, Unavailable
from atoll.base.secret import Secret
from atoll.base.units import Vector
from atoll.domain.inventory import Inventory, capacity
from atoll.programs import control_config, hosting, subnets
from atoll.programs.clock import SystemClock
from atoll.programs.files import read_json
from atoll.programs.layout import USER, Layout, bin_directory, cache_directory, layout_of
from atoll.programs.settling import settle_down
from atoll.telemetry import events
from atoll.telemetry.log import configure, get_logger

if TYPE_CHECKING:
    from atoll.agent.config import AgentConfig, Identity
    from atoll.agent.enrollment import Admit, Obtained
    from atoll.agent.moments import MomentStore
    from atoll.agent.transport import HttpTransport
    from atoll.domain.spec import Isolation
    from atoll.drivers.oci.config import OciConfig, RuntimeKind
    from atoll.drivers.oci.driver import OciDriver
    from atoll.drivers.oci.slots import SlotPool
    from atoll.drivers.port import Driver, Mark
    from atoll.images.machine_files import MachineFiles
    from atoll.images.shelf import Shelf
    from atoll.images.trust import Trust
    from atoll.images.unpacking import Unpacking
    from atoll.programs.hosting import HostConfig
    from atoll.wire.agent import ImageCacheState, Registration

NAME: Final = "agent"
ENROLL_S: Final = 120.0
FOLLOW_KEYS_S: Final = 120.0
_ENROLL_EVERY_S: Final = 0.25

log = get_logger()


def drivers(place: Layout, config: HostConfig, *, host_id: str, unpacking: Unpacking | None = None) -> dict[Isolation, Driver]:
    """The drivers of this machine by what they isolate with. `unpacking`: else one of their own."""
    from atoll.drivers.port import Mark

    mark = Mark(config.install_id, host_id)
    if config.driver is hosting.DriverName.FAKE:
        return _fake_drivers(place, mark)
    return _oci_drivers(place, mark, config, unpacking or own_images(place, config))


def _fake_drivers(place: Layout, mark: Mark) -> dict[Isolation, Driver]:
    """Both isolations on one machine that only exists in files; its images are those that the cache has manifests of."""
    from atoll.domain.spec import Isolation
    from atoll.drivers.fake.driver import FakeDriver
    from atoll.drivers.fake.kept import KeptMachine
    from atoll.drivers.port import Image

    images = []
    for path in sorted((cache_directory() / "templates").glob("*/current/manifest.json")):
        manifest = read_json(path) or {}
        images.append(Image(str(manifest.get("digest", "")), str(manifest.get("name", "")), labels={"arch": "x86_64"}))
    machine = KeptMachine(place.fake_machine, images=images)
    return {Isolation.GVISOR: FakeDriver(mark, machine=machine)}


def trusting(place: Layout, config: HostConfig) -> Trust:
    """Which images this host believes in."""
    from atoll.images.trust import Trust
    from atoll.programs.told import Told

    return Trust(place.agent, Told(place, config))


def own_images(place: Layout, config: HostConfig, trust: Trust | None = None) -> Unpacking:
    """What makes this host's images. `trust`: else one of its own."""
    from atoll.images.carrier import Carrier
    from atoll.images.policy import FILE
    from atoll.images.unpacking import Unpacking

    program, policy, trust = bin_directory() / "atoll-io", place.agent / FILE, trust or trusting(place, config)
    if config.joined or control_config.load(place).artifacts is not None:
        carrier = Carrier(program, place.fetched)
        return Unpacking(carrier, place.images, objects=lambda: objects(place, config), trust=trust, policy=policy)
    # Control's own folder: its blobs are there.
    return Unpacking(Carrier(program, place.blobs), place.images, trust=trust, policy=policy)


def shelf(place: Layout, unpacking: Unpacking) -> Shelf:
    """This host's images, for people."""
    from atoll.drivers.oci.images import in_use
    from atoll.images.cache import ImageCache
    from atoll.images.policy import FILE
    from atoll.images.shelf import Shelf

    cache = ImageCache(cache_directory(), place.images)
    return Shelf(unpacking, cache, place.agent / FILE, lambda: in_use(place.sandboxes))


def _oci_drivers(place: Layout, mark: Mark, config: HostConfig, unpacking: Unpacking) -> dict[Isolation, Driver]:
    """GVisor by runsc, a shared kernel by crun or runc, virtual machines where the operator wants them. They share one slot pool."""
    from atoll.domain.spec import Isolation
    from atoll.drivers.oci.build import oci_driver, slot_pool
    from atoll.drivers.oci.config import OciConfig, RuntimeKind
    from atoll.programs.machines import Machines

    pool = slot_pool(mark, subnet=config.subnet or 0)
    binaries = bin_directory()

    def of(kind: RuntimeKind) -> OciConfig:
        return OciConfig(
            runtime=kind,
            state_dir=place.sandboxes,
            run_dir=place.run / ("oci" if kind in (RuntimeKind.RUNSC, RuntimeKind.CRUN) else kind.value),
            image_cache=cache_directory(),
            guest_binary=binaries / "atoll-guest",
            mark=mark,
            runsc=binaries / "runsc",
            crun=_found("crun"),
            runc=_found("runc"),
            unpacking=unpacking,
            packer=binaries / "atoll-io",
        )

    found: dict[Isolation, Driver] = {
        Isolation.GVISOR: oci_driver(of(RuntimeKind.RUNSC), pool),
        Isolation.SHARED_KERNEL: oci_driver(of(RuntimeKind.CRUN), pool),
    }
    if config.machines is not Machines.OFF:
        found |= _machine_drivers(place, config, of, pool)
    return found


def _machine_drivers(
    place: Layout, config: HostConfig, of: Callable[[RuntimeKind], OciConfig], pool: SlotPool
) -> dict[Isolation, OciDriver]:
    """Machines with KVM: by Firecracker where the operator has pinned one, else by QEMU; and emulated ones, if need be."""
    from atoll.domain.spec import Isolation
    from atoll.drivers.firecracker.build import firecracker_driver
    from atoll.drivers.oci.config import RuntimeKind
    from atoll.drivers.qemu.build import qemu_driver
    from atoll.drivers.qemu.config import QemuConfig
    from atoll.programs.machines import Machines, pinned

    cache = _kernels(place)
    firecracker = pinned(place.firecracker, cache)
    found: dict[Isolation, OciDriver] = {}
    if firecracker is not None:
        found[Isolation.VM] = firecracker_driver(of(RuntimeKind.FIRECRACKER), firecracker, pool)
    else:
        found[Isolation.VM] = qemu_driver(of(RuntimeKind.QEMU), QemuConfig(cache), pool)
    if config.machines is Machines.EMULATED:
        found[Isolation.VM_EMULATED] = qemu_driver(of(RuntimeKind.QEMU_EMULATED), QemuConfig(cache), pool)
    return found


def machine_files(place: Layout, config: HostConfig, trust: Trust, unpacking: Unpacking) -> MachineFiles:
    """What this host's virtual machines boot by, where the deployment has signed that."""
    from atoll.images.cache import OWN
    from atoll.images.machine_files import MachineFiles
    from atoll.programs.told import Told

    async def unpack(digest: str) -> Path:
        with unpacking.pin(digest):
            await unpacking.have(digest)
            await unpacking.ensure(digest)
        return unpacking.directory / OWN / digest.removeprefix("sha256:") / "rootfs"

    return MachineFiles(place.machine_files, Told(place, config), trust, unpack, os.uname().machine)


def _kernels(place: Layout) -> Path:
    """Where kernels are: what the deployment has signed counts, once this host was told of it."""
    from atoll.images.machine_files import is_told

    return place.machine_files if is_told(place.machine_files) else cache_directory()


def objects(place: Layout, config: HostConfig) -> dict[str, Any]:
    """Where a machine that joined has its images from: control, to which it shows its credential. Holds it: never to be logged."""
    from atoll.agent.config import load_identity

    known = load_identity(place.credential)
    if known is None:
        raise Refused(Code.IMAGE_ACCESS_DENIED, "this host has no credential, so control gives it no image")
    settings: dict[str, Any] = {"urls": list(config.control), "credential": known.credential.reveal()}
    if config.authority is not None:
        settings["authority"] = str(config.authority)
    return {"control": settings}


def moments(place: Layout, config: HostConfig) -> MomentStore:
    """The way to what is saved elsewhere, and of what is saved here: by control, which has it in the deployment's artifact store."""
    from atoll.agent.moments import CarriedMoments
    from atoll.drivers.oci.config import DISK_SPARE_MIB
    from atoll.images.moments import MomentCarrier

    carrier = MomentCarrier(bin_directory() / "atoll-io", lambda: objects(place, config))
    return CarriedMoments(carrier, place.agent / "moments", spare_bytes=DISK_SPARE_MIB << 20)


def _found(name: str) -> Path:
    return Path(shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin") or f"/usr/bin/{name}")


def agent_config(place: Layout, config: HostConfig) -> AgentConfig:
    """Where the agent keeps its things and whom it dials."""
    from atoll.agent.config import AgentConfig
    from atoll.agent.facts import read_facts

    return AgentConfig(
        state_directory=place.agent,
        control_url=config.control_url,
        facts=read_facts(place.agent),
        agent_version=version("atoll"),
        resolver=(str(bin_directory() / "atoll-io"), "dns", "--user", USER),
        head_start_wait_s=config.head_start_wait_s,
    )


def registration(place: Layout, config: HostConfig, settings: AgentConfig) -> Registration:
    """What this machine registers: what it has, without what is kept back, times the overcommit.

    What is in use of its disk already counts as kept back: nobody can be promised it.
    """
    from atoll.agent.facts import free_mib
    from atoll.wire.agent import Overcommit, Registration

    facts, kept, over = settings.facts, config.reserve, config.overcommit
    in_use = max(0, facts.disk_mib - free_mib(place.sandboxes))
    reserve = Vector(kept.cpu_millis, kept.memory_mib, kept.disk_mib + in_use)
    inventory = Inventory(facts.cpu_count, facts.memory_mib, facts.disk_mib)
    return Registration(
        name=config.name,
        capacity=capacity(inventory, reserve=reserve, overcommit=over, slots=config.slots),
        facts=facts,
        reserve=reserve,
        overcommit=Overcommit(cpu=over.cpu, memory=over.memory, disk=over.disk),
        slots=config.slot_cidr,
        region=config.region,
        labels=dict(config.labels),
        agent_version=settings.agent_version,
    )


async def identity(place: Layout, config: HostConfig, settings: AgentConfig) -> Identity:
    """Who this host is: by its credential, or by enrolling now. *Errors*: Refused SETUP_FAILED, ENROLLMENT_*."""
    from atoll.agent.config import load_identity
    from atoll.agent.enrollment import by_token

    known = load_identity(settings.credential_path)
    if known is None:
        known = (await enroll(place, config, settings, by_token(_token(place)))).identity
    if known.install_id != config.install_id:
        raise Refused(Code.SETUP_FAILED, f"the credential in {settings.credential_path} is of another install ({known.install_id})")
    place.enrollment_token.unlink(missing_ok=True)
    return known


def _token(place: Layout) -> Secret:
    try:
        return Secret(place.enrollment_token.read_text().strip())
    except FileNotFoundError:
        raise Refused(
            Code.ENROLLMENT_TOKEN_INVALID,
            f"this host has neither a credential nor a token in {place.enrollment_token}",
            hint="Run `atoll up`, or `atoll agent join` where control is elsewhere.",
        ) from None


async def enroll(place: Layout, config: HostConfig, settings: AgentConfig, admit: Admit, *, within_s: float = ENROLL_S) -> Obtained:
    """Become a host, asking again while control is away. *Errors*: those of `agent.enrollment.obtain`; CONTROL_UNTRUSTED at once."""
    from atoll.agent.enrollment import obtain

    wanted = registration(place, config, settings)
    deadline = time.monotonic() + within_s
    while True:
        async with contextlib.AsyncExitStack() as stack:

            def connect(credential: Secret, stack: contextlib.AsyncExitStack = stack) -> HttpTransport:
                made = transport(config, credential)
                stack.push_async_callback(made.close)
                return made

            try:
                return await obtain(settings, wanted, connect=connect, admit=admit, dice=os.urandom)
            except (Unavailable, OutcomeUnknown) as error:
                if error.code is Code.CONTROL_UNTRUSTED or time.monotonic() > deadline:
                    raise
                log.debug(events.CONTROL_LOST, error=error.message)
        await asyncio.sleep(_ENROLL_EVERY_S)


def transport(config: HostConfig, credential: Secret | None = None) -> HttpTransport:
    """The way to control. *Errors*: Refused TLS_REQUIRED, SETUP_FAILED (the authority cannot be read)."""
    from atoll.agent.transport import HttpTransport

    return HttpTransport(config.control, credential, authority=config.authority)


async def run(place: Layout, config: HostConfig) -> int:
    """Be the agent until SIGTERM; the process's exit status."""
    from atoll.agent.agent import Agent
    from atoll.programs import agent_socket, image_socket
    from atoll.programs.heard import Heard
    from atoll.programs.machines import Machines

    if config.joined:
        hosting.ensure_directories(place)
        if config.subnet is not None:
            # Claims are below /run, which a restart of the machine empties.
            subnets.claim(place.home, config.install_id, wanted=config.subnet)
    settings = agent_config(place, config)
    who = await identity(place, config, settings)
    trust = trusting(place, config)
    unpacking = own_images(place, config, trust)
    images = shelf(place, unpacking)
    files = machine_files(place, config, trust, unpacking)
    if config.machines is not Machines.OFF:
        await files.bring()
    agent = Agent(
        replace(settings, image_cache=lambda: _told_of(images)),
        who,
        drivers=drivers(place, config, host_id=who.host_id, unpacking=unpacking),
        clock=SystemClock(),
        dice=os.urandom,
        transport=transport(config, who.credential),
        on_answer=Heard(place.agent_health, version("atoll")),
        moments=moments(place, config),
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop)
    settle_down()
    log.info(events.PROCESS_STARTED, pid=os.getpid(), host_id=who.host_id)
    following = asyncio.create_task(_follow_keys(trust, files))
    try:
        async with agent_socket.serving(place.agent_socket, agent), image_socket.serving(place.image_socket, images):
            return await agent.run()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        log.info(events.PROCESS_STOPPED)


def _told_of(images: Shelf) -> ImageCacheState:
    """What polls say of this host's images."""
    from atoll.wire.agent import ImageCacheState

    return ImageCacheState(**asdict(images.sum()))


async def _follow_keys(trust: Trust, files: MachineFiles) -> None:
    """Hear of keys that count no more: an image that only they have signed is refused from then on. What machines boot by is asked for again
    where it could not be had.
    """
    while True:
        await asyncio.sleep(FOLLOW_KEYS_S)
        try:
            await trust.follow()
            if files.lacks:
                await files.bring()
        except AtollError as error:
            log.debug(events.CONTROL_LOST, error=error.message)


def main() -> None:
    """Run until SIGTERM."""
    import uvloop

    configure(NAME, os.environ.get("ATOLL_LOG_LEVEL", "info"))
    place = layout_of()
    try:
        config = hosting.load(place)
        status = uvloop.run(run(place, config))
    except AtollError as error:
        log.error(events.PROCESS_FAILED, code=error.code, message=error.message, hint=error.hint)  # noqa: TRY400 - the message is all of it
        sys.exit(1)
    sys.exit(status)


async def sweep(place: Layout, config: HostConfig) -> list[str]:
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

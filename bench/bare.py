"""The baseline: the runtime alone, with all that can be made ahead made ahead.

A bare start has the same root, flags, control group limits, capabilities and mounts as ours, because the same code writes its bundle; its
namespace with veth and address is ready, and for crun its limits and its root (an overlay without a disk of its own) are, too. Measured
are only: the runtime's `run --detach`, until the guest (the same binary) answers, its init, and the first command through it. No control,
no agent, no record, no commit.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.agent.guestline import GuestLine, LineBroken
from atoll.base.ids import HostId, PlacementId, Prefix, SandboxId, new_id
from atoll.base.secret import Secret
from atoll.control.tokens import Tokens
from atoll.domain.placement import Holding, Placement
from atoll.domain.spec import Isolation, Spec
from atoll.drivers.oci import record as records
from atoll.drivers.oci.build import oci_driver, slot_pool
from atoll.drivers.oci.config import Names, OciConfig, RuntimeKind
from atoll.drivers.oci.crun import ROOT as CRUN_ROOT
from atoll.drivers.oci.runsc import Runsc
from atoll.drivers.oci.runtime import CONSOLE, PID_FILE, Launch, run
from atoll.drivers.port import Mark, Order
from atoll.hostops import cgroups, mounts, namespaces, syscalls
from atoll.images.cache import ImageCache
from atoll.programs import subnets
from atoll.programs.layout import bin_directory, cache_directory
from atoll.wire.guest import GUEST_PORT, SCOPE_CONTROL, Init
from bench.clients import Inside, client_session
from bench.product import CannotMeasure

T = TypeVar("T")

UNIFIED: Final = "/sys/fs/cgroup/unified"
LANES: Final = 16
CONNECT_S: Final = 0.02
PAUSE_S: Final = 0.002
"""As often as the agent looks: nobody is to win by looking more often."""
READY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A start that has not happened yet. `lane` is the thread in whose mount namespace its root is."""

    kind: RuntimeKind
    order: Order
    address: str
    token: Secret
    command: tuple[str, ...]
    directory: Path
    lane: ThreadPoolExecutor


class Bare:
    """Starts runtimes without us. Everything of it carries a mark of its own."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._mark = Mark(new_id(Prefix.INSTALL, os.urandom), new_id(Prefix.HOST, os.urandom))
        self._tokens = Tokens(root=os.urandom(32), signing=Ed25519PrivateKey.generate())
        self._image = ImageCache(cache_directory()).current("base")
        self._layout = cgroups.detect()
        self._lanes = [ThreadPoolExecutor(max_workers=1, thread_name_prefix="lane", initializer=self._enter) for _ in range(LANES)]
        self._next = 0

    def _enter(self) -> None:
        namespaces.new_mount_namespace()
        if self._layout.version == 1 and any(mount.point == UNIFIED for mount in mounts.table()):
            # crun refuses to work where an empty v2 tree is mounted beside v1.
            syscalls.umount(UNIFIED, syscalls.MNT_DETACH)

    async def __aenter__(self) -> Self:
        subnet = subnets.claim(self._work, self._mark.install_id)
        # None ahead: they would be made while something is measured.
        pool = slot_pool(self._mark, subnet=subnet, size=0)
        self._configs = {kind: self._config(kind) for kind in (RuntimeKind.RUNSC, RuntimeKind.CRUN)}
        self._drivers = {kind: oci_driver(config, pool) for kind, config in self._configs.items()}
        for driver in self._drivers.values():
            await driver.open(_no_news)
        self.session = client_session()
        return self

    async def __aexit__(self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        await self.session.close()
        for driver in reversed(self._drivers.values()):
            await driver.close()
        for lane in self._lanes:
            lane.shutdown(wait=True)
        subnets.release(self._mark.install_id)
        shutil.rmtree(self._work, ignore_errors=True)

    def _config(self, kind: RuntimeKind) -> OciConfig:
        return OciConfig(
            runtime=kind,
            state_dir=self._work / "sandboxes",
            run_dir=self._work / "run",
            image_cache=cache_directory(),
            guest_binary=bin_directory() / "atoll-guest",
            mark=self._mark,
            runsc=bin_directory() / "runsc",
            crun=Path(shutil.which("crun") or "/usr/bin/crun"),
            runc=Path(shutil.which("runc") or "/usr/sbin/runc"),
        )

    async def prepare(self, kind: RuntimeKind, *, cpu_millis: int, memory_mib: int, disk_mib: int, pids_max: int) -> Prepared:
        """Everything that can be made ahead: directory, bundle, slot; for crun limits and root, too."""
        isolation = Isolation.GVISOR if kind is RuntimeKind.RUNSC else Isolation.SHARED_KERNEL
        spec = Spec("bench", "", self._image.digest, "base", isolation, cpu_millis, memory_mib, disk_mib, pids_max, 900)
        placement = Placement(
            PlacementId(new_id(Prefix.PLACEMENT, os.urandom)),
            SandboxId(new_id(Prefix.SANDBOX, os.urandom)),
            HostId(self._mark.host_id),
            1,
            Holding.RESERVED,
            spec.vector(),
            os.urandom(16).hex(),
        )
        order = Order(placement.id, placement.sandbox_id, 1, spec, placement.nonce, self._tokens.guest_public_key, placement.sandbox_id)
        driver = self._drivers[kind]
        await driver.prepare(order)
        directory = self._configs[kind].state_dir / placement.id
        address = _address(directory)
        lane = self._lanes[self._next % LANES]
        self._next += 1
        command = self._runsc_command(order, directory)
        if kind is RuntimeKind.CRUN:
            group = f"{Names.of(self._mark).cgroup}/{placement.id}"
            cgroups.make(self._layout, group, cgroups.Limits(memory_mib, cpu_millis, pids_max, devices=True))
            await _in(lane, lambda: self._mount(directory))
            command = self._crun_command(order, directory, group)
        token = Secret(self._tokens.guest(placement, SCOPE_CONTROL))
        return Prepared(kind, order, address, token, command, directory, lane)

    def _runsc_command(self, order: Order, directory: Path) -> tuple[str, ...]:
        launch = Launch(order.placement_id, directory, "", order, self._image.rootfs, directory)
        options = ("--detach", f"--bundle={directory}", f"--pid-file={directory / PID_FILE}")
        return tuple(self._runsc().command(launch, "run", *options))

    def _crun_command(self, order: Order, directory: Path, group: str) -> tuple[str, ...]:
        config = self._configs[RuntimeKind.CRUN]
        join = "".join(f"echo 0 >{shlex.quote(str(path / 'cgroup.procs'))} && " for path in cgroups.directories(self._layout, group))
        crun = [str(config.crun), f"--root={config.run_dir / 'crun' / 'containers'}", "--cgroup-manager=disabled"]
        crun += ["run", "--detach", f"--bundle={directory}", f"--pid-file={directory / PID_FILE}", order.placement_id]
        return ("/bin/sh", "-c", f"{join}exec {shlex.join(crun)}")

    def _mount(self, directory: Path) -> None:
        upper, work, root = (directory / name for name in ("bare-upper", "bare-work", CRUN_ROOT))
        for path in (upper, work):
            path.mkdir()
        syscalls.mount("overlay", str(root), "overlay", 0, f"lowerdir={self._image.rootfs},upperdir={upper},workdir={work}")

    async def save(self, prepared: Prepared, image: Path) -> None:
        """What a runsc guest is, in a directory that there is not yet; the guest stands still afterwards."""
        name = prepared.order.placement_id
        for words in (("pause", name), ("checkpoint", f"--image-path={image}", "--leave-running", name)):
            await _in(prepared.lane, lambda words=words: run(self._say(*words), console=prepared.directory / CONSOLE))  # type: ignore[misc]

    async def again(self, prepared: Prepared, image: Path) -> Prepared:
        """End the guest, and make all of its restoring from `image` that can be made ahead."""
        driver = self._drivers[prepared.kind]
        await driver.remove(prepared.order.placement_id)
        await driver.prepare(prepared.order)
        return self.beginning(prepared, image)

    async def keep(self, prepared: Prepared, image: Path) -> None:
        """As `save`, and the guest goes on."""
        words = ("checkpoint", f"--image-path={image}", "--leave-running", prepared.order.placement_id)
        await _in(prepared.lane, lambda: run(self._say(*words), console=prepared.directory / CONSOLE))

    def beginning(self, prepared: Prepared, image: Path) -> Prepared:
        """What is prepared, begun from `image` in place of a boot."""
        launch = Launch(prepared.order.placement_id, prepared.directory, "", prepared.order, self._image.rootfs, prepared.directory)
        options = ("--detach", f"--image-path={image}", f"--bundle={prepared.directory}", f"--pid-file={prepared.directory / PID_FILE}")
        command = tuple(self._runsc().command(launch, "restore", *options))
        return replace(prepared, command=command, address=_address(prepared.directory))

    def _runsc(self) -> Runsc:
        config = self._configs[RuntimeKind.RUNSC]
        return Runsc(config.runsc, config.run_dir / "runsc", config.state_dir)

    def _say(self, *words: str) -> tuple[str, ...]:
        config = self._configs[RuntimeKind.RUNSC]
        return (str(config.runsc), f"--root={config.run_dir / 'runsc'}", *words)

    async def start(self, prepared: Prepared) -> Inside:
        """Run the runtime, meet and initialise the guest: from here on commands can be run."""
        await _in(prepared.lane, lambda: run(prepared.command, console=prepared.directory / CONSOLE))
        init = Init().model_dump_json().encode()
        async with asyncio.timeout(READY_S):
            while True:
                try:
                    line = await GuestLine.open(prepared.address, GUEST_PORT, within_s=CONNECT_S)
                    try:
                        for method, path, body in (("GET", "/atoll/hello", None), ("POST", "/atoll/init", init)):
                            status, said = await line.call(method, path, token=prepared.token, body=body, within_s=5.0)
                            if status >= 300:
                                raise CannotMeasure(f"{path} was answered with {status}: {said[:200]!r}")
                    finally:
                        line.close()
                    break
                except LineBroken:
                    await asyncio.sleep(PAUSE_S)
        return Inside(self.session, f"http://{prepared.address}:{GUEST_PORT}", {})

    async def remove(self, prepared: Prepared) -> None:
        """Leave nothing of it."""
        if prepared.kind is RuntimeKind.CRUN:
            await _in(prepared.lane, lambda: syscalls.umount(str(prepared.directory / CRUN_ROOT), syscalls.MNT_DETACH))
        await self._drivers[prepared.kind].remove(prepared.order.placement_id)


def _address(directory: Path) -> str:
    found = records.read(directory)
    if found is None or found.address is None:
        raise CannotMeasure(f"{directory} has no slot")
    return found.address


async def _in(lane: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(lane, work)


async def _no_news(_placement_id: str, _reason: str) -> None:
    """What ends here was ended by us."""

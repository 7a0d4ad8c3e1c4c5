"""The `oci` driver: the port's verbs for containers.

Theory of operation. Each verb is a list of small steps on the machine, each of which finds what an earlier run left and may be repeated;
`on_step` is called between them so that a test can end the process at every boundary. What this process remembers (`_live`) is only
what cannot be read: the namespace descriptor of a prepared slot and the pidfd that is being watched. Everything else is looked up
(`look`). Work that blocks runs in threads of the driver's own; a slot is taken and a runtime started without any other program.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, TypeVar

from atoll.base.errors import AtollError, Code, Refused
from atoll.domain.spec import Isolation
from atoll.drivers.oci import bundle, capturing, console, freezing, look, probes, programs, saves, selftest, usage
from atoll.drivers.oci import record as records
from atoll.drivers.oci.clearing import FREED_BEHIND_MIB_MAX, Live, Over
from atoll.drivers.oci.config import Names, OciConfig, RuntimeKind
from atoll.drivers.oci.gathering import both
from atoll.drivers.oci.images import Images
from atoll.drivers.oci.locks import Locks
from atoll.drivers.oci.moving import Moving
from atoll.drivers.oci.programs import Programs
from atoll.drivers.oci.record import Record
from atoll.drivers.oci.ruleset import Egress
from atoll.drivers.oci.runtime import PID_FILE, Launch, Runtime
from atoll.drivers.oci.slots import SlotPool
from atoll.drivers.oci.slotworks import Slot
from atoll.drivers.oci.watching import Watches
from atoll.drivers.port import Capabilities, Change, Held, Image, OnExit, Order, Power, Probe, Seen, Usage
from atoll.hostops import cgroups, processes
from atoll.hostops.memfiles import MemoryFiles

T = TypeVar("T")

BUNDLE: Final = "config.json"
RESOLV_CONF: Final = "resolv.conf"
THREADS: Final = 16
UPKEEP_S: Final = 2.0
GVISOR_NOFILE_MAX: Final = 1_048_576


def no_step(_name: str) -> None:
    """Outside of tests nothing happens between two steps."""


class OciDriver(Moving):
    """One runtime on this host. Give two of them (runsc, crun) the same pool and the same configuration otherwise."""

    def __init__(self, config: OciConfig, pool: SlotPool, runtime: Runtime, *, on_step: Callable[[str], None] = no_step) -> None:
        self._config = config
        self._names = Names.of(config.mark)
        self._pool = pool
        self._runtime = runtime
        self._step = on_step
        self._guests = Programs(programs.GUEST, config.guest_binary, config.state_dir)
        gvisor = config.runtime is RuntimeKind.RUNSC
        self._runtimes = Programs(programs.RUNTIME, config.runsc, config.state_dir, spare=1) if gvisor else None
        self._images = self._make_images()
        self._layout = cgroups.detect()
        self._view = look.View(config.state_dir, self._layout, self._names.cgroup, runtime)
        self._live: dict[str, Live] = {}
        self._disk_files: dict[str, Path] = {}
        """Where the sentries' files were found; for measuring."""
        self._checks: set[str] = set()  # of self-checks: how they end is the check's own to know
        self._watches = Watches(self._ended)
        self._locks, self._under_way = Locks(), {}
        self._on_exit: OnExit | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._clearing: set[asyncio.Task[None]] = set()
        self._memory = MemoryFiles(FREED_BEHIND_MIB_MAX << 20)
        self._flushes = {}
        self._expecting: asyncio.Task[None] | None = None
        self._capabilities = self._declare()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self._nofile_max = GVISOR_NOFILE_MAX if gvisor or hard == resource.RLIM_INFINITY else hard

    def _make_images(self) -> Images:
        return Images(self._config, self._blocking)

    def _declare(self) -> Capabilities:
        gvisor = self._config.runtime is RuntimeKind.RUNSC
        return Capabilities(
            name=f"oci-{self._config.runtime}",
            isolation=Isolation.GVISOR if gvisor else Isolation.SHARED_KERNEL,
            arch=os.uname().machine,
            stop_keeps_disk=not gvisor,
            pauses=cgroups.freezes(self._layout),
            saves=self._runtime.saves,
            snapshots=not self._runtime.halts_to_keep or cgroups.freezes(self._layout),
            portable=True,
            metered=True,
            layers=self._config.packer is not None,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def gateway_address(self) -> str:
        """Where the guests' resolver must listen, UDP and TCP port 53."""
        return self._pool.gateway_address

    # -- begin and end

    async def open(self, on_exit: OnExit) -> None:
        self._on_exit = on_exit
        self._threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix=self._capabilities.name)
        await self._blocking(self._open)
        await self._pool.open()
        await self._images.open()
        for placement_id in await self._blocking(lambda: selftest.left(self._config)):
            with contextlib.suppress(AtollError, OSError):
                await self.remove(placement_id)
                selftest.forget(self._config, placement_id)
        self._spawn(self._upkeep(), "upkeep")
        self._spawn(self._verify_images(), "images")

    def _open(self) -> None:
        config = self._config
        config.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        config.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._clear_inbox()
        with contextlib.suppress(OSError, Refused):
            # What cannot be had now is made when the first guest needs it, who is told of the disk, or of what is missing.
            for kept in self._kept_programs():
                kept.open()
        self._write_resolv_conf(config.run_dir / RESOLV_CONF)
        cgroups.make_parent(self._layout, self._names.cgroup)
        self._runtime.open()

    def _write_resolv_conf(self, path: Path) -> None:
        """Guests have this very file mounted: it is never empty, not even for a moment or on a full disk."""
        content = f"nameserver {self.gateway_address}\n"
        if not path.exists() or path.read_text() != content:
            with path.open("r+" if path.exists() else "w") as file:
                file.write(content)
                file.truncate()
        path.chmod(0o644)

    async def close(self) -> None:
        await asyncio.gather(*self._clearing)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._images.close()
        self._watches.close()
        self._live.clear()
        await self._pool.close()
        await self._blocking(self._close)
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None

    def abandon(self) -> None:
        """Let go of everything without touching the machine, as the end of this process would. For tests; the pool has its own."""
        for task in list(self._tasks):
            task.cancel()
        self._watches.close()
        self._live.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None

    def _close(self) -> None:
        self._runtime.close()
        if not cgroups.members(self._layout, self._names.cgroup):
            cgroups.remove(self._layout, self._names.cgroup, patience_s=0.0)

    # -- life

    async def prepare(self, order: Order) -> None:
        self._expect_start()
        async with self._lock(order.placement_id):
            with self._images.pin(order.spec):
                await self._prepare_image(order)

    async def _prepare_image(self, order: Order) -> None:
        rootfs = await self._images.root_of(order.spec)
        if not await self._clear(order):
            await self._prepare(order, rootfs)

    def _expect_start(self) -> None:
        """Whoever prepares will start soon, and a runtime's first step is to move into its control groups."""
        if self._expecting is None or self._expecting.done():
            self._expecting = self._spawn(self._blocking(lambda: cgroups.expect_moves(self._layout)), "expect moves")

    async def _clear(self, order: Order) -> bool:
        """True when the order's guest runs or is prepared already; else what an earlier start or run left of it has ended.

        The directory is the first thing that is made, so where there is none there is nothing else.
        """
        live = self._live.setdefault(order.placement_id, Live())
        if live.prepared == order:
            return True
        if live.slot is None and not self._view.directory(order.placement_id).exists():
            return False
        found = await self._look(order.placement_id)
        if found.guest is not None:
            self._watches.watch(order.placement_id, found.guest)
            return True
        # The guest has ended, or another run prepared this: its namespace is gone, and the runtime's files are in the way.
        await self._end(order.placement_id, strays=live.slot is None)
        return False

    async def _prepare(self, order: Order, rootfs: Path) -> None:
        """Directory and record, then disk, slot and bundle. The record names the slot before the slot names the placement."""
        live = self._live.setdefault(order.placement_id, Live())
        live.over = Over.UNKNOWN
        network = order.spec.network
        egress = Egress.of(internet=network.internet, allow=network.allow_out, deny=network.deny_out)
        slot = live.slot = await self._pool.reserve()
        await self._abide(order.placement_id, lambda: self._make_directory(order, slot))
        self._step("directory")
        # The bundle names the slot's namespace only, so the slot itself gets its name and rules meanwhile.
        await both(
            self._pool.assign(slot, order.placement_id, egress),
            self._abide(order.placement_id, lambda: self._write_bundle(order, slot, rootfs)),
        )
        self._step("slot")
        live.prepared = order
        self._step("bundle")

    def _make_directory(self, order: Order, slot: Slot) -> None:
        directory = self._view.directory(order.placement_id)
        space = os.statvfs(self._config.state_dir)
        free_mib = space.f_bavail * space.f_frsize >> 20
        if free_mib < self._config.disk_spare_mib:
            raise Refused(
                Code.HOST_DISK_FULL, f"{self._config.state_dir} has {free_mib} MiB free, {self._config.disk_spare_mib} are kept spare"
            )
        try:
            directory.mkdir(exist_ok=True, mode=0o700)
            records.write(directory, self._record(order, slot))
            self._step("record")
            self._make_disk(directory, order)
        except OSError as error:
            raise self._disk_error(error) from error

    def _record(self, order: Order, slot: Slot) -> Record:
        mark = self._config.mark
        return Record(
            install_id=mark.install_id,
            host_id=mark.host_id,
            placement_id=order.placement_id,
            sandbox_id=order.sandbox_id,
            generation=order.generation,
            runtime=str(self._config.runtime),
            slot=slot.number,
            address=slot.address,
            image=order.spec.image,
        )

    def _write_bundle(self, order: Order, slot: Slot, rootfs: Path) -> None:
        directory = self._view.directory(order.placement_id)
        try:
            self._write_what_it_is(order, slot, rootfs)
            (directory / PID_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise self._disk_error(error) from error

    def _write_what_it_is(self, order: Order, slot: Slot, rootfs: Path) -> None:
        """The bundle, by which a runtime and its guest know what to be. *Errors*: OSError."""
        directory = self._view.directory(order.placement_id)
        places = bundle.Places(
            rootfs=str(self._runtime.rootfs(directory, rootfs)),
            guest_binary=str(self._give_programs(order, directory)),
            resolv_conf=str(self._config.run_dir / RESOLV_CONF),
            namespace=slot.path,
            cgroup=self._view.group(order.placement_id),
            nofile_max=self._nofile_max,
            cgroup_binds=cgroups.own_views(self._layout, self._view.group(order.placement_id)),
            tmpfs_percent=self._config.tmpfs_percent,
            command=self._config.guest_command,
            shown=self._show_name(order),
        )
        (directory / BUNDLE).write_text(json.dumps(bundle.make(self._config.runtime, order, places)))

    async def start(self, order: Order) -> Seen:
        async with self._lock(order.placement_id):
            with self._images.pin(order.spec):
                return await self._prepare_and_start(order)

    async def _prepare_and_start(self, order: Order) -> Seen:
        live = self._live.setdefault(order.placement_id, Live())
        if live.prepared != order:
            rootfs = await self._images.root_of(order.spec)
            if await self._clear(order):
                return look.seen(await self._look(order.placement_id))
            await self._prepare(order, rootfs)
        else:
            rootfs = self._images.ready_root(order.spec)
        return await self._start(order, live, rootfs, await self._beginning(order))

    def _launch(self, order: Order, rootfs: Path) -> Launch:
        live = self._live.get(order.placement_id)
        return Launch(
            container_id=order.placement_id,
            directory=self._view.directory(order.placement_id),
            group=self._view.group(order.placement_id),
            order=order,
            rootfs=rootfs,
            resolv_conf=self._config.run_dir / RESOLV_CONF,
            slot=None if live is None else live.slot,
        )

    async def _start(self, order: Order, live: Live, rootfs: Path, begin: Callable[[Launch], int]) -> Seen:
        slot = live.slot
        assert slot is not None
        launch = self._launch(order, rootfs)
        live.ending, live.reason, live.prepared = False, None, None
        try:
            pid = await self._abide(order.placement_id, lambda: self._begun(launch, begin))
        except BaseException:
            # runsc takes addresses out of the namespace as it starts: whatever happened, this slot cannot be used again.
            with contextlib.suppress(OSError, Refused):
                await asyncio.shield(self._end(order.placement_id, strays=False))
            raise
        self._step("started")
        self._watches.watch(order.placement_id, pid)
        self._spawn(self._settle(pid, slot), f"settle {order.placement_id}")
        return Seen(Power.RUNNING, address=slot.address, pid=pid)

    def _begun(self, launch: Launch, begin: Callable[[Launch], int]) -> int:
        """Blocking. *Errors*: as `begin`, but that a full disk is told as such: a runtime says only that it ended, or nothing."""
        free = self._free()
        try:
            return begin(launch)
        except (Refused, OSError) as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            # By what there was: what it could write has gone with it.
            if full or free < self._bytes_to_begin(launch.order):
                raise Refused(Code.HOST_DISK_FULL, f"{self._config.state_dir} has no room for what it begins from: {error}") from error
            raise

    async def _settle(self, pid: int, slot: Slot) -> None:
        """What the create path need not wait for."""
        await self._pool.settle(slot)
        await self._blocking(lambda: self._runtime.settle(pid))

    async def stop(self, placement_id: str, *, grace_s: float = 0.0) -> None:
        async with self._lock(placement_id):
            strays = self._may_have_strays(placement_id)
            self._live.setdefault(placement_id, Live()).ending = True
            found = await self._look(placement_id)
            if grace_s > 0 and found.guest is not None and not found.frozen:
                guest = found.guest
                await self._blocking(lambda: self._ask_to_end(placement_id, guest, grace_s))
            await self._end(placement_id, strays=strays)

    def _ask_to_end(self, placement_id: str, guest: int, grace_s: float) -> None:
        self._runtime.ask_to_end(placement_id, guest)
        processes.wait_end(guest, grace_s)

    async def remove(self, placement_id: str) -> None:
        async with self._lock(placement_id):
            strays = self._may_have_strays(placement_id)
            self._live.setdefault(placement_id, Live()).ending = True
            failures = await self._each(
                lambda: self._end(placement_id, strays=strays),
                self._step_of("directory removed", lambda: self._remove_directory(placement_id)),
            )
            left = (await self._look(placement_id)).names()
            if left or failures:
                raise Refused(Code.CLEANUP_FAILED, f"{placement_id}: {', '.join(left) or 'nothing is left'} ({'; '.join(failures)})")
            self._live.pop(placement_id, None)
            self._disk_files.pop(placement_id, None)

    # -- time

    async def pause(self, placement_id: str) -> Seen:
        return await self._turn(placement_id, freezing.freeze, "frozen")

    async def resume(self, placement_id: str) -> Seen:
        return await self._turn(placement_id, freezing.thaw, "thawed")

    async def _turn(self, placement_id: str, work: Callable[[look.View, str, Mapping[int, str]], Seen], step: str) -> Seen:
        async with self._lock(placement_id):
            seen = await self._blocking(lambda: work(self._view, placement_id, self._pool.existing()))
            self._step(step)
            return seen

    # -- look

    async def _look(self, placement_id: str) -> look.Traces:
        return await self._blocking(lambda: look.traces(self._view, placement_id, self._pool.existing()))

    async def inspect(self, placement_id: str) -> Seen:
        live = self._live.get(placement_id)
        if (
            live is not None
            and live.over is not Over.UNKNOWN
            and await self._blocking(lambda: saves.exists(self._view.directory(placement_id)))
        ):
            # Its guest was seen to its end by this run, and none was begun since: to look through the host would only keep its resume waiting.
            return Seen(Power.SAVED, leftovers=(f"directory {self._view.directory(placement_id)}",))
        found = look.seen(await self._look(placement_id))
        if found.power is Power.STOPPED and live is not None and live.reason is not None:
            return Seen(found.power, reason=live.reason, leftovers=found.leftovers)
        return found

    async def adopt(self, placement_id: str) -> Seen:
        async with self._lock(placement_id):
            found = await self._after_a_save(placement_id, await self._look(placement_id))
            if found.guest is not None and placement_id not in self._watches:
                guest = found.guest
                self._live.setdefault(placement_id, Live())
                self._watches.watch(placement_id, guest)
                # Its run may have ended between start and settle.
                self._spawn(self._blocking(lambda: self._runtime.settle(guest)), f"settle {placement_id}")
            return look.seen(found)

    async def held(self) -> Sequence[Held]:
        return await self._blocking(self._held)

    def _held(self) -> list[Held]:
        slots = self._pool.existing()
        found = []
        for placement_id in sorted(look.known(self._view, slots)):
            traces = look.traces(self._view, placement_id, slots)
            record = traces.record
            if record is not None and (record.install_id, record.host_id) != (self._config.mark.install_id, self._config.mark.host_id):
                continue
            if record is not None and record.runtime != self._config.runtime:
                continue  # the other driver's
            if record is not None and record.sandbox_id == selftest.SANDBOX_ID:
                continue  # under way, or removed at the next open
            what = traces.names()
            if what:
                found.append(Held(placement_id, record.sandbox_id if record else None, record.generation if record else None, what))
        return found

    async def probe(self) -> Sequence[Probe]:
        config = self._config
        network = probes.network(await self._pool.checks())
        found = await self._blocking(
            lambda: [
                probes.binary(config.runtime, self._runtime),
                probes.guest(config),
                probes.controllers(self._layout),
                probes.rest(config, self._layout, self._runtime),
                *network,
                probes.disk(config),
                probes.images(self._images.cache),
                *probes.limits(),
            ]
        )
        return [*found, await self._probe_boot()]

    async def _probe_boot(self) -> Probe:
        order = selftest.order(self._config.runtime, os.urandom)
        self._checks.add(order.placement_id)

        async def begin() -> Seen:
            return await self._start_in(order, await self._blocking(self._empty_root))

        try:
            with selftest.noted(self._config, order.placement_id):
                return await selftest.boot(self._config, begin, lambda: self.remove(order.placement_id), limit_s=self._boot_s())
        finally:
            self._checks.discard(order.placement_id)

    def _boot_s(self) -> float:
        """How long the self-check's guest may take."""
        return selftest.BOOT_S

    async def _start_in(self, order: Order, rootfs: Path) -> Seen:
        """Prepare and start with a root that is no image."""
        async with self._lock(order.placement_id):
            return await self._begin(order, rootfs, self._runtime.start)

    async def _begin(self, order: Order, rootfs: Path, begin: Callable[[Launch], int]) -> Seen:
        await self._prepare(order, rootfs)
        return await self._start(order, self._live[order.placement_id], rootfs, begin)

    def _empty_root(self) -> Path:
        root = self._config.run_dir / "empty-root"
        (root / "etc").mkdir(parents=True, exist_ok=True)
        return root

    # -- own

    async def images(self) -> Sequence[Image]:
        found = await self._blocking(lambda: list(self._images.cache.all()))
        return [Image(image.digest, image.name, image.size_bytes, {"arch": image.arch}) for image in found]

    async def console(self, placement_id: str, *, bytes_max: int = 65536) -> bytes:
        return await self._blocking(lambda: console.tail(self._view.directory(placement_id), bytes_max))

    async def usage(self, placement_ids: Sequence[str]) -> Mapping[str, Usage]:
        wanted = list(placement_ids)
        return await self._blocking(lambda: usage.measure(self._view, wanted, self._disk_files)) if wanted else {}

    async def capture(self, placement_id: str, target: Path) -> Change:
        packer = self._config.packer
        if packer is None:
            raise Refused(Code.NOT_SUPPORTED, "this host makes no layers")
        async with self._lock(placement_id):
            if not self._runtime.captures_running:
                self._live.setdefault(placement_id, Live()).ending = True
                await self._end(placement_id, strays=placement_id not in self._watches)
            directory, group = self._view.directory(placement_id), self._view.group(placement_id)
            kills = cgroups.oom_kills(self._layout, group)
            try:
                return await self._blocking(lambda: capturing.capture(self._runtime, directory, placement_id, packer, target))
            except Refused as error:
                if error.code is not Code.PLACEMENT_LOST or cgroups.oom_kills(self._layout, group) <= kills:
                    raise
                raise capturing.out_of_memory() from error
            except OSError as error:
                raise self._disk_error(error) from error

    async def _verify_images(self) -> None:
        """Count every image's tree now, so that the first guest of each need not wait for it."""
        for image in await self._blocking(lambda: list(self._images.cache.all())):
            with contextlib.suppress(Refused):  # prepare says so to whoever wants it
                await self._blocking(lambda image=image: self._images.cache.verified(image.digest, image.name))  # type: ignore[misc]

    async def _upkeep(self) -> None:
        while True:
            await asyncio.sleep(UPKEEP_S)
            directories = [self._view.directory(placement_id) for placement_id in self._live]
            await self._blocking(lambda directories=directories: console.cut(directories, self._config.console_bytes_max))  # type: ignore[misc]

    def _ended(self, placement_id: str, how: str | None) -> None:
        """A watched guest has ended by itself."""
        if how in (None, "signal 9") and cgroups.oom_kills(self._layout, self._view.group(placement_id)):
            how = "oom"
        live = self._live.get(placement_id)
        if live is not None and not live.ending and placement_id not in self._checks:
            live.reason = how or "exited"
            self._spawn(self._tell(placement_id, live.reason), f"exit of {placement_id}")

    async def _tell(self, placement_id: str, reason: str) -> None:
        if self._on_exit is not None:
            await self._on_exit(placement_id, reason)

    # -- small things

    def _lock(self, placement_id: str) -> AbstractAsyncContextManager[None]:
        return self._locks.of(placement_id)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{self._capabilities.name}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _blocking(self, work: Callable[[], T]) -> T:
        return await self._in_thread(work)

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        if self._threads is None:
            raise RuntimeError("the driver is not open")
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _some_time(self, work: Callable[[], None]) -> None:
        try:
            assert self._threads is not None
            self._threads.submit(work)
        except RuntimeError:  # it is being closed
            work()

    def _disk_error(self, error: OSError) -> Refused:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Refused(Code.HOST_DISK_FULL, f"{self._config.state_dir}: {error}")
        return Refused(Code.START_FAILED, f"{self._config.state_dir}: {error}")

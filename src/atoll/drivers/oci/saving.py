"""The `oci` driver's verbs for saving guests and bringing them back; mixed into the driver.

Theory of operation. In this order: room is looked at; the guest is halted and written into a draft; the draft is looked at and gets its
name; the guest ends. A failure before the name lets the guest go on, and leaves nothing. From the name on what is saved is the truth, and a
guest that still lives beside it is only waiting to be ended. `discard` turns that round, just before anybody uses a restored guest. A
process that is killed in between leaves one of these states, and `adopt` tells which (`saves.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.domain.spec import SaveMode
from atoll.drivers.oci import look, saves, usage
from atoll.drivers.oci.clearing import Clearing
from atoll.drivers.oci.config import OciConfig
from atoll.drivers.oci.images import Images
from atoll.drivers.oci.runtime import Launch, Runtime
from atoll.drivers.port import Order, Saved, Seen
from atoll.hostops import cgroups, processes

FLUSH_AFTER_S: Final = 0.3
CLEAR_AFTER_S: Final = 1.0
"""Blocks that are given back go through the file system's journal, for which the commits of a resume's answer would wait."""
NO_ROOM_BYTES: Final = 1 << 20
_WRITERS: Final = frozenset({"checkpoint", "fscheckpoint", "pause"})


class Saving(Clearing):
    """`Driver.save`, `restore`, `discard`, and what `adopt` has to know of them."""

    _config: OciConfig
    _runtime: Runtime
    _images: Images
    _flushes: dict[str, asyncio.Task[None]]
    """Of what is saved or kept, by name: flushes that have not begun."""

    # What the driver has.

    @abstractmethod
    async def _begin(self, order: Order, rootfs: Path, begin: Callable[[Launch], int]) -> Seen:
        """Prepare a slot and a bundle, and start the guest by `begin`."""

    @abstractmethod
    def _launch(self, order: Order, rootfs: Path) -> Launch: ...

    @abstractmethod
    def _expect_start(self) -> None:
        """A runtime will be started soon."""

    # The verbs.

    async def save(self, order: Order, mode: SaveMode) -> Saved:
        async with self._lock(order.placement_id):
            found = await self._blocking(lambda: look.vital(self._view, order.placement_id))
            if found.saved:
                save = await self._blocking(lambda: saves.read(self._view.directory(order.placement_id) / saves.SAVED))
                await self._end_as_told(order.placement_id)
            else:
                if found.guest is None:
                    raise Refused(Code.PLACEMENT_LOST, f"{order.placement_id} has no guest that could be saved")
                save = await self._abide(order.placement_id, lambda: self._save(order, mode, frozen=found.frozen))
                self._step("saved")
                if self._runtime.disk_file is None:
                    await self._end_guest(order.placement_id, found.guest)
                else:
                    # A disk that outlasts its guest is to be let go of by it before anybody reads it.
                    await self._end_as_told(order.placement_id)
            self._flush_soon(order.placement_id, save, self._disk_of(order.placement_id))
            return Saved(save.mode, save.size_bytes)

    def _flush_soon(self, name: str, save: saves.Save, disk: Path | None = None) -> None:
        """Have it on the disk in a moment: the commits that its answer needs come first, and one that is gone on from at once need not be."""

        async def flush() -> None:
            await asyncio.sleep(FLUSH_AFTER_S)
            # From here on it is not taken back: what works in a thread is not to be ended.
            self._flushes.pop(name, None)
            await self._blocking(lambda: saves.flush(save, disk))

        self._flush_not(name)
        self._flushes[name] = self._spawn(flush(), f"flush {name}")

    def _flush_not(self, name: str) -> bool:
        """Whether a flush was put off that had not begun."""
        task = self._flushes.pop(name, None)
        return task is not None and task.cancel()

    def _disk_of(self, placement_id: str) -> Path | None:
        """What is saved of it besides what a runtime has written: its disk, where that is all that outlasts a guest."""
        name = self._runtime.disk_file
        return self._view.directory(placement_id) / name if name is not None else None

    def _save(self, order: Order, mode: SaveMode, *, frozen: bool) -> saves.Save:
        """Blocking. *Errors*: Refused SAVE_FAILED, HOST_DISK_FULL: the guest goes on and nothing is saved."""
        placement_id = order.placement_id
        directory = self._view.directory(placement_id)
        self._require_room(order)
        done = mode if self._runtime.saves is SaveMode.FULL else SaveMode.FILES
        free, draft = self._free(), saves.begin(directory)
        self._step("draft")
        try:
            if frozen:
                cgroups.thaw(self._view.layout, self._view.group(placement_id))
            self._runtime.save(self._launch(order, Path()), draft, done)
            self._step("written")
            return saves.publish(directory, done)
        except (Refused, OSError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            with contextlib.suppress(Refused, OSError, ValueError):
                self._runtime.go_on(placement_id)
            raise self._not_saved(error, free, placement_id) from error

    def _not_saved(self, error: Refused | OSError, free: int, placement_id: str) -> Refused:
        """A full disk is told as such, whoever has met it: a runtime only says that it failed.

        `free`: what there was before, as what it could write has gone by now. *Units*: bytes.
        """
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or min(free, self._free()) < NO_ROOM_BYTES or free < self._bytes_of(placement_id):
            return Refused(Code.HOST_DISK_FULL, f"{self._config.state_dir} is full: {error}")
        return error if isinstance(error, Refused) else Refused(Code.SAVE_FAILED, f"it could not be saved: {error}")

    def _require_room(self, order: Order) -> None:
        """*Errors*: Refused HOST_DISK_FULL. A save that finds no room half-way is undone, but takes the others' room meanwhile."""
        free = self._free() - (self._config.disk_spare_mib << 20)
        if free >= (order.spec.memory_mib + order.spec.disk_mib) << 20:
            # There is room for all that it may have: what it has need not be measured.
            return
        need = self._bytes_of(order.placement_id)
        if free < need:
            message = f"saving it may take {need >> 20} MiB, and {self._config.state_dir} has {max(0, free) >> 20} MiB to spare"
            raise Refused(Code.HOST_DISK_FULL, message)

    def _free(self) -> int:
        """Of the disk on which placements are. *Units*: bytes."""
        space = os.statvfs(self._config.state_dir)
        return space.f_bavail * space.f_frsize

    def _bytes_of(self, placement_id: str) -> int:
        """What it has that would be saved; 0 where nothing of it runs."""
        spent = usage.measure(self._view, [placement_id], {}).get(placement_id)
        return 0 if spent is None else spent.memory_bytes + spent.cache_bytes + spent.disk_bytes

    async def restore(self, order: Order, *, reboot: bool = False) -> Seen:
        self._expect_start()
        async with self._lock(order.placement_id):
            with self._images.pin(order.spec):
                rootfs = await self._images.root_of(order.spec)
                save = await self._blocking(lambda: saves.read(self._view.directory(order.placement_id) / saves.SAVED))
                # While it is read, nothing of it is written: a guest that is met soon has no use for it any more.
                put_off = self._flush_not(order.placement_id)
                try:
                    if reboot and save.mode is SaveMode.FULL:
                        save = await self._files_of(order, rootfs, save)
                    return await self._restore(order, rootfs, save)
                finally:
                    if put_off:
                        self._flush_soon(order.placement_id, save, self._disk_of(order.placement_id))

    async def _restore(self, order: Order, rootfs: Path, save: saves.Save) -> Seen:
        await self._end_as_told(order.placement_id)
        self._step("cleared")
        try:
            return await self._begin(order, rootfs, lambda launch: self._runtime.restore(launch, save.directory, save.mode))
        except Refused as error:
            if error.code is not Code.START_FAILED:
                raise
            raise Refused(Code.RESUME_FAILED, error.message) from error

    async def _files_of(self, order: Order, rootfs: Path, save: saves.Save) -> saves.Save:
        """Of what was saved whole, the files alone take its place: it is brought back for as long as that takes."""
        await self._restore(order, rootfs, save)
        await self._abide(order.placement_id, lambda: self._save(order, SaveMode.FILES, frozen=False))
        self._step("files saved")
        return await self._blocking(lambda: saves.read(self._view.directory(order.placement_id) / saves.SAVED))

    async def discard(self, placement_id: str) -> None:
        async with self._lock(placement_id):
            self._flush_not(placement_id)
            directory = self._view.directory(placement_id)
            await self._blocking(lambda: saves.set_aside(directory))
            self._step("discarded")
        self._spawn(self._clear_past(directory), f"discard {placement_id}")

    async def _clear_past(self, directory: Path) -> None:
        await asyncio.sleep(CLEAR_AFTER_S)
        await self._blocking(lambda: saves.clear_past(directory))

    async def _after_a_save(self, placement_id: str, found: look.Traces) -> look.Traces:
        """What an earlier run has left half done is undone, or done: what is there afterwards."""
        directory = self._view.directory(placement_id)
        if found.saved:
            if found.guest is not None or found.pids or found.groups or found.slots or found.runtime_files:
                await self._end_as_told(placement_id)
            with contextlib.suppress(Refused):
                save = await self._blocking(lambda: saves.read(directory / saves.SAVED))
                self._flush_soon(placement_id, save, self._disk_of(placement_id))
            return await self._look(placement_id)
        if found.guest is not None and await self._blocking((directory / saves.DRAFT).exists):
            await self._blocking(lambda: self._undo(placement_id, directory))
            return await self._look(placement_id)
        return found

    def _undo(self, placement_id: str, directory: Path) -> None:
        for pid in processes.mentioning(placement_id):
            if _WRITERS & set(processes.arguments(pid)):
                processes.send_signal(pid)
        if self._runtime.halts_to_keep:
            with contextlib.suppress(OSError):
                cgroups.thaw(self._view.layout, self._view.group(placement_id))
        with contextlib.suppress(Refused, OSError, ValueError):
            self._runtime.go_on(placement_id)
        shutil.rmtree(directory / saves.DRAFT, ignore_errors=True)

"""The `oci` driver's verbs for what is kept of guests that go on, and how others begin from it; mixed into the driver.

Theory of operation. A snapshot is written into a draft in its placement's directory, as a save is, and becomes one by a rename to a place
beside all placements: nothing but `drop` takes it away. What was killed in between leaves a draft, which `adopt` undoes, or a snapshot that
is whole. A guest that begins from one is another than it was: its host shows it its own name (`wire.guest.PlacementFile`).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.base.errors import Code, Refused
from atoll.domain.spec import SaveMode
from atoll.drivers.oci import look, saves
from atoll.drivers.oci.programs import Programs
from atoll.drivers.oci.runtime import Launch
from atoll.drivers.oci.saving import NO_ROOM_BYTES, Saving
from atoll.drivers.port import Order, Saved
from atoll.hostops import cgroups
from atoll.wire.guest import GUEST_PATH, PLACEMENT_PATH, PlacementFile


class Keeping(Saving):
    """`Driver.snapshot`, `drop`, `snapshots`."""

    _guests: Programs
    _runtimes: Programs | None
    """Where what one version has saved another does not read."""

    async def snapshot(self, order: Order, snapshot_id: str, mode: SaveMode) -> Saved:
        place = self._kept(snapshot_id)
        async with self._lock(order.placement_id):
            if not await self._blocking((place / saves.LIST).exists):
                found = await self._blocking(lambda: look.vital(self._view, order.placement_id))
                self._require_running(order, found)
                await self._abide(order.placement_id, lambda: self._keep(order, mode, place, found))
                self._step("kept")
            save = await self._blocking(lambda: saves.read(place))
        self._flush_soon(snapshot_id, save)
        return Saved(save.mode, save.size_bytes)

    def _require_running(self, order: Order, found: look.Vital) -> None:
        if found.guest is None or found.saved:
            raise Refused(Code.PLACEMENT_LOST, f"{order.placement_id} has no guest that could be kept")
        if found.frozen:
            raise Refused(Code.ILLEGAL_STATE, f"{order.placement_id} is paused")
        if self._runtime.saves is SaveMode.FULL and not (self._view.directory(order.placement_id) / saves.SHOWN).exists():
            raise Refused(Code.NOT_SUPPORTED, f"{order.placement_id} was started by an earlier release; a new sandbox can be kept")

    def _keep(self, order: Order, mode: SaveMode, place: Path, found: look.Vital) -> None:
        """Blocking. *Errors*: Refused; in any case the guest goes on, and nothing half done is left."""
        directory = self._view.directory(order.placement_id)
        self._require_room(order)
        done = mode if self._runtime.saves is SaveMode.FULL else SaveMode.FILES
        free, draft = self._free(), saves.begin(directory)
        self._step("draft")
        try:
            if self._runtime.halts_to_keep:
                self._halt(order.placement_id)
            try:
                self._runtime.keep(self._launch(order, Path()), found.guest or 0, draft, done)
            finally:
                if self._runtime.halts_to_keep:
                    cgroups.thaw(self._view.layout, self._view.group(order.placement_id))
            self._step("written")
            saves.publish(directory, done, place)
        except (Refused, OSError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            with contextlib.suppress(Refused, OSError, ValueError):
                self._runtime.go_on(order.placement_id)
            raise self._not_saved(error, free, order.placement_id) from error

    def _halt(self, placement_id: str) -> None:
        if not cgroups.freeze(self._view.layout, self._view.group(placement_id)):
            raise Refused(Code.SAVE_FAILED, f"{placement_id} does not come to a halt")
        self._step("halted")

    async def drop(self, snapshot_id: str) -> None:
        place = self._kept(snapshot_id)
        await self._blocking(lambda: saves.drop_kept(place))
        self._step("dropped")

    async def snapshots(self) -> Sequence[str]:
        return await self._blocking(self._snapshots)

    def _snapshots(self) -> list[str]:
        directory = self._config.state_dir / saves.SNAPSHOTS
        return sorted(path.name for path in directory.iterdir() if (path / saves.LIST).exists()) if directory.is_dir() else []

    def _kept(self, snapshot_id: str) -> Path:
        if "/" in snapshot_id or snapshot_id.startswith("."):
            raise Refused(Code.INVALID_REQUEST, f"{snapshot_id[:64]!r} is no snapshot's id")
        return saves.kept(self._config.state_dir, snapshot_id)

    def _origin(self, order: Order) -> saves.Save | None:
        """What this order's guest begins from; None: it boots. Blocking. *Errors*: Refused SNAPSHOT_UNAVAILABLE."""
        if order.spec.origin is None:
            return None
        try:
            return saves.read(self._kept(order.spec.origin.snapshot_id))
        except Refused as error:
            raise Refused(Code.SNAPSHOT_UNAVAILABLE, error.message) from error

    def _bytes_to_begin(self, order: Order) -> int:
        """What a guest of this order may write before it goes: at most what is saved of it, or of what it begins from. Blocking; never raises."""
        try:
            save = saves.read(self._view.directory(order.placement_id) / saves.SAVED)
        except Refused:
            try:
                found = self._origin(order)
            except Refused:
                found = None
            return NO_ROOM_BYTES if found is None else max(NO_ROOM_BYTES, found.size_bytes)
        return max(NO_ROOM_BYTES, save.size_bytes)

    async def _beginning(self, order: Order) -> Callable[[Launch], int]:
        """How the runtime begins this order's guest. *Errors*: as `_origin`."""
        # Where only files are kept they are on its disk by now, and its origin may be gone.
        origin = await self._blocking(lambda: self._origin(order)) if self._runtime.saves is SaveMode.FULL else None
        if origin is None:
            return self._runtime.start
        return lambda launch: self._runtime.restore(launch, origin.directory, origin.mode)

    def _kept_programs(self) -> Sequence[Programs]:
        return (self._guests,) if self._runtimes is None else (self._guests, self._runtimes)

    def _give_programs(self, order: Order, directory: Path) -> Path:
        """The placement has the programs that what it begins from needs: where its guest's is. Blocking. *Errors*: OSError."""
        try:
            save = saves.read(directory / saves.SAVED) if saves.exists(directory) else self._origin(order)
        except Refused:
            # Whoever begins it finds so too, and says it.
            save = None
        if self._runtimes is not None:
            self._runtimes.give(directory, None if save is None else save.directory)
        return self._guests.give(directory, save.directory if save is not None and save.mode is SaveMode.FULL else None)

    def _make_disk(self, directory: Path, order: Order) -> None:
        """Blocking. *Errors*: as `_origin`, where it has no disk of its own yet; OSError.

        A guest that has begun needs its origin no more: a fork's moment is gone by the time a clone comes back from rest.
        """

        def source() -> Path:
            origin = self._origin(order)
            assert origin is not None
            return origin.directory

        if order.spec.origin is None:
            self._runtime.make_disk(directory, order.spec.disk_mib)
        else:
            self._runtime.seed_disk(directory, order.spec.disk_mib, source)

    def _show_name(self, order: Order) -> str:
        """The directory in which a guest that may be restored as another's finds whose it is; empty: there is none. Blocking."""
        directory = self._view.directory(order.placement_id)
        if self._runtime.saves is not SaveMode.FULL or saves.predates_names(directory):
            return ""
        if order.spec.tmp_on_disk:
            # A build's bench is restored as nobody's, and keeps what its step brings below the image's own `/.atoll`.
            return ""
        who = PlacementFile(sandbox_id=order.sandbox_id, placement_id=order.placement_id, generation=order.generation, nonce=order.nonce)
        shown = directory / saves.SHOWN
        shown.mkdir(exist_ok=True)
        # Whatever this process makes is its own alone; a guest's users may look into its directories.
        shown.chmod(0o755)
        (shown / Path(PLACEMENT_PATH).name).write_text(who.model_dump_json())
        # Where the guest's program is mounted.
        (shown / Path(GUEST_PATH).name).touch()
        return str(shown)

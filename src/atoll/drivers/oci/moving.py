"""The `oci` driver's verbs for what is saved or kept here and gone on from elsewhere; mixed into the driver.

Theory of operation. What is packed is first had on the disk: an upload must not outlive what it was made of. What comes is fetched into a
directory beside the placements, which nobody looks into, gets the list that a save has, and becomes one by a rename, as every save does. So
`restore` and `start` go on from it as from what was saved here: with this host's slot and address, which cut the guest's old connections.
Memory is what a runtime of one version has written on one kind of processor; a host that has another says so before anything is fetched.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.domain.spec import SaveMode
from atoll.drivers.oci import ending, programs, saves
from atoll.drivers.oci import record as records
from atoll.drivers.oci.keeping import Keeping
from atoll.drivers.oci.record import Record
from atoll.drivers.port import Capabilities, MomentFacts, Order, PackList

INBOX: Final = ".inbox"
"""Beside the placements' directories: what is being fetched."""
CPUINFO: Final = Path("/proc/cpuinfo")
DRIVER: Final = "oci"
NAMED: Final = ("named", "1")
NO_SLOT: Final = -1
_INSTRUCTIONS: Final = re.compile(
    r"ssse3|sse\w*|pni|avx\w*|amx_\w+|aes|vaes|vpclmulqdq|pclmulqdq|sha_ni|sha512|sm[34]|gfni|fma|f16c|bmi[12]|abm|movbe|popcnt|adx|rdrand|rdseed|"
    r"fsgsbase|erms|fsrm|cx16|cx8|cmov|clflush\w*|clwb|cldemote|movdiri|movdir64b|rtm|hle|xsave\w*|pku|ospke|rdpid|rdtscp|serialize|waitpkg|"
    r"asimd\w*|sve\w*|sha[123]|pmull|crc32|atomics|lrcpc|dcpop|fphp|i8mm|bf16"
)
"""Flags of /proc/cpuinfo that a program may have found and relies on; others are of how the kernel or a hypervisor runs the machine."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What going on from a save takes besides its files: as `MomentFacts` has it."""

    runtime: str = ""
    cpu: tuple[str, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()


class Moving(Keeping):
    """`Driver.pack_list`, `inbox`, `kinds`, `suits`, `receive`."""

    moments_of = DRIVER
    """Whose moments these are: drivers that write the same share this word."""
    _capabilities: Capabilities

    async def pack_list(self, name: str) -> PackList:
        if not self._capabilities.portable:
            raise Refused(Code.NOT_SUPPORTED, f"what {self._capabilities.name} saves stays on its host")
        return await self._blocking(lambda: self._pack_list(name))

    def _pack_list(self, name: str) -> PackList:
        directory, place = self._view.directory(name), self._kept(name)
        if saves.exists(directory):
            save, disk = saves.read(directory / saves.SAVED), self._disk_of(name)
        elif (place / saves.LIST).exists():
            save, disk = saves.read(place), None
        else:
            raise Refused(Code.PLACEMENT_LOST, f"nothing is saved or kept as {name}")
        if save.runtime != str(self._config.runtime):
            raise Refused(Code.PLACEMENT_LOST, f"{name} is {save.runtime or 'an earlier release'}'s")
        if save.received and disk is None and place == save.directory:
            raise Refused(Code.ILLEGAL_STATE, f"{name} came from the store")
        saves.make_durable(save, disk)
        self._step("durable")
        if disk is not None:
            return PackList(self._facts_of(save), directory, (disk.name,), disk.stat().st_blocks * 512)
        return PackList(self._facts_of(save), save.directory, tuple(sorted(save.files)), save.size_bytes)

    def _facts_of(self, save: saves.Save) -> MomentFacts:
        mine, needs = self._capabilities, self._needs_of(save)
        return MomentFacts(
            driver=self.moments_of,
            isolation=mine.isolation,
            arch=mine.arch,
            mode=save.mode,
            image=save.image,
            runtime=needs.runtime,
            cpu=needs.cpu,
            notes=((NAMED,) if save.named else ()) + needs.notes,
        )

    def _needs_of(self, save: saves.Save) -> Needs:
        """Blocking. *Errors*: Refused RUNTIME_MISSING. A disk of files alone any version mounts."""
        version = "" if self._runtimes is None else self._runtimes.version_of(save.directory)
        return Needs(version, instructions() if save.mode is SaveMode.FULL else ())

    def inbox(self, name: str) -> Path:
        root = self._config.state_dir / INBOX
        root.mkdir(exist_ok=True, mode=0o700)
        return root / self._kept(name).name

    def _clear_inbox(self) -> None:
        """What an earlier run has fetched, and not handed over, goes. Blocking; nothing is fetched before all drivers are open."""
        shutil.rmtree(self._config.state_dir / INBOX, ignore_errors=True)

    def _remove_directory(self, placement_id: str) -> None:
        """Its directory, and what is fetched for it: a fetch that is under way finds no place then. Blocking. *Errors*: as `ending`."""
        inbox = self._config.state_dir / INBOX / placement_id
        for path in (inbox, *inbox.parent.glob(f"{placement_id}.partial-*")):
            shutil.rmtree(path, ignore_errors=True)
        ending.remove_directory(self._view, placement_id)

    async def kinds(self) -> Sequence[str]:
        if not self._capabilities.portable:
            return []
        mine = self._capabilities
        versions = await self._blocking(self._versions)
        return [MomentFacts(self.moments_of, mine.isolation, mine.arch, SaveMode.FULL, "", runtime=version).kind for version in versions]

    def _versions(self) -> Sequence[str]:
        """What moments may be of that this host goes on from. Blocking. *Errors*: as `_needs_of`."""
        return [""] if self._runtimes is None else list(self._runtimes.versions())

    async def suits(self, facts: MomentFacts) -> None:
        kinds = await self.kinds()
        if facts.kind not in kinds:
            raise Refused(
                Code.MOMENT_UNSUITABLE, f"it was saved by {facts.kind}, and this host goes on from {', '.join(kinds) or 'nothing'}"
            )
        if problem := await self._blocking(lambda: self._misfit(facts)):
            raise Refused(Code.MOMENT_UNSUITABLE, problem)

    def _misfit(self, facts: MomentFacts) -> str:
        """Why this host cannot go on from a moment of a kind that it goes on from; empty: it can. Blocking."""
        lacking = set(facts.cpu) - set(instructions())
        return f"its memory relies on what this processor has not: {', '.join(sorted(lacking)[:10])}" if lacking else ""

    async def receive(self, order: Order, facts: MomentFacts, directory: Path, *, snapshot_id: str | None = None) -> None:
        await self.suits(facts)
        if facts.image != order.spec.image:
            raise Refused(Code.MOMENT_CORRUPT, f"it was saved above image {facts.image}, and the order names {order.spec.image}")
        place = self._view.directory(order.placement_id) / saves.SAVED if snapshot_id is None else self._kept(snapshot_id)
        save = saves.Save(place, facts.mode, {}, 0, NAMED in facts.notes, facts.image, str(self._config.runtime))
        if snapshot_id is not None:
            await self._blocking(lambda: self._take_in(directory, save, facts.runtime))
            return
        async with self._lock(order.placement_id):
            found = await self._look(order.placement_id)
            if found.guest is None and not found.saved:
                await self._abide(order.placement_id, lambda: self._receive(order, directory, save, facts.runtime))
                self._step("received")

    def _receive(self, order: Order, directory: Path, save: saves.Save, version: str) -> None:
        """Blocking. The record comes first: what is there is this host's, whatever becomes of this process."""
        own = self._view.directory(order.placement_id)
        try:
            own.mkdir(exist_ok=True, mode=0o700)
            records.write(own, self._slotless(order))
            self._step("receiving")
            if (disk := self._disk_of(order.placement_id)) is not None:
                (directory / disk.name).replace(disk)
                # Whatever became of it on its way, and before: it is looked through before it is used.
                self._runtime.distrust(own)
                (directory / "fetched").write_text(f"{disk.name} came from the artifact store\n")
        except OSError as error:
            raise self._not_taken(error) from error
        self._step("disk received")
        self._take_in(directory, save, version)

    def _take_in(self, directory: Path, save: saves.Save, version: str) -> None:
        if (save.directory / saves.LIST).exists():
            return
        try:
            self._guests.take_in(directory)
            if self._runtimes is not None:
                os.link(self._runtimes.versions()[version], directory / programs.RUNTIME)
            saves.take_in(directory, save)
        except OSError as error:
            raise self._not_taken(error) from error

    def _not_taken(self, error: OSError) -> Refused:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Refused(Code.HOST_DISK_FULL, f"{self._config.state_dir} is full: {error}")
        return Refused(Code.MOMENT_CORRUPT, f"what was fetched cannot be put in place: {error}")

    def _slotless(self, order: Order) -> Record:
        """Whose directory it is, before it has a slot: the next `prepare` writes the whole."""
        mark = self._config.mark
        return Record(
            install_id=mark.install_id,
            host_id=mark.host_id,
            placement_id=order.placement_id,
            sandbox_id=order.sandbox_id,
            generation=order.generation,
            runtime=str(self._config.runtime),
            slot=NO_SLOT,
            address="",
            image=order.spec.image,
        )


def instructions() -> tuple[str, ...]:
    """What of this processor a program may rely on. Blocking."""
    for line in CPUINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted({flag for flag in value.split() if _INSTRUCTIONS.fullmatch(flag)}))
    return ()

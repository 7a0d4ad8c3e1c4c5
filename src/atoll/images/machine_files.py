"""What a host's virtual machines boot by, where the deployment has signed that: kernel and first file system, from control.

Theory of operation. `bring` is run before the drivers are opened. It asks control for the one signed document there is for this architecture,
believes it by the keys that count for images (`trust.py`), and has its image fetched and unpacked as any image is: each byte checked on its way, one
that is wrong in quarantine. Then each file is compared with the signed document, and all of them appear under `kernels/current` in one step,
with the document beside them. What was believed once is looked at again by every run, and goes on where control is away; a newer
document takes its place, an older one never. Where control refuses to say, or says what cannot be believed, there is what was believed
before, or nothing to boot by: a host that was told once never goes back to what its own set-up has fetched, unless all that it was ever
told was refused, and control says now that there is nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from atoll.base.errors import AtollError, Code, Refused
from atoll.images.kernels import MANIFEST, REFUSED
from atoll.images.whole import write_whole
from atoll.telemetry import events
from atoll.telemetry.log import get_logger
from atoll.wire import manifests
from atoll.wire.guest import PROTOCOL
from atoll.wire.manifests import MachineManifest

log = get_logger()

SIGNED: Final = "signed.json"
_NEWEST: Final = "newest"
"""The highest revision that was believed here: also where its files could not be had."""
ASK_S: Final = 10.0


class Source(Protocol):
    """Control, as far as it tells what machines boot by. *Errors*: those of the transport."""

    async def machine(self, architecture: str) -> bytes:
        """The signed document. *Errors*: Refused IMAGE_UNAVAILABLE when there is none."""
        ...


class Believes(Protocol):
    """`Trust`, as far as it is needed here."""

    async def machine(self, content: bytes) -> MachineManifest:
        """*Errors*: Refused IMAGE_UNTRUSTED, IMAGE_CORRUPT."""
        ...


Unpack = Callable[[str], Awaitable[Path]]
"""Have the root file system of an image here; where it is. *Errors*: those of Unpacking."""


@dataclass(frozen=True, slots=True)
class MachineFiles:
    """One for each host. `directory` is root's own."""

    directory: Path
    source: Source
    trust: Believes
    unpack: Unpack
    machine: str

    async def bring(self) -> Path | None:
        """Where machines' kernel is to be looked for, as a cache has it (`kernels.look_up`); None: nothing is signed, and the host's own set-up counts.

        Never raises: what could not be had is logged, and machines do not start.
        """
        try:
            async with asyncio.timeout(ASK_S):
                content = await self.source.machine(self.machine)
        except (AtollError, TimeoutError) as error:
            if isinstance(error, Refused) and error.code is Code.IMAGE_UNAVAILABLE:
                (self.directory / REFUSED).unlink(missing_ok=True)
            else:
                log.info(events.CONTROL_LOST, error=str(error) or "no answer")
        else:
            try:
                await self._take(content)
            except (AtollError, OSError) as error:
                await self._refused(*_why(error))
        if not is_told(self.directory):
            return None
        await self._look_again()
        return self.directory

    @property
    def lacks(self) -> bool:
        """Whether this host was told what to boot by, and has it not: then `bring` may do better later."""
        return is_told(self.directory) and not (self.directory / "kernels" / "current").exists()

    async def _take(self, content: bytes) -> None:
        """*Errors*: Refused IMAGE_UNTRUSTED, IMAGE_CORRUPT, IMAGE_REFUSED, PROTOCOL_UNSUPPORTED; those of Unpacking; OSError."""
        told = await self.trust.machine(content)
        if told.architecture != self.machine:
            raise Refused(Code.IMAGE_REFUSED, f"it is for {told.architecture}, this host is {self.machine}")
        if not told.protocol_min <= PROTOCOL <= told.protocol_max:
            message = f"it needs guest protocol {told.protocol_min} to {told.protocol_max}, this host speaks {PROTOCOL}"
            raise Refused(Code.PROTOCOL_UNSUPPORTED, message)
        if told.revision < self._newest():
            raise Refused(Code.IMAGE_UNTRUSTED, f"it is revision {told.revision}, and this host has had {self._newest()}")
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Before its files: a host that was told once does not boot by anything else.
        await asyncio.to_thread(write_whole, self.directory / _NEWEST, str(told.revision).encode())
        if await asyncio.to_thread(self._wrong, told, self._place(told)) is None and self._current() == self._place(told).name:
            return
        tree = await self.unpack(told.image)
        await asyncio.to_thread(self._lay, told, tree, content)

    async def _look_again(self) -> None:
        """See that what is here is still what was signed, by a key that counts; what is not is not booted by."""
        place = self.directory / "kernels" / "current"
        try:
            told = await self.trust.machine(await asyncio.to_thread((place / SIGNED).read_bytes))
            wrong = await asyncio.to_thread(self._wrong, told, place)
            if wrong is None:
                return
            raise Refused(Code.IMAGE_CORRUPT, f"{place / wrong} is not what was signed")
        except FileNotFoundError:
            return
        except (AtollError, OSError) as error:
            await self._refused(*_why(error))
            place.unlink(missing_ok=True)

    async def _refused(self, code: Code, message: str) -> None:
        log.warning(events.IMAGE_REFUSED, image="machine", digest="", code=code, error=message)
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            # For whoever asks why there is no kernel.
            await asyncio.to_thread(write_whole, self.directory / REFUSED, f"{code}: {message}".encode())

    def _newest(self) -> int:
        try:
            return int((self.directory / _NEWEST).read_text())
        except (OSError, ValueError):
            return 0

    def _current(self) -> str:
        try:
            return (self.directory / "kernels" / "current").readlink().name
        except OSError:
            return ""

    def _place(self, told: MachineManifest) -> Path:
        return self.directory / "kernels" / told.image.removeprefix("sha256:")[:32]

    @staticmethod
    def _wrong(told: MachineManifest, place: Path) -> str | None:
        """The first file that is not what was signed; None: all are."""
        for one in told.files:
            try:
                with (place / one.name).open("rb") as file:
                    if os.fstat(file.fileno()).st_size != one.size:
                        return one.name
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError:
                return one.name
            if f"sha256:{found}" != one.digest:
                return one.name
        return None

    def _lay(self, told: MachineManifest, tree: Path, content: bytes) -> None:
        place, kernels = self._place(told), self.directory / "kernels"
        kernels.mkdir(exist_ok=True, mode=0o755)
        draft = kernels / ".draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o755)
        try:
            for one in told.files:
                _copy(tree / one.name, draft / one.name)
            if (wrong := self._wrong(told, draft)) is not None:
                raise Refused(Code.IMAGE_CORRUPT, f"{wrong} of image {told.image} is not what was signed")
            files = {one.name: {"size": one.size, "sha256": one.digest.removeprefix("sha256:")} for one in told.files}
            document = {"format": 2, "version": told.version, "arch": told.architecture, "files": files}
            write_whole(draft / MANIFEST, json.dumps(document, indent=1).encode() + b"\n")
            write_whole(draft / SIGNED, content)
            shutil.rmtree(place, ignore_errors=True)
            draft.rename(place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        link = kernels / ".current"
        link.unlink(missing_ok=True)
        link.symlink_to(place.name)
        link.replace(kernels / "current")
        (self.directory / REFUSED).unlink(missing_ok=True)
        for old in kernels.iterdir():
            # What runs has them mounted, and needs no names.
            if old.name not in (place.name, "current"):
                shutil.rmtree(old, ignore_errors=True)
        log.info(events.IMAGE_MACHINE_FOLLOWED, revision=told.revision, image=told.image)


def is_told(directory: Path) -> bool:
    """Whether this host has been told of such a document: then it boots machines by nothing else."""
    return (directory / _NEWEST).exists() or (directory / REFUSED).exists()


def _why(error: AtollError | OSError) -> tuple[Code, str]:
    if isinstance(error, AtollError):
        return error.code, error.message
    return Code.HOST_DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else Code.IMAGE_CORRUPT, str(error)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as old, target.open("xb") as new:
        shutil.copyfileobj(old, new, 1 << 20)
        # Machines run as users of their own; there is nothing secret in it.
        os.fchmod(new.fileno(), 0o644)
        new.flush()
        os.fsync(new.fileno())


def read(content: bytes) -> MachineManifest:
    """What a document says of itself, believed by nobody. *Errors*: Refused IMAGE_CORRUPT."""
    try:
        return MachineManifest.model_validate_json(manifests.opened(content)[1])
    except ValueError as error:
        raise Refused(Code.IMAGE_CORRUPT, "what machines boot by is no such document") from error

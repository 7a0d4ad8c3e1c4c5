"""What virtual machines boot by, signed for hosts: a kernel and the first file system with this release's guest program.

Theory of operation. The set-up of a machine that runs control fetches a kernel (`images/kernels.py`). When control starts, it puts that, with the
first file system, into the artifact store as an image of one layer, and signs a document that names image and files. There is one document for
each architecture; hosts ask for it, and have the image as any other. It is replaced where kernel or release here are newer, or the same and made
of other bytes, by a document of the next revision: replicas that were set up at another time do not take turns. It is signed again when
keys change. Why: docs/adr/0038.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.base.errors import AtollError, Code, Refused
from atoll.control.artifacts.manifests import Manifests
from atoll.images import assembling, kernels, machine_files
from atoll.images.artifacts import MACHINES, Artifacts
from atoll.images.library import Library
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger
from atoll.wire import guest, manifests
from atoll.wire.manifests import MachineFile, MachineManifest

LOG = get_logger()

LOOK_S: Final = 10.0
_ARCHITECTURE: Final = re.compile(r"[a-z0-9_]{1,32}")


@dataclass(frozen=True, slots=True)
class MachineSource:
    """What this machine has to publish. `cache`: where its set-up keeps kernels; `guest`: the guest program."""

    cache: Path
    guest: Path
    release: str
    machine: str


@dataclass(frozen=True, slots=True)
class Machines:
    """Of one control process."""

    manifests: Manifests
    store: Artifacts
    library: Library | None
    source: MachineSource | None
    """None: hosts boot by what was published, or by what their own set-up has fetched."""

    async def run(self) -> None:
        """Publish what is here, and sign again what is there when the keys have changed, until cancelled."""
        done, signs = self.source is None, ""
        while True:
            try:
                if not done:
                    done = await self.publish()
                if self.manifests.keys().id != signs:
                    await self.sign_again()
                    signs = self.manifests.keys().id
            except (AtollError, OSError) as error:
                LOG.warning(names.MANIFEST_REFUSED, code=error.code if isinstance(error, AtollError) else Code.INTERNAL, error=str(error))
            await asyncio.sleep(LOOK_S)

    async def give(self, architecture: str) -> bytes:
        """The signed document. *Errors*: Refused INVALID_REQUEST, IMAGE_UNAVAILABLE (none is published); those of Artifacts."""
        if _ARCHITECTURE.fullmatch(architecture) is None:
            raise Refused(Code.INVALID_REQUEST, "an architecture is named as its kernel does")
        content = await self._published(architecture)
        if content is None:
            raise Refused(Code.IMAGE_UNAVAILABLE, f"nothing is published that machines of {architecture} boot by")
        return content

    async def publish(self) -> bool:
        """Have what this machine's set-up has fetched published, where it is newer than what is; False: not now, for something is being collected.

        *Errors*: Refused IMAGE_CORRUPT (the kernel here is not whole), SETUP_FAILED; those of Artifacts; OSError.
        """
        source, library = self.source, self.library
        if source is None or library is None:
            return True
        try:
            kernel = await asyncio.to_thread(kernels.look_up, source.cache)
        except Refused as error:
            if error.code is Code.IMAGE_UNAVAILABLE:
                return True
            raise
        before = await self._published(source.machine)
        known = None if before is None else machine_files.read(before)
        if known is not None and _order(known.version, known.release) > _order(kernel.version, source.release):
            return True
        image, files = await asyncio.to_thread(self._compose, library.bench, kernel, source)
        if known is not None and known.image == image and await library.has(image):
            return True
        await library.publish(image)
        made = MachineManifest(
            revision=known.revision + 1 if known is not None else 1,
            architecture=source.machine,
            version=kernel.version,
            release=source.release[:64],
            image=image,
            files=files,
            protocol_min=guest.PROTOCOL,
            protocol_max=guest.PROTOCOL,
        )
        await self._write(source.machine, manifests.canonical(made))
        # Whoever collected meanwhile did not know of it yet.
        return await library.has(image)

    async def sign_again(self) -> None:
        """Have what is published signed by the key that signs now, as far as one has signed it that counts."""
        keys = self.manifests.keys()
        async for info in self.store.list(MACHINES):
            content = await self.store.read(info.key, bytes_max=manifests.BYTES_MAX)
            try:
                envelope, payload = manifests.opened(content)
                manifests.signer_of(envelope, payload, manifests.MACHINE_FORM, keys.current.usable())
                if keys.id not in {one.key for one in envelope.signatures}:
                    await self._write(info.key.rpartition("/")[2], payload)
            except Refused as error:
                # Hosts say what is wrong with it.
                LOG.warning(names.MANIFEST_REFUSED, code=error.code, error=error.message)

    async def _published(self, architecture: str) -> bytes | None:
        try:
            return await self.store.read(f"{MACHINES}/{architecture}", bytes_max=manifests.BYTES_MAX)
        except Refused as error:
            if error.code is Code.ARTIFACT_NOT_FOUND:
                return None
            raise

    async def _write(self, architecture: str, payload: bytes) -> None:
        keys = self.manifests.keys()
        made = manifests.sealed(payload, manifests.MACHINE_FORM, [keys.signing])
        await self.store.write(f"{MACHINES}/{architecture}", made.model_dump_json().encode())
        LOG.info(names.MANIFEST_SIGNED, digest=manifests.digest_of(payload), key=keys.id)

    @staticmethod
    def _compose(bench: Path, kernel: kernels.Kernel, source: MachineSource) -> tuple[str, list[MachineFile]]:
        """The image with the files, in the bench's blobs, and the files as the document names them. The same files give the same image."""
        partial = bench / "partial"
        partial.mkdir(parents=True, exist_ok=True, mode=0o750)
        with tempfile.TemporaryDirectory(dir=partial, prefix="machine-") as place:
            initrd, root = Path(place, kernels.INITRD), Path(place, "root.tar")
            with initrd.open("wb") as file:
                for chunk in kernels.archive(kernel.modules, source.guest):
                    file.write(chunk)
            found = [path for path in (kernel.image, kernel.unpacked, initrd) if path.exists()]
            with tarfile.open(root, "w", format=tarfile.USTAR_FORMAT) as archive:
                for path in found:
                    entry = tarfile.TarInfo(path.name)
                    entry.size, entry.mode = path.stat().st_size, 0o644
                    with path.open("rb") as file:
                        archive.addfile(entry, file)
            files = [MachineFile(name=path.name, digest=_digest(path), size=path.stat().st_size) for path in found]  # type: ignore[arg-type]
            return assembling.compose(bench, root), files


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _order(version: str, release: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Kernels first, then releases; both by their numbers."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", text))

    return numbers(version), numbers(release)

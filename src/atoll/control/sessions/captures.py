"""Captures: what has changed in a sandbox's files, as a layer from its host.

Theory of operation. A wish (`wishes.py`) goes out with the host's next poll; the host packs the layer and sends it to
`/agent/v1/layers/{id}`, whose bytes go to a private file of the image store, are counted and digested there, and appear as a blob by one
rename. What a host was not asked for it cannot send. A build that is taken over takes the step again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from starlette.types import Receive

from atoll.base.errors import Code, Refused, Unavailable
from atoll.base.ids import Dice, Prefix, new_id
from atoll.control import asgi
from atoll.control.replicas.hub import Hub
from atoll.control.replicas.peers import Peers
from atoll.control.sessions.wishes import Open, Wishes
from atoll.wire import agent as wire
from atoll.wire.replica import Came

PATIENCE_S: Final = 600.0
QUIET_S: Final = 60.0
BYTES_MAX: Final = 16 << 30
_OK: Final = 200


@dataclass(frozen=True, slots=True)
class Captured:
    """A layer that has come. *Units*: bytes."""

    digest: str
    size: int
    entries: int


class Captures:
    """One per control process. `store` is the image store's directory."""

    def __init__(self, *, hub: Hub, dice: Dice, store: Path, peers: Peers | None = None) -> None:
        self._peers = peers
        self._dice = dice
        self.store = store
        self.wishes: Wishes[Captured] = Wishes(hub=hub, peers=peers)

    async def take(self, *, host_id: str, placement_id: str) -> Captured:
        """The layer of a placement. *Errors*: as `Wishes.ask`; what its host says, e.g. HOST_DISK_FULL."""
        wish = wire.Collect(id=new_id(Prefix.DELIVERY, self._dice), placement_id=placement_id, what=wire.LAYER)
        return await self.wishes.ask(host_id, wish, patience_s=PATIENCE_S)

    def failed(self, host_id: str, message: wire.Collected) -> None:
        """The host could not. An id that nobody waits for any more is ignored."""
        known = self.wishes.of(host_id, message.id)
        if known is None:
            return
        code = Code.__members__.get(message.code or "", Code.INTERNAL)
        known.future.set_exception(Refused(code, message.message[:2000] or "the host could not hand in the sandbox's files"))

    async def receive(self, host_id: str, wish_id: str, entries: int, receive: Receive) -> None:
        """A layer's bytes, for whoever waits for them, here or at another replica.

        *Errors*: Refused INVALID_REQUEST (nobody asked), BODY_TOO_LARGE, HOST_DISK_FULL; Unavailable when the one who waits could not take
        it; ConnectionError.
        """
        known = self.wishes.of(host_id, wish_id)
        if known is not None:
            await self._take(known, entries, asgi.parts(receive, quiet_s=QUIET_S))
            return
        address = await self._peers.waiting(host_id, wish_id) if self._peers is not None else None
        if address is None or self._peers is None:
            raise Refused(Code.INVALID_REQUEST, "nobody waits for this layer")
        digest, size = await self._keep(wish_id, asgi.parts(receive, quiet_s=QUIET_S))
        message = Came(host_id=host_id, wish_id=wish_id, address=self._peers.address, digest=f"sha256:{digest}", size=size, entries=entries)
        await self._peers.came(address, message)

    async def fetch(self, message: Came) -> None:
        """A layer that came to another replica. *Errors*: as `receive`."""
        known = self.wishes.of(message.host_id, message.wish_id)
        if self._peers is None or known is None:
            raise Refused(Code.INVALID_REQUEST, "nobody waits for this layer")
        async with self._peers.fetch(message.address, message.digest) as (status, parts):
            if status != _OK:
                raise Unavailable(Code.CONTROL_UNAVAILABLE, "the replica that has the layer does not give it")
            await self._take(known, message.entries, parts, digest=message.digest)

    async def _take(self, known: Open[Captured], entries: int, parts: AsyncIterator[bytes], *, digest: str | None = None) -> None:
        try:
            hexdigest, size = await self._keep(known.wish.id, parts, digest=digest)
        except Refused as refusal:
            if not known.future.done():
                known.future.set_exception(refusal)
            raise
        if not known.future.done():
            known.future.set_result(Captured(f"sha256:{hexdigest}", size, entries))

    async def _keep(self, wish_id: str, parts: AsyncIterator[bytes], *, digest: str | None = None) -> tuple[str, int]:
        """Hex digest and size of what is a blob now. *Errors*: Refused BODY_TOO_LARGE, HOST_DISK_FULL; Unavailable when it is not `digest`."""
        partial = self.store / "partial"
        path = partial / f"layer-{wish_id}"
        try:
            partial.mkdir(parents=True, exist_ok=True, mode=0o750)
            found, size = await self._write(path, parts)
            if digest is not None and digest != f"sha256:{found}":
                raise Unavailable(Code.CONTROL_UNAVAILABLE, "the layer was altered on its way from another replica")
            blobs = self.store / "blobs" / "sha256"
            blobs.mkdir(parents=True, exist_ok=True, mode=0o750)
            path.replace(blobs / found)
        except ConnectionError:
            raise  # its host may send it again
        except OSError as error:
            raise Refused(Code.HOST_DISK_FULL, f"the layer could not be kept: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
        return found, size

    @staticmethod
    async def _write(path: Path, parts: AsyncIterator[bytes]) -> tuple[str, int]:
        total, size = hashlib.sha256(), 0
        with path.open("xb") as file:
            async for part in parts:
                size += len(part)
                if size > BYTES_MAX:
                    raise Refused(Code.BODY_TOO_LARGE, f"a layer has at most {BYTES_MAX} bytes")
                total.update(part)
                await asyncio.to_thread(file.write, part)
            await asyncio.to_thread(_to_disk, file)
        path.chmod(0o640)
        return total.hexdigest(), size


def _to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())

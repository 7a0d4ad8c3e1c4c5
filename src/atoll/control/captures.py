"""Captures: what has changed in a sandbox's files, as a layer from its host.

Theory of operation. A wish goes out with the host's next poll, as one for a console does; the host packs the layer and sends it to
`/agent/v1/layers/{id}`, whose bytes go to a private file of the image store, are counted and digested there, and appear as a blob by one
rename. What a host was not asked for it cannot send. A new run of the agent is asked again; control itself remembers nothing: a build that is
taken over takes the step again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from starlette.types import Receive

from atoll.base.errors import AtollError, Code, OutcomeUnknown, Refused
from atoll.base.ids import Dice, Prefix, new_id
from atoll.control.hub import Hub
from atoll.wire import agent as wire

PATIENCE_S: Final = 600.0
QUIET_S: Final = 60.0
BYTES_MAX: Final = 16 << 30


@dataclass(frozen=True, slots=True)
class Captured:
    """A layer that has come. *Units*: bytes."""

    digest: str
    size: int
    entries: int


@dataclass(slots=True)
class _Open:
    host_id: str
    wish: wire.Collect
    future: asyncio.Future[Captured]
    given_to: str | None = None
    """The epoch of the agent's run that has it: a later run does not know of it."""


class Captures:
    """Open wishes of this process. `store` is the image store's directory."""

    def __init__(self, *, hub: Hub, dice: Dice, store: Path) -> None:
        self._hub = hub
        self._dice = dice
        self.store = store
        self._open: dict[str, _Open] = {}
        self._of_host: defaultdict[str, list[str]] = defaultdict(list)

    async def take(self, *, host_id: str, placement_id: str) -> Captured:
        """The layer of a placement. *Errors*: what its host says, e.g. HOST_DISK_FULL; OutcomeUnknown when it does not answer in time."""
        wish = wire.Collect(id=new_id(Prefix.DELIVERY, self._dice), placement_id=placement_id, what=wire.LAYER)
        future: asyncio.Future[Captured] = asyncio.get_running_loop().create_future()
        self._open[wish.id] = _Open(host_id, wish, future)
        self._of_host[host_id].append(wish.id)
        self._hub.wake_host(host_id)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await future
        except TimeoutError:
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "the sandbox's host did not hand in its files in time") from None
        finally:
            self._open.pop(wish.id, None)
            with contextlib.suppress(ValueError):
                self._of_host[host_id].remove(wish.id)

    def wanted(self, host_id: str, epoch: str, room: int) -> list[wire.Collect]:
        """At most `room` wishes that this run of the agent has not been given yet."""
        found = [self._open[one] for one in self._of_host.get(host_id, ()) if one in self._open and self._open[one].given_to != epoch]
        taken = found[:room]
        for one in taken:
            one.given_to = epoch
        return [one.wish for one in taken]

    def failed(self, host_id: str, message: wire.Collected) -> None:
        """The host could not. An id that nobody waits for any more is ignored."""
        known = self._open.get(message.id)
        if known is None or known.host_id != host_id or known.future.done():
            return
        code = Code.__members__.get(message.code or "", Code.INTERNAL)
        known.future.set_exception(Refused(code, message.message[:2000] or "the host could not hand in the sandbox's files"))

    async def receive(self, host_id: str, wish_id: str, entries: int, receive: Receive) -> None:
        """A layer's bytes. *Errors*: Refused INVALID_REQUEST (nobody asked), BODY_TOO_LARGE, HOST_DISK_FULL; ConnectionError."""
        known = self._open.get(wish_id)
        if known is None or known.host_id != host_id or known.future.done():
            raise Refused(Code.INVALID_REQUEST, "nobody waits for this layer")
        partial = self.store / "partial"
        path = partial / f"layer-{wish_id}"
        try:
            partial.mkdir(parents=True, exist_ok=True, mode=0o750)
            digest, size = await self._write(path, receive)
            blobs = self.store / "blobs" / "sha256"
            blobs.mkdir(parents=True, exist_ok=True, mode=0o750)
            path.replace(blobs / digest)
        except ConnectionError:
            raise  # its host may send it again
        except Refused as refusal:
            _refuse(known, refusal)
            raise
        except OSError as error:
            failure = Refused(Code.HOST_DISK_FULL, f"the layer could not be kept: {error.strerror}")
            _refuse(known, failure)
            raise failure from error
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
        if not known.future.done():
            known.future.set_result(Captured(f"sha256:{digest}", size, entries))

    async def _write(self, path: Path, receive: Receive) -> tuple[str, int]:
        total, size = hashlib.sha256(), 0
        with path.open("xb") as file:
            async for part in _parts(receive):
                size += len(part)
                if size > BYTES_MAX:
                    raise Refused(Code.BODY_TOO_LARGE, f"a layer has at most {BYTES_MAX} bytes")
                total.update(part)
                await asyncio.to_thread(file.write, part)
            await asyncio.to_thread(_to_disk, file)
        path.chmod(0o640)
        return total.hexdigest(), size


def _refuse(known: _Open, failure: AtollError) -> None:
    if not known.future.done():
        known.future.set_exception(failure)


def _to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        try:
            async with asyncio.timeout(QUIET_S):
                message = await receive()
        except TimeoutError:
            raise ConnectionError from None
        if message["type"] == "http.disconnect":
            raise ConnectionError
        yield message.get("body", b"")
        if not message.get("more_body"):
            return

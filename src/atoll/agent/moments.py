"""Moments: what this host has saved, brought to the artifact store, and what others have saved, fetched from there. The port.

Theory of operation. A moment is what is saved of a placement, or kept as a snapshot (`drivers.port.PackList`). In the store it is a manifest,
by whose digest it is known, and packs of chunks, which moments share. It is there once its manifest is, and that comes last. What is
fetched is checked against the digest, chunk by chunk, and appears in its directory whole or not at all. Neither is in anybody's way: an
upload that is cancelled ends at once, and one that begins again goes on where it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from pydantic import TypeAdapter, ValidationError

from atoll.base.errors import Code, Refused
from atoll.drivers.port import MomentFacts, PackList
from atoll.images.moments import MomentCarrier


@dataclass(frozen=True, slots=True)
class Stored:
    """A moment that is in the store. *Units*: bytes."""

    digest: str
    """`sha256:HEX` of its manifest."""
    size: int
    """What its chunks take of the store, those that it shares with others included."""


class MomentStore(Protocol):
    """The artifact store, as a host sees it: by way of control, which knows what a host may send and have.

    *Errors* of every call: Unavailable MOMENT_UNAVAILABLE, CONTROL_UNAVAILABLE (nothing happened; try again); Refused FORBIDDEN (control has no
    such moment on record for this host).
    """

    async def upload(self, name: str, what: PackList, *, bases: Sequence[str] = ()) -> Stored:
        """Have a moment in the store. `name`: the placement or snapshot that it is of. `bases`: moments whose packs need not be sent again.

        *Idempotency*: what an earlier run has sent is not sent again, and the digest is the same. *Errors*: Refused RESUME_FAILED (files that
        are not there or change), HOST_DISK_FULL.
        """
        ...

    async def facts(self, digest: str) -> MomentFacts:
        """What is to be known of it. *Errors*: Refused MOMENT_CORRUPT (it is not what its digest says, or no manifest), MOMENT_UNAVAILABLE."""
        ...

    async def fetch(self, digest: str, into: Path) -> None:
        """Have its files in a new directory, on the disk. *Errors*: as `facts`; Refused HOST_DISK_FULL; then nothing is there."""
        ...

    async def forget(self, name: str) -> None:
        """Nothing of this name will be sent any more: what is remembered of its upload goes."""
        ...


@dataclass(frozen=True, slots=True)
class CarriedMoments:
    """`MomentStore` by the program that sends and fetches. `work`: where it notes how far uploads have come. *Units*: bytes."""

    carrier: MomentCarrier
    work: Path
    spare_bytes: int = 0
    """Of the disk, to be left free."""
    bytes_per_s_max: int = 0
    """Of what is sent; 0: as fast as it goes."""

    async def upload(self, name: str, what: PackList, *, bases: Sequence[str] = ()) -> Stored:
        """See MomentStore."""
        wish = {
            "of": name,
            "directory": str(what.directory),
            "files": list(what.files),
            "facts": _FACTS.dump_python(what.facts, mode="json"),
            "bases": list(bases),
            "work": str(self.work),
            "bytes_per_second": self.bytes_per_s_max,
        }
        sent = await self.carrier.upload(wish)
        return Stored(str(sent["digest"]), int(sent["size"]))

    async def facts(self, digest: str) -> MomentFacts:
        """See MomentStore."""
        found = await self.carrier.describe(digest)
        try:
            return _FACTS.validate_python(found["facts"])
        except (ValidationError, KeyError) as error:
            raise Refused(Code.MOMENT_CORRUPT, f"what {digest} says of itself makes no sense: {type(error).__name__}") from None

    async def fetch(self, digest: str, into: Path) -> None:
        """See MomentStore."""
        await self.carrier.fetch(digest, into, spare_bytes=self.spare_bytes)

    async def forget(self, name: str) -> None:
        """See MomentStore."""
        if "/" not in name:
            await asyncio.to_thread((self.work / f"{name}.sent").unlink, missing_ok=True)


_FACTS: Final = TypeAdapter(MomentFacts)

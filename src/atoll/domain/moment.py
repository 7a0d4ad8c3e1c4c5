"""Moment: what a host has saved, of a sandbox or as a snapshot, and sent to the artifact store, so that others can go on from it.

Theory of operation. A moment never changes: it is known by the digest of its manifest, and is in the store whole or not at all. Where it can
be gone on from depends on what wrote it; `kind` says that in one word, which hosts repeat of what they can do and which control compares.
A host may still refuse one for what only it can tell (its processor). Who needs which moment follows from rows (`store/moments.py`);
what nobody needs is collected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HEAD_START_WAIT_S: Final = 2.0
"""How long a create waits for a head start that its host fetches, where the host says nothing else: what takes longer is hardly quicker than a boot.
*Source*: docs/adr/0036."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One that is in the store. *Units*: bytes of the store."""

    digest: str
    """`sha256:HEX` of its manifest."""
    size: int = 0
    kind: str = ""


def kind(driver: str, isolation: str, arch: str, runtime: str = "") -> str:
    """What hosts must share to go on from each other's moments. `runtime`: of what is more than files, whatever wrote it, with its version."""
    return "/".join(part for part in (driver, isolation, arch, runtime) if part)

"""What the agent asks control of signed manifests: over its own connection, one for each question, since they are rare."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.programs.hosting import HostConfig
from atoll.programs.layout import Layout
from atoll.wire.manifests import KeyChain, KeySet

if TYPE_CHECKING:
    from atoll.agent.transport import HttpTransport


@dataclass(frozen=True, slots=True)
class Told:
    """Implements images.trust.Source and images.machine_files.Source."""

    place: Layout
    config: HostConfig

    async def manifest(self, digest: str) -> bytes:
        """See Source."""
        async with self._control() as control:
            return await control.manifest(digest)

    async def machine(self, architecture: str) -> bytes:
        """See machine_files.Source."""
        async with self._control() as control:
            return await control.machine(architecture)

    async def key_chain(self) -> KeyChain:
        """See Source."""
        async with self._control() as control:
            return await control.key_chain()

    async def first_keys(self) -> KeySet:
        """See Source."""
        async with self._control() as control:
            return await control.first_keys()

    @asynccontextmanager
    async def _control(self) -> AsyncIterator[HttpTransport]:
        from atoll.agent.config import load_identity
        from atoll.agent.transport import HttpTransport

        known = load_identity(self.place.credential)
        control = HttpTransport(self.config.control, known.credential if known is not None else None, authority=self.config.authority)
        try:
            yield control
        finally:
            await control.close()

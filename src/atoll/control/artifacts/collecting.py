"""Collecting: what an operator has removed of the artifact store, images and moments alike."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.control.artifacts.imports import Imports
from atoll.control.artifacts.moments import Moments
from atoll.control.operations import CollectedArtifacts


@dataclass(frozen=True, slots=True)
class Collecting:
    """`Operations.collect`. `moments`: None where none are kept."""

    imports: Imports
    moments: Moments | None

    async def __call__(self, dry_run: bool) -> CollectedArtifacts:  # noqa: FBT001 - it is the one thing that is said
        """What went, or would go. *Errors*: those of the artifact store."""
        images = await self.imports.collected(dry_run)
        if images.busy or self.moments is None:
            return images
        saved = await self.moments.collect(dry_run=dry_run)
        return CollectedArtifacts((*images.keys, *saved.keys), images.size + saved.size)

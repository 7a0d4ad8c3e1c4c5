"""Who holds what of the disk, among trees that share files.

Theory of operation. A tree that was made from another one has its files by the same inodes: what the other one had of its own stays on the disk
until the last of those that have it goes. Manifests say who shares how much with whom, so nothing is walked through here. What several
have is held by the one that it came with, or, when that is gone, by the one that was made from it first.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.images.cache import CachedImage


def held(images: Iterable[CachedImage]) -> dict[str, int]:
    """How many bytes each image holds, by digest: their sum is what they take of the disk together, each file once."""
    found: dict[str, int] = {}
    parts: dict[str, int] = {}
    shared: list[tuple[str, str, int]] = []
    for image in sorted(images, key=lambda one: (len(one.shares), one.digest)):
        parts[image.digest] = image.own_bytes
        found[image.digest] = image.own_bytes + image.machine_bytes
        shared += [(image.digest, part, size) for part, size in image.shares]
    for holder, part, size in shared:
        if part not in parts:
            parts[part] = size
            found[holder] += size
    return found

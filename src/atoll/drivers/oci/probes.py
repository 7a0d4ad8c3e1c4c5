"""Self-checks of this driver; each says what is wrong and how to mend it."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.drivers.oci.config import OciConfig
from atoll.drivers.oci.runtime import Runtime
from atoll.drivers.port import Probe
from atoll.hostops.cgroups import Layout
from atoll.images.cache import ImageCache


def run(config: OciConfig, layout: Layout, runtime: Runtime, images: ImageCache, network_problems: Sequence[str]) -> list[Probe]:
    """All checks, in a fixed order."""
    return []

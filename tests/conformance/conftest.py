"""Conformance: every driver against the port, on this machine for real."""

import os
from pathlib import Path

import pytest

from atoll.drivers.oci.config import RuntimeKind
from atoll.testing.conformance.oci_stand import OciStand, missing

REPOSITORY = Path(__file__).parents[2]
BINARIES = Path(os.environ.get("ATOLL_BIN") or REPOSITORY / "build" / "bin")
CACHE = Path(os.environ.get("ATOLL_CACHE") or "/var/cache/atoll")


def oci_stand(kind: RuntimeKind, home: Path) -> OciStand:
    """A stand of this runtime, or a skip that names what is missing."""
    if lack := missing(kind, BINARIES, CACHE):
        pytest.skip(f"needs {lack}")
    return OciStand(kind, home, binaries=BINARIES, cache=CACHE)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("host")

"""Conformance: every driver against the port, on this machine for real."""

import os
from pathlib import Path

import pytest

from atoll.testing.conformance.oci_stand import OciStand, missing

REPOSITORY = Path(__file__).parents[2]
BINARIES = Path(os.environ.get("ATOLL_BIN") or REPOSITORY / "build" / "bin")
CACHE = Path(os.environ.get("ATOLL_CACHE") or "/var/cache/atoll")


@pytest.fixture
def binaries():
    return BINARIES


@pytest.fixture
def cache():
    return CACHE


@pytest.fixture
async def oci_stand(request, tmp_path):
    """An open stand of the module's RUNTIME, or a skip that names what is missing."""
    kind = request.module.RUNTIME
    if lack := missing(kind, BINARIES, CACHE):
        pytest.skip(f"needs {lack}")
    stand = OciStand(kind, tmp_path, binaries=BINARIES, cache=CACHE)
    await stand.open()
    yield stand
    await stand.close()

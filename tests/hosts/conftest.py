"""Rigs: several machines on one. They need root, network namespaces and a C compiler."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import guests
from tests.hosts.rig import Rig, opened
from tests.store.server import Server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for marker in ("root", "kill"):
                item.add_marker(getattr(pytest.mark, marker))
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session", autouse=True)
def _able() -> None:
    if os.geteuid() != 0:
        pytest.skip("machines are made of namespaces, which needs root; run as root")
    missing = [name for name in ("ip", "nft", "unshare", "nsenter", "cc") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; `make test` installs them")


@pytest.fixture(scope="module")
def joining() -> Iterator[Rig]:
    """One control and machines that are no hosts yet."""
    with opened(replicas=1, machines=2) as rig:
        yield rig


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Two replicas on PostgreSQL, and three hosts at work."""
    server = Server.start(tmp_path_factory.mktemp("postgres"))
    try:
        with opened(replicas=2, machines=3, database_url=asyncio.run(server.database())) as rig:
            rig.enrol_all()
            yield rig
    finally:
        server.stop()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Rig]:
    """One control on SQLite and three hosts at work."""
    with opened(replicas=1, machines=3) as rig:
        rig.enrol_all()
        yield rig


@pytest.fixture(scope="module")
def two() -> Iterator[Rig]:
    """One control and two hosts with real guests."""
    if lack := guests.missing():
        pytest.skip(f"needs {lack}")
    with opened(replicas=1, machines=2, driver="oci") as rig:
        rig.enrol_all()
        yield rig

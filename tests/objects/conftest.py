"""A bucket on loopback for the tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.objects.server import S3Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    made = S3Server(tmp_path_factory.mktemp("s3"))
    made.start()
    yield made
    made.stop()

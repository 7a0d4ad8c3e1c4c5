"""A client for a command: where to send is found once, and closed at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.client.api import Api


@contextmanager
def session() -> Iterator[Api]:
    """The API that the environment or this machine's instance names. *Errors*: those of `client.target.find`."""
    from atoll.client.api import Api
    from atoll.client.target import find

    with Api(find()) as api:
        yield api

"""What control replicas say to each other, JSON over HTTP: wishes and answers of hosts that came to another one than who waits."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from atoll.wire.agent import Collect, ImageCacheState, Message

MESSAGE_BYTES_MAX: Final = 384 << 10
"""More than an agent's message, which one of these may carry."""


class Wish(Message):
    """Body of /wish: to be given to a host whose poll is parked at the asked replica. Answered by `Given`, or refused HOST_NOT_FOUND."""

    host_id: str
    collect: Collect


class Given(Message):
    """It goes out with the answer of that poll, to this run of the agent."""

    epoch: str


class Waiting(Message):
    """Body of /waiting: is it you who waits for this layer of this host's? Answered by 204, or refused HOST_NOT_FOUND."""

    host_id: str
    wish_id: str


class KeptAsked(Message):
    """Body of /kept: what do the hosts keep of images whose newest polls came to you? Answered by `Kept`."""


class Kept(Message):
    """The sum over these hosts."""

    images: ImageCacheState


class Came(Message):
    """Body of /came: the layer is whole, at `address`, from where it can be fetched by its digest. Answered by 204 once it was. *Units*: bytes."""

    host_id: str
    wish_id: str
    address: str
    digest: str
    size: int = Field(ge=0)
    entries: int = Field(ge=0)

"""Control → edge: which placement answers for a sandbox. A stream of one snapshot, then changes; and two look-ups."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from atoll.wire.guest import GUEST_PORT


class Reach(BaseModel):
    """How to get to the placement: `direct` to an address of its slot."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    kind: Literal["direct"] = "direct"
    ip: str


class Route(BaseModel):
    """One sandbox's way in. `revision` is the sandbox row's."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    sandbox_id: str
    revision: int
    generation: int
    placement_id: str
    host_id: str
    state: str
    reach: Reach
    guest_port: int = GUEST_PORT
    public_traffic: bool = True
    traffic_token_sha256: str | None = None
    connect_token: str = ""
    auto_resume: bool = False
    mask_request_host: str | None = None


class Line(BaseModel):
    """One line of the NDJSON stream."""

    type: Literal["snapshot", "route", "gone", "ping"]
    cursor: int
    incarnation: str | None = None
    routes: list[Route] | None = None
    route: Route | None = None
    sandbox_id: str | None = None
    revision: int | None = None
    reason: str | None = None


class Locate(BaseModel):
    """Which live sandbox made this signature? Body of POST /internal/edge/v1/locate."""

    path: str = Field(max_length=8192)
    operation: Literal["read", "write"]
    username: str = Field(default="", max_length=256)
    signature: str = Field(max_length=256)
    expiration: int | None = None


class Located(BaseModel):
    """Answer of locate."""

    sandbox_id: str


CHANGED_HEADER = "Atoll-Changed"
"""`<sandbox_id>:<revision>` on API answers that changed a sandbox; the edge waits until its table has it, and removes the header."""

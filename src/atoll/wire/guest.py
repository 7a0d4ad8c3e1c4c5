"""Agent → guest: HTTP JSON under `/atoll/`, with tokens signed by the deployment key for one placement's guest.

The guest starts with a `GuestConfig` in `ATOLL_GUEST_CONFIG`; it serves nothing of a user's until the first `Init`.
"""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field

PROTOCOL: Final = 1
"""Of what follows here: guests of another one are not started."""
GUEST_PORT: Final = 49983
ENVD_VERSION: Final = "0.6.13"
GUEST_PATH: Final = "/.atoll/guest"
PLACEMENT_PATH: Final = "/.atoll/placement"
"""Where a guest that can be restored as another's finds whose it is: a PlacementFile, read-only."""
MACHINE_PLACEMENT_PATH: Final = "/run/.atoll-placement"
"""The same in a virtual machine, written by its host's word after each restore. In memory: who boots is told by a disk."""
CONFIG_VARIABLE: Final = "ATOLL_GUEST_CONFIG"
SCOPE_CONTROL: Final = "control"
SCOPE_CONNECT: Final = "connect"


class GuestConfig(BaseModel):
    """What a guest is told at its start; holds no secret."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    sandbox_id: str
    placement_id: str
    generation: int
    nonce: str
    public_key: str
    listen: str = f"0.0.0.0:{GUEST_PORT}"
    command: list[str] = Field(default_factory=list)
    command_user: str = ""
    """Whom command and ready run as, beginning in the sandbox's working directory; empty: root, in /."""
    ready: list[str] = Field(default_factory=list)
    placement_file: str = ""
    """Where a PlacementFile is shown; empty: it is never another guest than at its start."""
    pids_max: int = 0
    """How many processes and threads may be inside, where only the guest can see to it (gVisor); 0: no limit of its own."""


class PlacementFile(BaseModel):
    """Whose guest a machine is, as its host shows it. A guest that is called by a token of another one's looks here, and is that from then on."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    sandbox_id: str
    placement_id: str
    generation: int
    nonce: str


class Hello(BaseModel):
    """Answer of GET /atoll/hello; all of the first four must match before a guest counts as ready."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    sandbox_id: str
    placement_id: str
    generation: int
    nonce: str
    guest_version: str
    envd_version: str
    initialised: bool
    start: str = "none"
    """How far the image's own command is: none, starting, ready, failed."""
    start_detail: str = ""
    """What the last try said, for people."""
    init_revision: int | None = None
    """`Init.revision` of the last init that it has taken; 0: none since it is this one's. None: it is of a version that does not say."""


class InitFile(BaseModel):
    """A file that init writes, root-owned."""

    path: str
    content: str
    mode: str = "0644"


class Init(BaseModel):
    """Body of POST /atoll/init; replaces what an earlier one said."""

    env: dict[str, str] = Field(default_factory=dict)
    access_token: str | None = None
    default_user: str = "user"
    default_workdir: str | None = None
    time_unix_ns: str | None = None
    entropy: str | None = None
    hostname: str | None = None
    files: list[InitFile] = Field(default_factory=list)
    revision: int = 0
    """The desired revision that it is of. Its guest says it in its hello: whoever has lost track of an init can tell whether it came."""


def claims(*, sandbox_id: str, placement_id: str, generation: int, nonce: str, scope: str) -> dict[str, str | int | list[str]]:
    """Claims of a guest token (JWT, EdDSA). No time claims: the guest's clock is not trusted, the nonce is new for each placement."""
    return {"sub": sandbox_id, "plc": placement_id, "gen": generation, "non": nonce, "scp": [scope]}

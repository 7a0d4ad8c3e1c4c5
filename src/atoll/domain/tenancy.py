"""Team and client: who asks. A key is shown once and kept as a digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from atoll.base.ids import ClientId, TeamId


class Role(StrEnum):
    """What a client may do: `MEMBER` its team's things, `OPERATOR` hosts, keys and every team's things too."""

    MEMBER = "member"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Team:
    """A tenant. Its limits are the deployment document's (`deployment.py`)."""

    id: TeamId
    name: str


@dataclass(frozen=True, slots=True)
class Client:
    """A credential of a team."""

    id: ClientId
    team_id: TeamId
    name: str
    role: Role
    key_digest: str
    key_hint: str
    """The last four characters, so that people can tell keys apart."""
    created_at: float
    revoked_at: float | None = None
    last_used_at: float | None = None


def key_digest(key: str) -> str:
    """How a key is kept: SHA-256 (hex). Keys carry 160 bits of chance, so no salt or stretching is needed."""
    return hashlib.sha256(key.encode()).hexdigest()

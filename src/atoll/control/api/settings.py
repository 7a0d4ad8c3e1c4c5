"""What the operator decides about the API."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """*Units*: bytes, seconds."""

    domain: str
    """What clients put host names under, with the edge's port where it has one: `localhost:3000`."""
    install_id: str
    version: str
    body_bytes_max: int = 1 << 20
    body_s_max: float = 20.0
    """How long a client may take to send its body."""
    target_bytes_max: int = 16384
    """Path and query together."""
    requests_max: int = 2048
    """In flight at once; more are refused with 503."""
    allow_origin: str | None = "*"
    """For browsers. `*` is safe: no request means anything without the key in its header."""
    docs: bool = False

    @property
    def client_id(self) -> str:
        """E2B's `clientID`: one word for the whole install, of [a-z0-9] because clients append it to ids after a dash."""
        return self.install_id.rpartition("_")[2][:8]

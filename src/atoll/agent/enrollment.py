"""Enrolment: change a one-use token for this host's credential, once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from atoll.agent.config import AgentConfig, Identity, save_identity
from atoll.base.secret import Secret
from atoll.base.units import Vector
from atoll.wire.agent import Enroll, Enrolled


class Registrar(Protocol):
    """Who enrols hosts; `transport.HttpTransport` asks control."""

    async def enroll(self, message: Enroll) -> Enrolled: ...


async def enroll(
    config: AgentConfig,
    token: Secret,
    *,
    registrar: Registrar,
    name: str,
    capacity: Vector,
    region: str = "local",
    labels: Mapping[str, str] | None = None,
) -> Identity:
    """Enrol this host and keep its credential (0600).

    *Errors*: Refused ENROLLMENT_TOKEN_INVALID, ENROLLMENT_CONFLICT; Unavailable and OutcomeUnknown are safe to repeat with the same
    token as long as control answers it for the same name.
    """
    enrolled = await registrar.enroll(
        Enroll(
            token=token.reveal(),
            name=name,
            capacity=capacity,
            facts=config.facts,
            region=region,
            labels=dict(labels or {}),
            agent_version=config.agent_version,
        )
    )
    identity = Identity(enrolled.host_id, enrolled.install_id, Secret(enrolled.credential), enrolled.credential_version)
    save_identity(config.credential_path, identity)
    return identity

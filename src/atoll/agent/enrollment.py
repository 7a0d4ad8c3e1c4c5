"""Enrolment: how a machine becomes a host, once, whatever is lost on the way.

Theory of operation. The machine makes its credential and writes it down, with what it registers, before it says anything. Then it asks to
be admitted (by a one-use token, or by an operator's word), which tells control only the credential's digest. Then it asks who it is, with
the credential: the answer is its identity, and only when that is on the disk is the draft removed. A run that ends anywhere in between is
followed by one that finds the draft and asks who it is before anything else, so a lost answer costs nothing and no token is used twice.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from pydantic import BaseModel, Field

from atoll.agent.config import AgentConfig, Identity, save_identity, write_private
from atoll.base.errors import Code, Refused
from atoll.base.ids import Dice
from atoll.base.secret import Secret
from atoll.wire.agent import Enroll, Enrolled, Known, Registration

DRAFT_FILE: Final = "enrollment.draft"
CREDENTIAL_BYTES: Final = 32


class Registrar(Protocol):
    """Control, for a credential that may be nobody's yet; `transport.HttpTransport` is one."""

    async def enroll(self, message: Enroll) -> Enrolled: ...

    async def identity(self) -> Known: ...


Admit = Callable[[Registrar, Registration], Awaitable[None]]
"""Have control take the registration for a host's. *Idempotency*: with the same registration again."""


class _Draft(BaseModel):
    credential: str = Field(repr=False)
    registration: Registration


@dataclass(frozen=True, slots=True)
class Obtained:
    """`new`: it was not a host before."""

    identity: Identity
    name: str
    new: bool


def by_token(token: Secret) -> Admit:
    """Admission by a one-use token."""

    async def admit(registrar: Registrar, registration: Registration) -> None:
        await registrar.enroll(Enroll(token=token.reveal(), **registration.model_dump()))

    return admit


async def obtain(
    config: AgentConfig, wanted: Registration, *, connect: Callable[[Secret], Registrar], admit: Admit, dice: Dice
) -> Obtained:
    """Become a host and keep its credential (0600). `wanted` comes without a credential's digest.

    *Idempotency*: run again after whatever end of an earlier run, it goes on where that one was. *Errors*: Refused
    ENROLLMENT_TOKEN_INVALID, ENROLLMENT_CONFLICT (of another configuration than the one that an earlier run has registered, too);
    Unavailable and OutcomeUnknown are safe to repeat.
    """
    path = config.state_directory / DRAFT_FILE
    before = _load(path)
    credential = before.credential if before is not None else "hk_" + dice(CREDENTIAL_BYTES).hex()
    registrar = connect(Secret(credential))
    known = await _ask(registrar) if before is not None else None
    same = before is not None and _chosen(before.registration) == _chosen(wanted)
    if known is not None and not (same and known.name == wanted.name):
        raise Refused(Code.ENROLLMENT_CONFLICT, f"this machine was enrolled before, as {known.name!r} and with another configuration")
    new = known is None
    if known is None:
        draft = before if before is not None and same else _draft(credential, wanted)
        if draft != before:
            write_private(path, draft.model_dump_json().encode())
        await admit(registrar, draft.registration)
        known = await registrar.identity()
    identity = Identity(known.host_id, known.install_id, Secret(credential), known.credential_version)
    save_identity(config.credential_path, identity)
    path.unlink(missing_ok=True)
    return Obtained(identity, known.name, new)


async def _ask(registrar: Registrar) -> Known | None:
    with contextlib.suppress(Refused):
        return await registrar.identity()
    return None


def _draft(credential: str, wanted: Registration) -> _Draft:
    digest = hashlib.sha256(credential.encode()).hexdigest()
    return _Draft(credential=credential, registration=wanted.model_copy(update={"credential_digest": digest}))


def _load(path: Path) -> _Draft | None:
    try:
        return _Draft.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Refused(
            Code.SETUP_FAILED, f"{path} cannot be read: {type(error).__name__}", hint="Remove it, and join with a new token."
        ) from None


def _chosen(registration: Registration) -> tuple[object, ...]:
    """What an operator has chosen of a registration; the rest is the machine's, and changes by itself."""
    return (
        registration.name,
        registration.region,
        sorted(registration.labels.items()),
        registration.overcommit,
        (registration.reserve.cpu_millis, registration.reserve.memory_mib) if registration.reserve is not None else None,
        registration.slots,
        registration.capacity.slots,
    )

"""Intake: what a command means for what is known already. Pure.

Theory of operation. A command is judged by (generation, desired revision), then by its digest: newer replaces, equal repeats, older is
stale, and one id with two contents is a fault of control that changes nothing. ENSURE_ABSENT is taken even for what the agent never
knew: "delete works from every state" includes the state of having been forgotten. A command that control has seen carried out, and that
is new here, comes after the agent's database was lost, or control's was taken back to a backup: its guest is taken over if the machine
has exactly it, and lost if not. Absence that was accepted is final.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from atoll.agent.record import Blueprint, Record, exited, seen
from atoll.base.errors import Code
from atoll.base.records import replace
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.wire.agent import Command


class Verdict(Enum):
    """What to do with a command."""

    NEW = auto()
    NEWER = auto()
    DUPLICATE = auto()
    """Known: tell control again what is seen."""
    STALE = auto()
    """Older than what is accepted: tell control again what is seen."""
    CONFLICT = auto()
    """Its id or placement is known with other content."""
    FOREIGN = auto()
    """Meant for another run of the agent: dropped without a word."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict and the record after it; None when the record stays as it is."""

    verdict: Verdict
    record: Record | None = None


def judge(known: Record | None, command: Command, *, epoch: str, boot_id: str, quarantine: bool, held: bool = False) -> Judged:
    """Judge one command.

    *Idempotency*: the same command again is DUPLICATE and changes nothing. `quarantine`: the host holds what it cannot explain, so
    nothing new may start here. `held`: what it holds is of exactly this placement, and this command explains it.
    """
    if command.epoch != epoch:
        return Judged(Verdict.FOREIGN)
    if known is None:
        return Judged(Verdict.NEW, _fresh(command, boot_id=boot_id, quarantine=quarantine, held=held))
    if known.sandbox_id != command.sandbox_id or command.generation > known.generation:
        return Judged(Verdict.CONFLICT, _conflict(known, command))
    if (command.generation, command.desired_revision) < (known.generation, known.desired_revision):
        return Judged(Verdict.STALE)
    if command.desired_revision == known.desired_revision:
        if command.digest != known.digest or command.id != known.command_id:
            return Judged(Verdict.CONFLICT, _conflict(known, command))
        return Judged(Verdict.DUPLICATE)
    return Judged(Verdict.NEWER, _newer(known, command, boot_id=boot_id))


def blueprint_of(command: Command) -> Blueprint | None:
    """The part of a command that is kept."""
    if command.spec is None or command.nonce is None or command.guest_public_key is None:
        return None
    return Blueprint(
        spec=command.spec,
        nonce=command.nonce,
        guest_public_key=command.guest_public_key,
        hostname=command.hostname or command.sandbox_id,
        ready_s=command.ready_s,
        timeout_s=command.timeout_s,
        payload_ref=command.payload_ref,
        save_mode=command.save_mode,
        strict=command.strict,
        moment=command.moment,
        claimed=command.claimed,
        begun=command.carried_out,
    )


def _fresh(command: Command, *, boot_id: str, quarantine: bool, held: bool) -> Record:
    record = Record(
        placement_id=command.placement_id,
        sandbox_id=command.sandbox_id,
        team_id=command.team_id,
        generation=command.generation,
        desired=command.kind,
        desired_revision=command.desired_revision,
        command_id=command.id,
        digest=command.digest,
        boot_id=boot_id,
        blueprint=blueprint_of(command),
    )
    if command.kind is Kind.ENSURE_ABSENT:
        return record
    if command.carried_out and not held:
        lost = exited(record, reason=Code.PLACEMENT_LOST, detail="the host's agent has lost its memory, and the host has nothing of it")
        assert lost is not None
        return lost
    if quarantine and not held:
        return _failed(record, Code.HOST_QUARANTINED, "this host holds things that it cannot explain; only removal is served")
    if record.blueprint is None:
        return _failed(record, Code.INVALID_REQUEST, "the command lacks spec, nonce or guest key")
    return record


def _newer(known: Record, command: Command, *, boot_id: str) -> Record:
    newer = replace(
        known,
        # Absence that was accepted is final: whatever control still wants of it was decided before, or by a store taken back to before.
        desired=Kind.ENSURE_ABSENT if known.desired is Kind.ENSURE_ABSENT else command.kind,
        desired_revision=command.desired_revision,
        command_id=command.id,
        digest=command.digest,
        # Another's from now on, where it was made ahead and is claimed.
        team_id=command.team_id,
        blueprint=blueprint_of(command) or known.blueprint,
        # A start that is ordered now is of this boot of the kernel, whichever boot the last one was of.
        boot_id=boot_id if known.observed in (Observed.STOPPED, Observed.SAVED) else known.boot_id,
    )
    if known.absent:
        # A tombstone stays one; what it was asked for last is carried out by being gone.
        return seen(
            newer,
            Observed.ABSENT,
            reason=known.reason,
            detail=known.detail,
            applied_revision=command.desired_revision if command.kind is Kind.ENSURE_ABSENT else known.applied_revision,
        )
    return newer


def _failed(record: Record, code: Code, detail: str) -> Record:
    return replace(record, observed=Observed.ERROR, reason=code, detail=detail, failed_revision=record.desired_revision)


def _conflict(known: Record, command: Command) -> Record | None:
    detail = f"{command.id} came with other content than was accepted"
    if known.reason == Code.COMMAND_CONFLICT and known.detail == detail:
        return None
    return seen(known, known.observed, reason=Code.COMMAND_CONFLICT, detail=detail)

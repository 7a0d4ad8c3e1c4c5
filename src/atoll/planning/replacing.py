"""Replacement: when a new generation may take the place of one that is lost, and what it takes along.

Theory of operation. Before a guest has answered, and while nothing of its bootstrap was exposed (no byte of an environment has left for its
host, `store/payloads.py`), a new generation begins by itself as soon as the old one is seen gone. After that, nobody but the outside world knows what the old guest may still do: it holds what it was given. So
a sandbox whose class says `on_loss: replace` waits with REPLACEMENT_BLOCKED, until an operator has fenced the host or the client has
certified that the old guest's authority was revoked. The certificate is the client's word about the outside; it is none about the host: what
the old placement holds stays held until it is seen gone or fenced (`Sandbox.unseen` counts such placements).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from atoll.base.errors import Code
from atoll.base.records import replace
from atoll.domain import sandbox as sb
from atoll.domain.command import Kind
from atoll.domain.placement import Holding, Observed, Placement
from atoll.domain.sandbox import Condition, Event, Sandbox, State
from atoll.domain.spec import OnLoss

PAUSE_S: Final = 0.25
"""Before the next generation is placed: what has just failed would fail at once again."""
SETTLED: Final = frozenset({State.READY, State.PAUSING, State.PAUSED, State.SUSPENDING, State.STOPPING, State.STOPPED, State.RESUMING})
"""Its guest has been ready, and its placement holds something."""

LATE: Final[Mapping[Observed, Code]] = {
    Observed.UNKNOWN: Code.START_TIMEOUT,
    Observed.ACCEPTED: Code.START_TIMEOUT,
    Observed.PREPARING: Code.IMAGE_TIMEOUT,
    Observed.PREPARED: Code.START_TIMEOUT,
}
"""Why it is late, by what was seen last."""
NEVER_READY: Final = "the start command is not ready yet: {}"


def may_replace(sandbox: Sandbox) -> bool:
    """Automatic replacement: only while the guest never reported ready, no bootstrap payload was exposed, and attempts are left."""
    return sandbox.started_at is None and not sandbox.bootstrap_exposed and sandbox.attempts < sandbox.spec.attempts_max


def needs_word(sandbox: Sandbox) -> bool:
    """Whether a start that fails is to be followed by another one, but only once somebody has said so: its guest may have been given power."""
    return sandbox.state is State.PROVISIONING and sandbox.bootstrap_exposed and sandbox.spec.on_loss is OnLoss.REPLACE


def begins_anew(sandbox: Sandbox, reason: str) -> bool:
    """Whether a start that fails for this reason is followed by another one, at once or after somebody's word.

    A start command that fails where none of its sandbox's guests was ever ready is its template's fault, and no host's: another attempt
    takes as long again, and fails. What was ready once, and was lost, is begun again as often as its class says.
    """
    never_ready = sandbox.attempts >= sandbox.generation
    if reason == Code.START_COMMAND_FAILED and never_ready:
        return False
    return may_replace(sandbox) or needs_word(sandbox)


def why_late(placement: Placement | None) -> tuple[str, str | None]:
    """Why a start takes too long, by code and for people: what its start command says, where its guest has answered."""
    if placement is None:
        return str(Code.GUEST_BOOT_TIMEOUT), None
    if waits_for_command(placement):
        return str(Code.START_COMMAND_FAILED), NEVER_READY.format(placement.detail)
    return str(LATE.get(placement.observed, Code.GUEST_BOOT_TIMEOUT)), None


def waits_for_command(placement: Placement) -> bool:
    """Whether its guest has answered, and its start command is what it is not ready for."""
    return placement.observed is Observed.RUNNING and not placement.ready and placement.reason == Code.START_COMMAND_FAILED


def wanted(sandbox: Sandbox, placement: Placement | None) -> bool:
    """Whether a new generation is to take this one's place, once it may."""
    if sandbox.state is State.PENDING:
        return Condition.REPLACEMENT_BLOCKED in sandbox.conditions
    if sandbox.state is State.PROVISIONING:
        return placement is not None and placement.desired is Kind.ENSURE_ABSENT
    return sandbox.state in SETTLED and sandbox.spec.on_loss is OnLoss.REPLACE


def with_block(sandbox: Sandbox, placement: Placement | None) -> Sandbox:
    """With REPLACEMENT_BLOCKED exactly where one is wanted and its host is not heard of; a sandbox without a placement is left as it is."""
    if placement is None or placement.holding is Holding.NONE:
        return sandbox
    blocked = Condition.UNREACHABLE in sandbox.conditions and wanted(sandbox, placement)
    conditions = sandbox.conditions - {Condition.REPLACEMENT_BLOCKED} | ({Condition.REPLACEMENT_BLOCKED} if blocked else frozenset())
    return sandbox if conditions == sandbox.conditions else replace(sandbox, conditions=conditions)


def next_generation(sandbox: Sandbox, *, now: float, detail: str | None) -> Sandbox:
    """The sandbox without a placement, to be placed again: after a moment where a start has failed, at once where it was lost.

    One that had been ready begins from nothing: its attempts, its start and its end count anew.
    """
    fresh = sandbox.started_at is not None or sandbox.bootstrap_exposed
    return replace(
        sandbox,
        state=sb.step(sandbox.state, Event.REPLACED),
        generation=sandbox.generation + 1,
        placement_id=None,
        host_id=None,
        tried_hosts=(),
        waiting_since=now,
        deadline_at=now if fresh else now + PAUSE_S,
        attempts=0 if fresh else sandbox.attempts,
        started_at=None,
        bootstrap_exposed=False,
        conditions=sandbox.conditions - {Condition.UNREACHABLE, Condition.REPLACEMENT_BLOCKED, Condition.DEADLINE_MISSED},
        detail=detail,
    )


def waiting_for_word(sandbox: Sandbox, *, now: float, detail: str | None) -> Sandbox:
    """As `next_generation`, but nothing is placed before somebody says so; its end comes all the same."""
    fresh = next_generation(sandbox, now=now, detail=detail)
    # One that was at rest has no end; what it had kept is lost, and nobody need wait for a word for ever.
    end_at = sandbox.end_at if sandbox.end_at is not None else now + sandbox.spec.timeout_s
    return replace(fresh, conditions=fresh.conditions | {Condition.REPLACEMENT_BLOCKED}, deadline_at=end_at)


def after_loss(sandbox: Sandbox, *, ended: str | None, fenced: bool, detail: str | None, now: float) -> Sandbox | None:
    """The next generation of a sandbox whose placement is gone, at once or after somebody's word; None: it ends."""
    exposed = needs_word(sandbox)
    if sandbox.state is State.PROVISIONING and not exposed:
        if not may_replace(sandbox) or ended in ("end_at", "lease"):
            return None
        return next_generation(sandbox, now=now, detail=detail)
    if exposed and ended != "end_at":
        return (next_generation if fenced else waiting_for_word)(sandbox, now=now, detail=detail)
    if sandbox.state not in SETTLED or sandbox.spec.on_loss is not OnLoss.REPLACE or ended in ("end_at", "exit"):
        return None
    return (next_generation if fenced else waiting_for_word)(sandbox, now=now, detail=detail)

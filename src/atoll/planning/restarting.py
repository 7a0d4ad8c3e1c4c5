"""Restarting: a guest that has ended by itself is begun again in its placement, where its spec says so (docs/adr/). Pure.

Its generation, what it holds, its end and its disk are as they were; only the desired revision is another, so that a late word of the
start before is none of this one. A start that fails is tried again a few times; each time that it was ready counts anew.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.base.errors import Code
from atoll.domain import sandbox as sb
from atoll.domain.command import Kind
from atoll.domain.placement import Placement
from atoll.domain.sandbox import Event, Sandbox, State
from atoll.domain.spec import OnExit


def is_for(sandbox: Sandbox) -> bool:
    """Whether a guest of this sandbox that has stopped, and that its agent keeps, is to be begun again."""
    return sandbox.spec.on_exit is OnExit.RESTART and sandbox.state in (State.READY, State.RESUMING)


def begins_again(sandbox: Sandbox, placement: Placement) -> bool:
    """Whether a guest that has stopped by itself is begun again in the same placement; its agent has kept what is left of it."""
    return (
        is_for(sandbox)
        and placement.desired is Kind.ENSURE_RUNNING
        and (sandbox.state is State.READY or sandbox.attempts < sandbox.spec.attempts_max)
    )


def ordered_again(sandbox: Sandbox, placement: Placement, *, now: float) -> tuple[Sandbox, Placement]:
    """Both once the next start is ordered."""
    reason = str(placement.reason or Code.GUEST_EXITED)
    again = replace(placement, desired_revision=placement.desired_revision + 1, desired_reason=reason)
    after = replace(
        sandbox,
        state=sb.step(sandbox.state, Event.GUEST_STOPPED),
        attempts=1 if sandbox.state is State.READY else sandbox.attempts + 1,
        deadline_at=now + sandbox.spec.image_s + sandbox.spec.ready_s,
        detail=placement.detail,
    )
    return after, again

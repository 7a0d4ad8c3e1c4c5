"""Claiming: which create may take over which guest that was made ahead, and what that makes of both. Pure.

Theory of operation. A guest that was made ahead differs from one that is begun for a create in nothing that was fixed when it began: image,
size, isolation, start command, and what its slot lets out. These make its *pool*; a create whose spec gives the same pool may have it. All
else (team, owner, end, environment, tokens, metadata) reaches a guest by init or is control's own, and is the create's. A claim is one
commit: the row is the create's from then on, its placement is wanted anew by the next desired revision, and it is ready only when the guest has
answered to that. What goes wrong before then is what goes wrong with any start: the guest is ordered away, and the next generation begins
from nothing, under the same id, so that whoever waits for the create need not know. What was once claimed is in no pool any more.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict
from typing import Final

from atoll.base.records import replace
from atoll.domain import command as cmd
from atoll.domain import history as ev
from atoll.domain import sandbox as sb
from atoll.domain.command import Kind, Wish
from atoll.domain.host import Health, Host, health
from atoll.domain.placement import Holding
from atoll.domain.sandbox import Event, State
from atoll.domain.spec import OnExit, Spec
from atoll.planning import placing
from atoll.planning.stimuli import Claimed, Facts, Note, Outcome

CLAIMED: Final = "claimed"
"""Why a placement is wanted running whose guest has to be initialised anew, for somebody else."""
NEAR_END_S: Final = 120.0
"""What ends sooner than this by itself is nobody's any more: its host might end it under the claim."""
CLAIMS: Final = "claims"
"""Of a host's facts: its agent knows how to hand a guest over."""
_FIXED: Final = (
    "class_name", "template_id", "image", "manifest", "isolation", "arch", "cpu_millis", "memory_mib", "disk_mib", "pids_max",
    "command", "command_user", "ready_command", "start_s",
)  # fmt: skip
"""Of a spec: what a guest cannot change once it has begun."""
_FIXED_OF_NETWORK: Final = ("internet", "allow_out", "deny_out")


@functools.lru_cache(maxsize=256)
def pool_of(spec: Spec) -> str | None:
    """The pool of guests that are as this spec wants them; None: what it wants cannot be made ahead."""
    # A head start is one way among others to begin the same guest.
    moment = spec.origin is not None and not spec.origin.or_boot
    if moment or spec.tmp_on_disk or spec.on_exit is not OnExit.RELEASE:
        return None
    content = {name: getattr(spec, name) for name in _FIXED}
    content |= {name: value for name, value in asdict(spec.network).items() if name in _FIXED_OF_NETWORK}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def may_claim(spec: Spec, *, own_env: bool) -> str | None:
    """The pool that a create may take a guest from; None: it begins from nothing.

    `own_env`: it brings values of its own. A start command that ran ahead has not seen them.
    """
    return None if own_env and (spec.command or spec.ready_command) else pool_of(spec)


def suits(host: Host | None, spec: Spec, *, now: float) -> bool:
    """Whether a create of this spec may take what is on this host. Room is no question: the guest has it."""
    if host is None or health(host, now=now) is not Health.HEALTHY or CLAIMS not in host.facts:
        return False
    if spec.require_host is not None and spec.require_host not in (host.id, host.name):
        return False
    return not any(True for _ in placing.lasting(host, spec))


def claimed(facts: Facts, stimulus: Claimed, now: float) -> Outcome | None:
    """It is the create's. None where it is not claimable (any more), or is about to end."""
    sandbox, placement, wanted = facts.sandbox, facts.placement, stimulus.wanted
    if sandbox.claimable is None or sandbox.claimable != pool_of(wanted.spec) or sandbox.state is not State.READY:
        return None
    if placement is None or placement.holding is not Holding.ACTIVE or not placement.ready:
        return None
    if placement.desired is not Kind.ENSURE_RUNNING or placement.applied_revision < placement.desired_revision:
        return None
    if sandbox.conditions or (sandbox.end_at is not None and sandbox.end_at < now + NEAR_END_S):
        return None
    spec = wanted.spec
    after = replace(
        wanted,
        id=sandbox.id,
        revision=sandbox.revision,
        state=sb.step(sandbox.state, Event.CLAIMED),
        generation=sandbox.generation,
        host_id=sandbox.host_id,
        placement_id=sandbox.placement_id,
        payload_digest=stimulus.payload_digest,
        deadline_at=now + spec.reserve_s,
        end_at=now + spec.reserve_s + spec.timeout_s,
        end_revision=sandbox.end_revision + 1,
        attempts=0,
        claimable=None,
        unseen=sandbox.unseen,
    )
    again = replace(
        placement,
        desired=cmd.step(placement.desired, Wish.CLAIM),
        desired_revision=placement.desired_revision + 1,
        desired_reason=CLAIMED,
        ready=False,
    )
    note = Note(ev.SANDBOX_CLAIMED, {"host_id": placement.host_id, "placement_id": placement.id, "template": spec.image_name})
    return Outcome(after, again, (note,))

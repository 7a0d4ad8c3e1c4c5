"""Restoring: what control makes of a host's account of a placement, after its store was taken back to a backup. Pure.

Theory of operation. Two questions. Of a placement that is on record: what has the agent accepted or enforced since the backup, so that the
next word of control is newer than all of that? Of one that is not: which record was it, and does it fit what is on record otherwise?
Nothing is ended here. What does not fit is left to the agent to keep and report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from atoll.base.errors import Code
from atoll.base.ids import ClientId, HostId, PlacementId, SandboxId, TeamId
from atoll.base.records import replace
from atoll.domain import history as ev
from atoll.domain import sandbox as sb
from atoll.domain.account import Account
from atoll.domain.command import Kind
from atoll.domain.moment import Moment
from atoll.domain.placement import Holding, Observed, Placement
from atoll.domain.sandbox import TERMINAL, Condition, Event, Sandbox, State
from atoll.domain.spec import SaveMode
from atoll.domain.warmth import OWN_TEAM
from atoll.planning import storing
from atoll.planning.claiming import CLAIMED, pool_of
from atoll.planning.stimuli import Facts, Note, Outcome


def caught_up(facts: Facts, account: Account, *, now: float) -> Outcome | None:
    """The known placement once control's next word about it is newer than what the agent has; None when it is.

    Of the end on record and the one that the agent enforces the newer counts, by revision. Where the agent has none, the one on record may
    have been long ago: it gets its whole timeout again, rather than end because of a restore.
    """
    sandbox, placement = facts.sandbox, facts.placement
    older = next((one for one in facts.older if one.id == account.placement_id), None)
    if older is not None:
        ahead = account.desired_revision >= older.desired_revision
        return Outcome(sandbox, placement, (), (replace(older, desired_revision=account.desired_revision + 1),)) if ahead else None
    if placement is None or placement.id != account.placement_id or placement.holding is Holding.NONE:
        # Gone on record: its agent is told so with its next poll.
        return None
    since = sandbox.claimable is not None and account.team_id != sandbox.team_id
    if since:
        # It is that team's, and is never made ahead for anybody else.
        sandbox = _claimed_since(sandbox, account, now)
    carried_out = placement.desired_reason != CLAIMED or placement.applied_revision >= placement.desired_revision
    accepted = account.desired_revision >= placement.desired_revision
    handed_over = (account.ready and accepted) or (carried_out and not since)
    if accepted:
        # One that has been handed over is not handed over anew: that would undo what is somebody's by now.
        reason = None if placement.desired_reason == CLAIMED and handed_over else placement.desired_reason
        placement = replace(placement, desired_revision=account.desired_revision + 1, desired_reason=reason)
    if sandbox.state not in (State.RELEASING, *TERMINAL) and sandbox.end_at is not None:
        sandbox = replace(
            sandbox,
            end_at=now + _left_s(sandbox, account, handed_over=handed_over, now=now),
            end_revision=max(sandbox.end_revision, account.end_revision) + 1,
        )
    if sandbox.state is State.SUSPENDED and (now_stored := _stored(account)) != sandbox.moment:
        # What is on record is what the store had of an earlier save, or did not have yet.
        sandbox = replace(sandbox, moment=now_stored, deadline_at=now + sandbox.spec.local_s if now_stored is not None else None)
    sandbox = _is_there(sandbox)
    if sandbox.state is State.PAUSED and account.observed is Observed.SAVED:
        return _saved_since(sandbox, placement, account, now)
    if placement is facts.placement and sandbox is facts.sandbox:
        return None
    return Outcome(sandbox, placement, ())


def _left_s(sandbox: Sandbox, account: Account, *, handed_over: bool, now: float) -> float:
    """How long it lives from now on. Of one that is being handed over its agent knows the end of what was nobody's. *Units*: seconds."""
    if account.remaining_s is None:
        return float(sandbox.spec.timeout_s)
    if sandbox.end_at is not None and sandbox.end_at > now and (account.end_revision < sandbox.end_revision or not handed_over):
        return sandbox.end_at - now
    return account.remaining_s if handed_over else float(sandbox.spec.timeout_s)


def _is_there(sandbox: Sandbox) -> Sandbox:
    """Its host has it: what was marked for the case that it has not is the past."""
    if sandbox.state in _MAY_REST_ALONE or sandbox.moment is None:
        return sandbox
    return replace(sandbox, moment=None, conditions=sandbox.conditions - {Condition.HOSTS_UNSETTLED})


def _claimed_since(sandbox: Sandbox, account: Account, now: float) -> Sandbox:
    """What it was claimed with is on no record: as of one that was made since the backup."""
    return replace(
        sandbox,
        team_id=TeamId(account.team_id),
        client_id=ClientId(""),
        spec=account.spec or sandbox.spec,
        claimable=None,
        created_at=now,
        started_at=now,
        end_at=now + (account.spec or sandbox.spec).timeout_s,
        bootstrap_exposed=True,
    )


def _stored(account: Account) -> Moment | None:
    """What the store has of what its host has saved; None where that is newer, or nothing is saved any more."""
    return account.moment if account.observed is Observed.SAVED else None


def _has_left(account: Account) -> bool:
    """Whether its host was giving up a copy of what the store has: its sandbox rests there, and was not released."""
    return account.desired is Kind.ENSURE_ABSENT and _stored(account) is not None


_MAY_REST_ALONE: Final = frozenset({State.SUSPENDED, State.RESUMING})
"""Of these the record says by itself what of them is in the store; of others it names a moment only if it was marked."""


@dataclass(frozen=True, slots=True)
class Left:
    """What the artifact store says of a sandbox that a host has brought there: its newest save then, of this placement and generation."""

    sandbox_id: str
    placement_id: str
    generation: int
    save_mode: SaveMode
    moment: Moment


def marked(facts: Facts, left: Left) -> Outcome | None:
    """The records of a sandbox for the case that its host has it no more, before any host was heard; None: the note says nothing of it.

    A generation begins when the last one was seen gone: of a newer one than is on record the note alone is left, or its host's account. A
    placement that is on record may have been gone on from where it was: it rests in the store only if its host does not have it.
    """
    sandbox, placement = facts.sandbox, facts.placement
    if (sandbox.state, Event.FOUND) not in sb.MOVES or left.generation < sandbox.generation:
        return None
    if left.generation > sandbox.generation:
        after = _rests(
            replace(sandbox, generation=left.generation, unseen=sandbox.unseen + (placement is not None)), left.moment, left.save_mode
        )
        older = (
            ()
            if placement is None or placement.holding is Holding.NONE
            else (storing.ordered_away(placement, str(Code.RELEASE_REQUESTED)),)
        )
        where = {"host_id": placement.host_id if placement is not None else None, "placement_id": left.placement_id}
        return Outcome(after, None, (Note(ev.SANDBOX_RESTORED, where),), older)
    if placement is not None and placement.id != left.placement_id:
        return None
    if placement is None and not sandbox.rests_in_store:
        return None
    return Outcome(
        replace(
            sandbox,
            moment=left.moment,
            save_mode=left.save_mode,
            conditions=sandbox.conditions | {Condition.HOSTS_UNSETTLED},
        ),
        placement,
        (),
    )


def rested_since(sandbox: Sandbox, placement: Placement, *, by_itself: str | None) -> Sandbox | None:
    """One whose host does not have it any more, and that rests in the store since the backup; None: that is not so.

    `by_itself`: as for `storing.gone`. What has ended by itself has run since it was saved.
    """
    if sandbox.state in _MAY_REST_ALONE or sandbox.moment is None:
        return None
    if by_itself not in (None, "command"):
        return None
    return replace(_rests(sandbox, sandbox.moment, sandbox.save_mode), saved_on=placement.host_id)


def _rests(sandbox: Sandbox, moment: Moment, mode: SaveMode | None) -> Sandbox:
    """It rests in the store alone, and no host is known to have it."""
    return replace(
        sandbox,
        state=sb.step(sandbox.state, Event.FOUND),
        rested=None,
        placement_id=None,
        host_id=None,
        saved_on=sandbox.host_id,
        end_at=None,
        life_s=None,
        save_mode=mode,
        moment=moment,
        reason=None,
        detail=None,
        deadline_at=None,
        conditions=frozenset({Condition.HOSTS_UNSETTLED}),
    )


def _saved_since(sandbox: Sandbox, placement: Placement, account: Account, now: float) -> Outcome:
    """Paused on record, and its host has saved it since: to freeze it, it would have to be brought back, and there may be no room.

    Its host's next word makes it suspended.
    """
    mode = account.save_mode or SaveMode.FULL
    after = replace(sandbox, state=sb.step(sandbox.state, Event.SUSPEND), save_mode=mode, deadline_at=now + sandbox.spec.save_s)
    wanted = replace(
        placement,
        desired=Kind.ENSURE_SUSPENDED,
        desired_revision=max(placement.desired_revision, account.desired_revision + 1),
        desired_reason=str(mode),
    )
    return Outcome(after, wanted, (Note(ev.SANDBOX_SUSPENDING, {"mode": mode.value}),))


@dataclass(frozen=True, slots=True)
class Rest:
    """What a placement is that its host has at rest."""

    state: State
    holding: Holding
    desired: Kind


REST: Final[Mapping[Observed, Rest]] = {
    Observed.FROZEN: Rest(State.PAUSED, Holding.PAUSED, Kind.ENSURE_PAUSED),
    Observed.SAVED: Rest(State.SUSPENDED, Holding.SAVED, Kind.ENSURE_SUSPENDED),
    Observed.STOPPED: Rest(State.STOPPED, Holding.STOPPED, Kind.ENSURE_STOPPED),
}


@dataclass(frozen=True, slots=True)
class Found:
    """A placement that gets a record again. `instead`: the placement of an earlier generation, which was seen gone before this one began."""

    sandbox: Sandbox
    placement: Placement
    note: Note
    instead: Placement | None = None


def found(account: Account, known: Facts | None, *, host_id: str, restored_at: float, now: float) -> Found | None:
    """The records that an account of an unknown placement stands for; None when it does not fit, or cannot be told.

    `known`: what is on record of its sandbox. A record that the restore itself has ended, or that lost its placement to it, is taken up
    again; one that ended otherwise is not.
    """
    if account.spec is None or account.nonce is None or not _fits(account, known, restored_at=restored_at):
        return None
    placement = _placement(account, host_id=host_id, now=now)
    sandbox = _sandbox(account, known.sandbox if known else None, placement, now=now)
    note = Note(ev.SANDBOX_RESTORED, {"host_id": host_id, "placement_id": placement.id})
    return Found(sandbox, placement, note, instead=known.placement if known is not None else None)


def _fits(account: Account, known: Facts | None, *, restored_at: float) -> bool:
    if known is None:
        return True
    sandbox = known.sandbox
    if sandbox.team_id != account.team_id or account.generation < sandbox.generation:
        return False
    if sandbox.state in TERMINAL:
        by_restore = sandbox.reason == Code.STORE_RESTORED
        lost = sandbox.reason == Code.PLACEMENT_LOST and (sandbox.released_at or 0.0) >= restored_at
        return by_restore or (lost and account.generation > sandbox.generation)
    # A generation begins when the last one was seen gone: the newer one is the truth, whichever host says so first.
    return known.placement is None or account.generation > sandbox.generation


def _placement(account: Account, *, host_id: str, now: float) -> Placement:
    assert account.spec is not None
    assert account.nonce is not None
    going = account.desired is Kind.ENSURE_ABSENT
    rest = None if going else REST.get(account.observed)
    # Newer than what the agent has: a command of that very revision, made of what is on record now, would contradict the accepted one.
    revision = account.desired_revision + 1
    return Placement(
        id=PlacementId(account.placement_id),
        sandbox_id=SandboxId(account.sandbox_id),
        host_id=HostId(host_id),
        generation=account.generation,
        holding=rest.holding
        if rest
        else Holding.SAVED
        if _has_left(account)
        else Holding.CLEANUP_PENDING
        if going
        else Holding.ACTIVE
        if account.ready
        else Holding.RESERVED,
        vector=account.spec.vector(),
        nonce=account.nonce,
        desired=rest.desired if rest else account.desired,
        desired_revision=revision,
        desired_reason=str(Code.RELEASE_REQUESTED) if going else None,
        observed=account.observed if rest else Observed.RUNNING if account.ready and not going else Observed.UNKNOWN,
        applied_revision=revision if (account.ready or rest) and not going else 0,
        address=account.address,
        ready=account.ready and not going,
        created_at=now,
    )


def _sandbox(account: Account, known: Sandbox | None, placement: Placement, *, now: float) -> Sandbox:
    """A record anew, and no move of one that there is: of that it takes what only control ever knew."""
    assert account.spec is not None
    spec = known.spec if known else account.spec
    going = placement.desired is Kind.ENSURE_ABSENT
    rest = None if going else REST.get(placement.observed)
    left = _has_left(account)
    going_on = State.READY if placement.ready else State.PROVISIONING
    state = rest.state if rest else State.SUSPENDED if left else State.RELEASING if going else going_on
    deadlines = {State.RELEASING: now + spec.release_s, State.PROVISIONING: now + spec.image_s + spec.ready_s}
    left_s = account.remaining_s if account.remaining_s is not None else float(spec.timeout_s)
    made = Sandbox(
        id=placement.sandbox_id,
        revision=known.revision if known else 1,
        team_id=TeamId(account.team_id),
        client_id=known.client_id if known else ClientId(""),
        state=state,
        spec=spec,
        generation=account.generation,
        created_at=known.created_at if known else now,
        end_at=None if rest else now + left_s,
        end_revision=max(known.end_revision if known else 0, account.end_revision) + 1,
        alias=known.alias if known else spec.image_name,
        metadata=known.metadata if known else {},
        payload_digest=known.payload_digest if known else None,
        started_at=(known.started_at if known else None) or (now if placement.ready or rest else None),
        host_id=placement.host_id,
        placement_id=placement.id,
        unseen=known.unseen if known else 0,
        save_mode=account.save_mode if rest else None,
        moment=_stored(account) if rest else None,
        reason=str(Code.RELEASE_REQUESTED) if going else None,
        release_requested_at=now if going else None,
        deadline_at=now + spec.local_s if rest and _stored(account) is not None else deadlines.get(state),
        attempts=known.attempts if known else 1,
        # Who waited for it has had its answer: a start that fails is not tried on another host.
        bootstrap_exposed=True,
        secured=known.secured if known else True,
        claimable=pool_of(account.spec) if account.team_id == OWN_TEAM and not going else None,
    )
    return _in_store(made, account, now) if left else made


def _in_store(made: Sandbox, account: Account, now: float) -> Sandbox:
    """The same of one that rests in the artifact store alone: what its host still has is an earlier placement, which is ordered away."""
    return replace(
        made,
        placement_id=None,
        host_id=None,
        saved_on=made.host_id,
        unseen=made.unseen + 1,
        end_at=None,
        started_at=made.started_at or now,
        save_mode=account.save_mode,
        moment=_stored(account),
        reason=None,
        release_requested_at=None,
        deadline_at=None,
        conditions=frozenset({Condition.HOSTS_UNSETTLED}),
    )

"""Account: what a host's agent says of one placement, so that control can have a record of it again.

Theory of operation. Control's rows are the truth, except after they were lost: a store that is restored from a backup does not know what
was decided since. The agents do, each for its own host, because every command was made durable there before it was carried out. An
account is what an agent knows of a placement; it holds no secret, and what it lacks (metadata, payload, request id) is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.domain.command import Kind
from atoll.domain.moment import Moment
from atoll.domain.placement import Observed
from atoll.domain.spec import SaveMode, Spec


@dataclass(frozen=True, slots=True)
class Account:
    """One placement that its host still has. *Units*: seconds."""

    placement_id: str
    sandbox_id: str
    team_id: str
    generation: int
    desired: Kind
    desired_revision: int
    """The newest that the agent has accepted."""
    spec: Spec | None
    """None: it is only being removed."""
    nonce: str | None
    ready: bool = False
    """For whose it is: one that is being handed over to a create is not."""
    observed: Observed = Observed.UNKNOWN
    save_mode: SaveMode | None = None
    """Of what is saved."""
    moment: Moment | None = None
    """What is saved, where it is in the store."""
    address: str | None = None
    end_revision: int = 0
    remaining_s: float | None = None
    """Until the end that the agent enforces, from when it was asked; None: it knows of none."""

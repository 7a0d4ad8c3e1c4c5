"""Warmth: how many guests of which kind are made ahead, and whose they are until somebody claims them.

Theory of operation. A warm guest is an ordinary sandbox of the deployment's own team, marked claimable (`Sandbox.claimable`). That team has
no key and never gets one, so no client can see, reach or end what is of it. A policy says how many ready guests there should be of one
template in one size; the keeper (`control/loops/warming.py`) makes what is missing. What is claimed belongs to its create like any other
sandbox, and never comes back here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from atoll.base.ids import BODY_LENGTH, ClientId, Prefix, TeamId, TemplateId

OWN_TEAM: Final = TeamId(Prefix.TEAM + "0" * BODY_LENGTH)
"""The deployment's own. No dice give this id: they would have to show one character twenty times."""
OWN_TEAM_NAME: Final = "the deployment"
"""With a space, which no team that is made by a client can have."""
OWN_CLIENT: Final = ClientId(Prefix.CLIENT + "0" * BODY_LENGTH)

COUNT_MAX: Final = 1000
"""Of one policy."""


@dataclass(frozen=True, slots=True)
class WarmPolicy:
    """How many guests of one template and size are kept ready. *Units*: millicores, MiB, wall seconds."""

    template_id: TemplateId
    class_name: str
    cpu_millis: int
    memory_mib: int
    disk_mib: int
    count: int
    revision: int = 1
    updated_at: float = 0.0
    short_since: float | None = None
    """Since when there are fewer than that; None: there are as many."""
    problem: str | None = None
    """Why, where that is known."""

    @property
    def kind(self) -> tuple[str, str, int, int, int]:
        """What there is one policy for."""
        return self.template_id, self.class_name, self.cpu_millis, self.memory_mib, self.disk_mib

"""History: what fate has done to a world, and what its guests were, as far as it explains what comes after."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from atoll.testing.sim.places import Host


@dataclass(slots=True)
class History:
    """What fate has done that explains ends."""

    ended: set[str] = field(default_factory=set)
    """Placements whose guest has ended by itself."""
    lost_disk: set[str] = field(default_factory=set)
    """Names of hosts."""
    fenced: set[str] = field(default_factory=set)
    """Ids of hosts."""
    secrets: set[str] = field(default_factory=set)
    was_ready: set[str] = field(default_factory=set)
    """Placements whose guest was believed ready once."""
    spoilt: bool = False
    """Something in the artifact store was."""
    lived: Counter[str] = field(default_factory=Counter)
    """How often a guest of each sandbox has begun to serve: what the newest remembers."""
    known: dict[str, int] = field(default_factory=dict)
    """The same of the newest that was believed ready: nothing older may come back."""
    taken_back: bool = False
    """The store was taken back to a backup."""
    given: dict[str, str] = field(default_factory=dict)
    """What each guest was given that somebody has brought, by its placement: it is never another's after that."""
    there: dict[str, tuple[Host, str]] = field(default_factory=dict)
    """Sandboxes that were promised and ran when that happened: where, and as which placement."""

    def remember(self, sandbox_id: str) -> str:
        """What a guest of it remembers from now on."""
        self.lived[sandbox_id] += 1
        return f"{sandbox_id} {self.lived[sandbox_id]}"

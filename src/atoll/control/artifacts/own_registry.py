"""The deployment's own registry, as control knows it: it signs the tokens, and gives one to its own pulls of a team's images.

A team that asks control to import one of its images, or to build on one, has shown its key already; it need not be asked for it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.base.clock import Clock
from atoll.base.ids import Dice
from atoll.wire import registry

PULL_S: Final = 3600
"""A pull goes on with one token to its end, and may take half an hour."""
_SUBJECT: Final = "control"


@dataclass(frozen=True, slots=True)
class OwnRegistry:
    """`addresses`: under which this machine reaches it, as `HOST:PORT`."""

    addresses: Sequence[str]
    key: Ed25519PrivateKey
    clock: Clock
    dice: Dice
    public: Callable[[], Collection[str]] = tuple
    """The repositories that anybody may pull, as the operator says just now."""

    def token(
        self, subject: str, access: Sequence[registry.Access], *, lasts_s: int = registry.TOKEN_S, store: registry.Store | None = None
    ) -> tuple[str, int]:
        """A signed token, and when it was made (wall seconds)."""
        now = int(self.clock.now())
        content = registry.claims(subject, access, now=now, token_id=self.dice(16).hex(), lasts_s=lasts_s, store=store)
        return jwt.encode(content, self.key, algorithm="EdDSA", headers={"kid": registry.key_id(self.key)}), now

    def pushed(self, template_id: str, build_id: str) -> str:
        """Where E2B's older command line pushes the image of a build."""
        return f"{self.addresses[0]}/{registry.repository_of(template_id)}:{build_id}"

    def template_of(self, reference: str) -> str | None:
        """The template whose image under E2B's name `reference` is; None: it is none of those, or not here."""
        address, _, rest = reference.partition("/")
        return registry.template_of(_name(rest)) if address in self.addresses else None

    def login(self, team: str, reference: str, *, templates: Collection[str] = ()) -> Mapping[str, str]:
        """What a pull of `HOST:PORT/TEAM/NAME[:TAG][@DIGEST]` for a team is given: nothing, unless it is here, and the team's or public.

        `templates`: those of the team whose images under E2B's names it may pull.
        """
        address, _, rest = reference.partition("/")
        if address not in self.addresses:
            return {}
        access = registry.granted(team, [f"repository:{_name(rest)}:pull"], public=self.public(), templates=templates)
        return {"token": self.token(_SUBJECT, access, lasts_s=PULL_S)[0]} if access else {}


def _name(rest: str) -> str:
    return rest.partition("@")[0].partition(":")[0]

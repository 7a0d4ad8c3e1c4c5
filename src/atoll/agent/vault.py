"""Vault: guest tokens and init payloads, in memory only.

Theory of operation. A command brings its token with it, and its payload where that gives no power outside; they wait here until the guest is
initialised, and are gone after that. What is not here is asked for (POST /payloads), a payload only when its guest has proved itself, until
it comes or the guest's time is over. Control gives a payload to one run: another one is refused, and that ends the start, unless it is of a
claimed guest that has said itself that the payload is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from atoll.agent.backoff import Backoff
from atoll.base.errors import AtollError, Code, Refused
from atoll.base.ids import Dice
from atoll.base.secret import Secret
from atoll.wire.agent import InitPayload, Payloads

Fetch = Callable[[list[str], list[str], list[str]], Awaitable[Payloads]]
"""`await fetch(refs, placement_ids, missing)`."""


@dataclass(slots=True)
class _Entry:
    token: Secret | None = None
    payload: InitPayload | None = field(default=None, repr=False)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Vault:
    """Secrets of the placements that are being started."""

    def __init__(self, fetch: Fetch, dice: Dice) -> None:
        self._fetch = fetch
        self._dice = dice
        self._entries: dict[str, _Entry] = {}

    def put(self, placement_id: str, *, token: str | None, payload: InitPayload | None) -> None:
        """Keep what a command brought."""
        entry = self._entries.setdefault(placement_id, _Entry())
        if token is not None:
            entry.token = Secret(token)
        if payload is not None:
            entry.payload = payload
        entry.changed.set()

    def settle(self, placement_id: str) -> None:
        """Its guest is initialised and may have to be spoken to while control is away: only the token stays."""
        if (entry := self._entries.get(placement_id)) is not None:
            entry.payload = None

    def at_hand(self, placement_id: str) -> Secret | None:
        """The guest token, if it is here."""
        entry = self._entries.get(placement_id)
        return entry.token if entry is not None else None

    def drop(self, placement_id: str) -> None:
        """Forget them: the guest is initialised, or will never be."""
        self._entries.pop(placement_id, None)

    async def token(self, placement_id: str) -> Secret:
        """The guest token; waits until there is one. The caller sets the limit."""
        entry = self._entries.setdefault(placement_id, _Entry())
        backoff = Backoff(self._dice, first_s=0.05, most_s=2.0)
        while entry.token is None:
            await self._ask(placement_id, None, entry, backoff)
        return entry.token

    async def payload(self, placement_id: str, ref: str | None, *, missing: bool = False) -> InitPayload:
        """The init payload; waits until there is one. Without a reference it is empty. `missing`: its guest has said that it lacks it.

        *Errors*: Refused BOOTSTRAP_DELIVERED.
        """
        if ref is None:
            return InitPayload()
        entry = self._entries.setdefault(placement_id, _Entry())
        backoff = Backoff(self._dice, first_s=0.05, most_s=2.0)
        while entry.payload is None:
            await self._ask(placement_id, ref, entry, backoff, missing=missing)
        return entry.payload

    async def _ask(self, placement_id: str, ref: str | None, entry: _Entry, backoff: Backoff, *, missing: bool = False) -> None:
        entry.changed.clear()
        try:
            answer = await self._fetch([ref] if ref else [], [placement_id], [placement_id] if missing else [])
        except AtollError:
            answer = Payloads()
        if ref is not None and ref in answer.refused:
            raise Refused(Code.BOOTSTRAP_DELIVERED, "its payload was given to an earlier run, and its guest does not have it")
        self.put(placement_id, token=answer.guest_tokens.get(placement_id), payload=answer.payloads.get(ref) if ref else None)
        if (ref and entry.payload is None) or (not ref and entry.token is None):
            entry.changed.clear()
            try:
                async with asyncio.timeout(backoff.next_s()):
                    await entry.changed.wait()
            except TimeoutError:
                pass

"""Hints: which rows a commit has changed, told to the other processes that use the same store.

Theory of operation. A store function notes what it changes (`sandbox`, `host`) on its connection; a store that several processes share
tells the others once that is durable, many commits in one message. A hint is never the only way by which anybody learns of anything:
whoever hears one reads the store again, one that is lost costs a wait that has an end of its own, and after any gap (a connection that
broke, more changes than a message holds) `EVERYTHING` is told, which is always true. Subscribe, then read: what is committed after the
subscription is told, what was committed before is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

import sqlalchemy as sa

_KEY: Final = "atoll.hints"
MESSAGE_BYTES_MAX: Final = 2000
"""Of one message: about ninety ids. PostgreSQL's own limit is 8000."""
_EVERYTHING: Final = "*"
_SANDBOX: Final = "s"
_HOST: Final = "h"
_CLIENT: Final = "c"
_END: Final = "e"


@dataclass(frozen=True, slots=True)
class Hints:
    """What may be another than it was. `ends`: `<placement>:<revision>` of ends that agents have begun to enforce, which no row says."""

    everything: bool = False
    sandboxes: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    clients: frozenset[str] = frozenset()
    ends: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return self.everything or bool(self.sandboxes or self.hosts or self.clients or self.ends)

    def __len__(self) -> int:
        return len(self.sandboxes) + len(self.hosts) + len(self.clients) + len(self.ends)

    def __or__(self, other: Hints) -> Hints:
        if self.everything or other.everything:
            return EVERYTHING
        return Hints(
            False,
            self.sandboxes | other.sandboxes,
            self.hosts | other.hosts,
            self.clients | other.clients,
            self.ends | other.ends,
        )


NOTHING: Final = Hints()
EVERYTHING: Final = Hints(everything=True)

Told = Callable[[Hints], None]


@runtime_checkable
class Shared(Protocol):
    """A store that other processes use, too. One that is not has nobody to tell."""

    async def follow(self, told: Told) -> None:
        """Call `told` with what others have committed, until cancelled; with EVERYTHING each time that following has begun (anew)."""
        ...

    def tell(self, hints: Hints) -> None:
        """Tell the others of something that is no commit."""
        ...


@dataclass(slots=True)
class Collected:
    """What the functions of one transaction have noted."""

    sandboxes: set[str] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    clients: set[str] = field(default_factory=set)

    def hints(self) -> Hints:
        """All of it."""
        return Hints(False, frozenset(self.sandboxes), frozenset(self.hosts), frozenset(self.clients))


def collect(conn: sa.Connection, into: Collected | None = None) -> Collected:
    """Begin to note what is changed on this connection; for stores that are shared. `into`: go on with what was begun before."""
    collected = Collected() if into is None else into
    conn.info[_KEY] = collected
    return collected


def sandbox(conn: sa.Connection, sandbox_id: str) -> None:
    """This sandbox's row, or its placement's, is changed by this transaction."""
    collected: Collected | None = conn.info.get(_KEY)
    if collected is not None:
        collected.sandboxes.add(sandbox_id)


def host(conn: sa.Connection, host_id: str) -> None:
    """This host's row is changed by this transaction."""
    collected: Collected | None = conn.info.get(_KEY)
    if collected is not None:
        collected.hosts.add(host_id)


def client(conn: sa.Connection, client_id: str) -> None:
    """This client's key is revoked by this transaction."""
    collected: Collected | None = conn.info.get(_KEY)
    if collected is not None:
        collected.clients.add(client_id)


def write(sender: str, hints: Hints) -> str:
    """A message of at most MESSAGE_BYTES_MAX: who tells, then each id behind the letter of its kind; one that would be longer says EVERYTHING."""
    if hints.everything:
        return f"{sender} {_EVERYTHING}"
    kinds = ((_SANDBOX, hints.sandboxes), (_HOST, hints.hosts), (_CLIENT, hints.clients), (_END, hints.ends))
    text = " ".join([sender, *(letter + name for letter, names in kinds for name in sorted(names))])
    return text if len(text.encode()) <= MESSAGE_BYTES_MAX else f"{sender} {_EVERYTHING}"


def read(message: str) -> tuple[str, Hints]:
    """Who tells, and what. A word of a later release that is not known here means EVERYTHING."""
    sender, *words = message.split(" ")
    if any(not word or word[0] not in (_SANDBOX, _HOST, _CLIENT, _END) for word in words):
        return sender, EVERYTHING
    return sender, Hints(False, _of(_SANDBOX, words), _of(_HOST, words), _of(_CLIENT, words), _of(_END, words))


def _of(letter: str, words: Iterable[str]) -> frozenset[str]:
    return frozenset(word[1:] for word in words if word[0] == letter)

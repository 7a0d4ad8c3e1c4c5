"""Commits that are told whatever becomes of whoever asked for them.

Theory of operation. A caller may be cancelled while its commit is under way: a client hangs up, a time is over. The store finishes what it was
given, so the word of it (to waiting requests, parked polls, edges, the directory, to what is remembered of keys and leases) must not be lost
either: nobody would look again for seconds, and some of what is remembered would be wrong for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from atoll.base.errors import OutcomeUnknown
from atoll.store.engine import Store, Work

T = TypeVar("T")


async def told(store: Store, work: Work[T], tell: Callable[[T], object], *, doubt: Callable[[], object] = lambda: None) -> T:
    """Commit `work`, and `tell` of it, also when the caller is cancelled meanwhile. *Errors*: those of the store and of `work`.

    `doubt`: called when nobody knows whether it was committed; the caller is told OutcomeUnknown then.
    """
    return await finish(_told(store, work, tell, doubt))


async def _told(store: Store, work: Work[T], tell: Callable[[T], object], doubt: Callable[[], object]) -> T:
    try:
        result = await store.write(work)
    except OutcomeUnknown:
        doubt()
        raise
    tell(result)
    return result


async def finish(committing: Coroutine[Any, Any, T]) -> T:
    """Run it to its end, also when the caller is cancelled meanwhile; the caller ends at once. *Errors*: its own.

    The store holds on to what it has been given, and with it to whoever waits for that: nothing else has to.
    """
    task = asyncio.ensure_future(committing)
    task.add_done_callback(_noticed)
    return await asyncio.shield(task)


def _noticed(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        # Whoever waited may have gone, and an error that nobody takes would be reported as one of this program's.
        task.exception()

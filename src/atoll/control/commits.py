"""What is to be done to its end whatever becomes of whoever asked for it.

Theory of operation. A caller may be cancelled while its commit is under way: a client hangs up, a time is over. The store finishes what it was
given, and calls `tell` (`Store.write`), so that the word of it reaches waiting requests, parked polls, edges and the directory: nobody would
look again for seconds, and some of what is remembered would be wrong for good. What is more than one commit is finished here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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

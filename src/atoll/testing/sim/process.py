"""A process of the simulation: its tasks can end, or stand still, between any two awaits.

Theory of operation. Every task that a process begins, and every task that such a task begins, carries the process in its context; the
loop's task factory puts each of them behind a gate that counts its steps, a step being what runs from one await to the next. `trap` ends
the process at a step to come. A process that has ended gets no step more: whatever its tasks still do while they are wound up meets
ports that refuse it (`check`), so nothing of it reaches a disk, a machine or a network. `freeze` is a stopped process or a suspended
machine: its time goes on and it does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

_CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)


class Process:
    """One process, from its start to its end. `on_end` is told once, before its tasks are wound up."""

    def __init__(self, name: str, on_end: Callable[[Process], None] = lambda _: None) -> None:
        self.name = name
        self.alive = True
        self.steps = 0
        self._on_end = on_end
        self._trap: int | None = None
        self._thaw: asyncio.Event | None = None
        self._tasks: dict[asyncio.Task[Any], None] = {}
        """In the order of their beginning: a set of tasks has another order in every process."""

    def run(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Begin a task of this process."""
        context = copy_context()
        context.run(_CURRENT.set, self)
        return asyncio.get_running_loop().create_task(work, name=name, context=context)

    def check(self) -> None:
        """For ports: nothing of an ended process has an effect. *Errors*: CancelledError."""
        if not self.alive:
            raise asyncio.CancelledError

    def trap(self, steps: int) -> None:
        """End after so many steps more."""
        self._trap = self.steps + steps

    def spare(self) -> None:
        """Nothing is going to happen to it: no trap, and no standing still."""
        self._trap = None
        self.thaw()

    def end(self) -> None:
        """End now, as kill -9 does: nothing is told, nothing is finished."""
        if not self.alive:
            return
        self.alive = False
        self._on_end(self)
        self.thaw()
        for task in list(self._tasks):
            task.cancel()

    async def gone(self) -> None:
        """Return when nothing of an ended process is left."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def freeze(self) -> None:
        """Stand still until `thaw`."""
        if self.alive and self._thaw is None:
            self._thaw = asyncio.Event()

    def thaw(self) -> None:
        """Go on."""
        if self._thaw is not None:
            self._thaw.set()
            self._thaw = None

    # For the gate.

    @property
    def frozen(self) -> asyncio.Event | None:
        """Set by `thaw`; None while the process runs."""
        return self._thaw

    def step(self) -> bool:
        """Count one step; whether it may be taken."""
        if self.alive:
            self.steps += 1
            if self._trap is not None and self.steps >= self._trap:
                self.end()
        return self.alive

    def joined(self, task: asyncio.Task[Any]) -> None:
        """A task of this process has begun."""
        self._tasks[task] = None
        task.add_done_callback(self._left)
        if not self.alive:
            task.cancel()

    def _left(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not self.alive and not task.cancelled():
            task.exception()  # nobody is left to hear it


def current() -> Process | None:
    """The process whose task runs."""
    return _CURRENT.get()


class _Gate:
    """Awaits a coroutine step by step, as far as its process lets it."""

    def __init__(self, process: Process, work: Coroutine[Any, Any, Any]) -> None:
        self._process = process
        self._work = work

    def __await__(self) -> Generator[Any, None, Any]:
        work, process = self._work, self._process
        error: BaseException | None = None
        while True:
            while (thawed := process.frozen) is not None:
                try:
                    yield from thawed.wait().__await__()
                except asyncio.CancelledError as cancelled:
                    error = cancelled  # heard when it goes on
            if not process.step():
                error = asyncio.CancelledError()
            try:
                waits_for = work.send(None) if error is None else work.throw(error)
            except StopIteration as done:
                return done.value
            error = None
            try:
                yield waits_for
            except GeneratorExit:
                work.close()
                raise
            except BaseException as thrown:  # noqa: BLE001 - whatever it is, it is the coroutine's
                error = thrown


async def _behind(gate: _Gate) -> Any:
    return await gate


def make_task(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:
    """The loop's task factory."""
    context = options.get("context")
    process = _CURRENT.get() if context is None else context.get(_CURRENT, None)
    if process is None:
        return asyncio.Task(work, loop=loop, **options)
    task: asyncio.Task[T] = asyncio.Task(_behind(_Gate(process, work)), loop=loop, **options)
    process.joined(task)
    # One that was ended before its first step would complain that nobody awaited it.
    task.add_done_callback(lambda _done: work.close())
    return task

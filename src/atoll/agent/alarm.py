"""Alarm: sleep until a reading of CLOCK_BOOTTIME, without looking in between.

An event loop's own timers count CLOCK_MONOTONIC, which stands still while the machine is suspended: an end that came due meanwhile
would be late by that time. A timerfd on CLOCK_BOOTTIME is not, and costs no wake-up until it is due. Source: timerfd_create(2).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from typing import Final, Protocol

from atoll.base.clock import Clock

_CLOCK_BOOTTIME: Final = 7
_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC
_ABSOLUTE: Final = 1
_TICK_S: Final = 1e-6
"""Shorter sleeps may end before the time that they are for, by how numbers are rounded; where time is virtual, for ever."""


class Alarm(Protocol):
    """One sleeper that can be set and woken."""

    async def sleep_until(self, boot: float | None) -> None:
        """Return when `Clock.boot()` has come to this, or after `poke`. None: only after `poke`. *Units*: CLOCK_BOOTTIME seconds."""
        ...

    def poke(self) -> None:
        """Wake the sleeper, or let the next sleep end at once."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class LoopAlarm:
    """An alarm on the event loop's timers: for event loops with virtual time, and where there is no timerfd."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._poked = asyncio.Event()

    async def sleep_until(self, boot: float | None) -> None:
        """See Alarm."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if boot is None else max(_TICK_S, boot - self._clock.boot())):
                await self._poked.wait()
        self._poked.clear()

    def poke(self) -> None:
        """See Alarm."""
        self._poked.set()

    def close(self) -> None:
        """See Alarm."""


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_longlong), ("nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class BootAlarm:
    """An alarm on a timerfd. *Errors*: OSError where the kernel has none."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_CLOCK_BOOTTIME, _FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._rung = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._fd, self._ring)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        self._rung.set()

    async def sleep_until(self, boot: float | None) -> None:
        """See Alarm."""
        # A time of zero would disarm it; one nanosecond after boot is as much in the past.
        nanos = 0 if boot is None else max(1, int(boot * 1e9))
        spec = _Itimerspec(_Timespec(0, 0), _Timespec(*divmod(nanos, 10**9)))
        if self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        await self._rung.wait()
        self._rung.clear()

    def poke(self) -> None:
        """See Alarm."""
        self._rung.set()

    def close(self) -> None:
        """See Alarm."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

"""Handshake: make sure that the right guest answers, and initialise it.

Theory of operation. The guest proves itself by naming sandbox, placement, generation and nonce; the agent proves itself by a token of
the deployment for exactly these. Anything else that answers at the address is GUEST_IDENTITY_MISMATCH at once: waiting would not turn
it into the right one. What does not answer, or is not up yet, is tried again: each 2 ms at first, because that is what a create's time
consists of, then more slowly. Init is idempotent, so a lost answer is harmless. A guest that says it is initialised is left as it is; one
that was made ahead, when it says that its last init is of the revision that handed it over. The line on which such a one has proved itself is
kept for a while: what is at its other end is still that guest, and what a create brings goes there at once.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from pydantic import ValidationError

from atoll.agent.guestline import GuestLine, LineBroken
from atoll.agent.record import Record, is_claimed
from atoll.base.clock import Clock
from atoll.base.errors import Code, Refused
from atoll.base.ids import Dice
from atoll.base.secret import Secret
from atoll.domain.placement import Observed
from atoll.domain.warmth import OWN_TEAM
from atoll.wire.agent import InitPayload
from atoll.wire.guest import GUEST_PORT, Hello, Init, InitFile

PAUSE_FIRST_S: Final = 0.002
PAUSE_MOST_S: Final = 0.1
QUICK_S: Final = 0.5
"""So long the pause stays short: a cold guest is up within 0.1 s on an idle machine."""
CONNECT_FIRST_S: Final = 0.02
CONNECT_MOST_S: Final = 1.0
CALL_S: Final = 5.0
LULL_S: Final = 2.0
ENTROPY_BYTES: Final = 32
START_PAUSE_FIRST_S: Final = 0.01
START_PAUSE_MOST_S: Final = 0.25
TOLD_FIRST_S: Final = 2.0
TOLD_S: Final = 5.0
"""Control hears what a start command says that is not ready so soon, and then what it says anew: most of them are never spoken of."""
DETAIL_MAX: Final = 1000
KEPT_S: Final = 600.0
"""A line to a guest that was made ahead, without a word: guests hang up after 640 s (native/internal/guest)."""
KEPT_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a guest is met with."""

    token: Callable[[], Awaitable[Secret]]
    """What it knows the agent by."""
    init: Callable[[Hello], Awaitable[Init]]
    """What it is to be, by what it has said of itself."""
    waiting: Callable[[str], Awaitable[None]]
    """Told what its start command says, which is not ready yet."""


class Guests(Protocol):
    """How the agent meets guests; the simulator has its own."""

    async def meet(self, record: Record, address: str, host: Meeting) -> Hello:
        """Return when the guest at `address` has proved itself, is initialised, and its start command is ready.

        *Errors*: Refused GUEST_IDENTITY_MISMATCH, GUEST_BOOT_TIMEOUT, START_FAILED (it refused init), START_COMMAND_FAILED.
        """
        ...

    async def lull(self, placement_id: str, address: str, token: Secret | None, *, awake: bool) -> bool:
        """Let the guest serve nobody until its next init, because it is about to be saved; or serve again as before, because it was not.

        Whether it has answered. Never raises.
        """
        ...


class TcpGuests:
    """`Guests` over TCP to the slot's address."""

    def __init__(self, clock: Clock, *, port: int = GUEST_PORT) -> None:
        self._clock = clock
        self._port = port
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def close(self) -> None:
        """Hang up on those whose lines are kept."""
        for placement_id in list(self._kept):
            self._hang_up(self._kept[placement_id], placement_id)

    async def meet(self, record: Record, address: str, host: Meeting) -> Hello:
        """See Guests."""
        secret, hello = await self._met(record, address, host)
        return await self._started(record, address, secret, host) if waits(record) else hello

    async def _met(self, record: Record, address: str, host: Meeting) -> tuple[Secret, Hello]:
        """The guest's hello once it has proved itself and is initialised, and what it knows the agent by."""
        assert record.blueprint is not None
        # What a start command takes is counted by itself: a guest that was slow to answer has no less time for it.
        ready_s = min(record.blueprint.ready_s, record.blueprint.spec.guest_ready_s)
        last = "nothing answered"
        try:
            async with asyncio.timeout(ready_s):
                secret = await host.token()
                if (met := await self._on_kept_line(record, address, secret, host.init)) is not None:
                    return secret, met
                began = self._clock.boot()
                connect_s, pause_s = CONNECT_FIRST_S, PAUSE_FIRST_S
                while True:
                    try:
                        return secret, await self._once(record, address, secret, host.init, connect_s)
                    except LineBroken as error:
                        last = str(error)
                    if self._clock.boot() - began > QUICK_S:
                        connect_s, pause_s = min(connect_s * 2, CONNECT_MOST_S), min(pause_s * 1.5, PAUSE_MOST_S)
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            raise Refused(Code.GUEST_BOOT_TIMEOUT, f"the guest was not ready within {ready_s:g} s: {last}") from None

    async def lull(self, placement_id: str, address: str, token: Secret | None, *, awake: bool) -> bool:  # noqa: ARG002 - the port's
        """See Guests."""
        if token is None:
            return False
        try:
            line = await GuestLine.open(address, self._port, within_s=LULL_S)
            with contextlib.closing(line):
                status, _ = await line.call("POST", "/atoll/wake" if awake else "/atoll/sleep", token=token, within_s=LULL_S)
        except LineBroken:
            return False
        return status == 204

    async def _started(self, record: Record, address: str, token: Secret, host: Meeting) -> Hello:
        """The guest's hello once its start command is ready. *Errors*: Refused START_COMMAND_FAILED."""
        assert record.blueprint is not None
        start_s = record.blueprint.spec.start_s
        last, pause_s = "it was not asked yet", START_PAUSE_FIRST_S
        told, tell_at = "", self._clock.boot() + TOLD_FIRST_S
        try:
            async with asyncio.timeout(start_s):
                while True:
                    with contextlib.suppress(LineBroken):
                        hello = await self._look(record, address, token)
                        last = hello.start_detail[:DETAIL_MAX] or last
                        if hello.start == "failed":
                            raise Refused(Code.START_COMMAND_FAILED, last)
                        if hello.start == "ready":
                            return hello
                    if self._clock.boot() >= tell_at and last != told:
                        told, tell_at = last, self._clock.boot() + TOLD_S
                        await host.waiting(last)
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 1.5, START_PAUSE_MOST_S)
        except TimeoutError:
            raise Refused(Code.START_COMMAND_FAILED, f"the start command was not ready within {start_s:g} s: {last}") from None

    async def _look(self, record: Record, address: str, token: Secret) -> Hello:
        line = await GuestLine.open(address, self._port, within_s=CONNECT_MOST_S)
        with contextlib.closing(line):
            return check_hello(record, *await line.call("GET", "/atoll/hello", token=token, within_s=CALL_S))

    async def _once(self, record: Record, address: str, token: Secret, init: Callable[[Hello], Awaitable[Init]], connect_s: float) -> Hello:
        line = await GuestLine.open(address, self._port, within_s=connect_s)
        with contextlib.ExitStack() as closing:
            closing.callback(line.close)
            status, body = await line.call("GET", "/atoll/hello", token=token, within_s=CALL_S)
            hello = check_hello(record, status, body)
            if lacks_init(record, hello):
                await _give(line, token, await init(hello))
            if record.team_id == OWN_TEAM:
                self._keep(record.placement_id, line, address, hello)
                closing.pop_all()
            return hello

    def _keep(self, placement_id: str, line: GuestLine, address: str, hello: Hello) -> None:
        if (known := self._kept.get(placement_id)) is not None:
            self._hang_up(known, placement_id)
        kept = self._kept[placement_id] = _Kept(line, address, hello)
        asyncio.get_running_loop().call_later(KEPT_S, self._hang_up, kept, placement_id)
        while len(self._kept) > KEPT_MAX:
            oldest = next(iter(self._kept))
            self._hang_up(self._kept[oldest], oldest)

    def _hang_up(self, kept: _Kept, placement_id: str) -> None:
        kept.line.close()
        if self._kept.get(placement_id) is kept:
            del self._kept[placement_id]

    async def _on_kept_line(self, record: Record, address: str, token: Secret, init: Callable[[Hello], Awaitable[Init]]) -> Hello | None:
        """Hand over a guest on the line on which it has proved itself to this run. None: there is none, or it broke, and whether anything came
        is for the guest to say.
        """
        kept = self._kept.pop(record.placement_id, None)
        if kept is None:
            return None
        with contextlib.closing(kept.line):
            if not is_claimed(record) or kept.address != address:
                return None
            try:
                await _give(kept.line, token, await init(kept.hello))
            except LineBroken:
                return None
        return kept.hello


@dataclass(frozen=True, slots=True)
class _Kept:
    """A line to a guest that is nobody's yet, and what that said."""

    line: GuestLine
    address: str
    hello: Hello


async def _give(line: GuestLine, token: Secret, init: Init) -> None:
    """*Errors*: as check_init; LineBroken."""
    check_init(*await line.call("POST", "/atoll/init", token=token, body=init.model_dump_json().encode(), within_s=CALL_S))


def lacks_init(record: Record, hello: Hello) -> bool:
    """Whether a guest that says this has yet to get what its sandbox is given."""
    if not hello.initialised or record.observed is Observed.SAVED:
        # Of one that could not be told to sleep before it was saved, the settings are those of then.
        return True
    # Of one that was made ahead they are nobody's, unless an earlier run has got as far as this.
    return is_claimed(record) and hello.init_revision != record.desired_revision


def waits(record: Record) -> bool:
    """Whether a sandbox is of use only when its start command says so."""
    return record.blueprint is not None and record.blueprint.spec.starts


def check_hello(record: Record, status: int, body: bytes) -> Hello:
    """The guest's hello, when it is the right guest's.

    *Errors*: Refused GUEST_IDENTITY_MISMATCH; LineBroken when it is not ready to say.
    """
    assert record.blueprint is not None
    if status in (401, 403, 404):
        raise Refused(Code.GUEST_IDENTITY_MISMATCH, f"what listens there does not know this placement (status {status})")
    if status != 200:
        raise LineBroken(f"hello was answered with status {status}")
    try:
        hello = Hello.model_validate_json(body)
    except ValidationError:
        raise Refused(Code.GUEST_IDENTITY_MISMATCH, "what listens there does not speak the guest protocol") from None
    expected = (record.sandbox_id, record.placement_id, record.generation, record.blueprint.nonce)
    said = (hello.sandbox_id, hello.placement_id, hello.generation, hello.nonce)
    names = ("sandbox", "placement", "generation", "nonce")
    wrong = [name for name, mine, its in zip(names, expected, said, strict=True) if mine != its]
    if wrong:
        raise Refused(Code.GUEST_IDENTITY_MISMATCH, f"another guest answered: {', '.join(wrong)} differ")
    return hello


def check_init(status: int, body: bytes) -> None:
    """*Errors*: Refused START_FAILED when the guest refuses what it got; LineBroken when it may take it later."""
    if status in (200, 204):
        return
    if status >= 500 or status == 429:
        raise LineBroken(f"init was answered with status {status}")
    raise Refused(Code.START_FAILED, f"the guest refused init with status {status}: {body[:200].decode(errors='replace')}")


def init_of(record: Record, payload: InitPayload, *, clock: Clock, dice: Dice) -> Init:
    """What the guest gets: the payload, what the spec says, the time, and bytes of chance."""
    assert record.blueprint is not None
    spec = record.blueprint.spec
    return Init(
        env=payload.env,
        access_token=payload.access_token,
        default_user=spec.default_user,
        default_workdir=spec.default_workdir,
        time_unix_ns=str(int(clock.now() * 1e9)),
        entropy=base64.b64encode(dice(ENTROPY_BYTES)).decode(),
        hostname=record.blueprint.hostname,
        files=[InitFile.model_validate(file) for file in payload.files],
        revision=record.desired_revision,
    )

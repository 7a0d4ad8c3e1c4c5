"""The self-check that boots: a real guest in an empty root, within a slot of its own, until it answers.

Its order is like any other; a note and the record tell it apart, so that what a killed check leaves is removed and nobody takes it for a
sandbox.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import AtollError
from atoll.base.ids import Dice, Prefix, new_id
from atoll.domain.spec import Isolation, NetworkSpec, Spec
from atoll.drivers.oci import record as records
from atoll.drivers.oci.config import OciConfig, RuntimeKind
from atoll.drivers.port import Order, Probe, Seen
from atoll.wire.guest import GUEST_PORT

SANDBOX_ID: Final = "self-check"
BOOT_S: Final = 3.0
REMOVE_S: Final = 10.0
"""How long a check that is called off waits for what it has begun to be gone."""
FIX: Final = "read the detail; `make up` builds the runtime anew, and the kernel must allow namespaces and seccomp"
_ISOLATION: Final = {
    RuntimeKind.RUNSC: Isolation.GVISOR,
    RuntimeKind.CRUN: Isolation.SHARED_KERNEL,
    RuntimeKind.QEMU: Isolation.VM,
    RuntimeKind.QEMU_EMULATED: Isolation.VM_EMULATED,
    RuntimeKind.FIRECRACKER: Isolation.VM,
}
_MACHINES: Final = frozenset({Isolation.VM, Isolation.VM_EMULATED})
_LOOK_EVERY_S: Final = 0.005
_REQUEST: Final = b"GET /health HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n"


def order(kind: RuntimeKind, dice: Dice) -> Order:
    """A small guest without network egress; nobody has the key that its public one belongs to."""
    spec = Spec(
        class_name=SANDBOX_ID,
        template_id="",
        image="",
        image_name="",
        isolation=_ISOLATION[kind],
        cpu_millis=2000,
        memory_mib=256 if _ISOLATION[kind] in _MACHINES else 128,
        disk_mib=64,
        pids_max=64,
        timeout_s=60,
        network=NetworkSpec(internet=False),
    )
    key = base64.b64encode(dice(32)).decode()
    return Order(new_id(Prefix.PLACEMENT, dice), SANDBOX_ID, 1, spec, dice(16).hex(), key, SANDBOX_ID)


@contextlib.contextmanager
def noted(config: OciConfig, placement_id: str) -> Iterator[None]:
    """Say on the disk, before anything of it is there and until all of it is gone, that this is a self-check's. Blocking, for microseconds.

    A run that is killed between a directory and its record, or while both are removed, leaves what nobody could tell from a sandbox.
    """
    note = _notes(config) / placement_id
    note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    note.touch()
    try:
        yield
    finally:
        if not (config.state_dir / placement_id).exists():
            note.unlink(missing_ok=True)


def _notes(config: OciConfig) -> Path:
    return config.run_dir / "checks" / str(config.runtime)


def left(config: OciConfig) -> list[str]:
    """Placements that a self-check of an earlier run of this host and kind has left. Blocking."""
    notes = _notes(config)
    named = {path.name for path in notes.iterdir()} if notes.is_dir() else set()
    return sorted(named.union(_recorded(config)))


def forget(config: OciConfig, placement_id: str) -> None:
    """What a self-check of an earlier run has left is gone. Blocking."""
    (_notes(config) / placement_id).unlink(missing_ok=True)


def _recorded(config: OciConfig) -> list[str]:
    found = [(path.name, records.read(path)) for path in config.state_dir.iterdir() if path.is_dir()]
    mine = (config.mark.host_id, str(config.runtime), SANDBOX_ID)
    return [name for name, record in found if record is not None and (record.host_id, record.runtime, record.sandbox_id) == mine]


async def boot(
    config: OciConfig, begin: Callable[[], Awaitable[Seen]], remove: Callable[[], Coroutine[Any, Any, None]], *, limit_s: float = BOOT_S
) -> Probe:
    """Start with `begin`, wait for the guest's answer, and `remove` it, also when this is cancelled. *Units*: seconds."""
    name = f"runtime.{config.runtime}.boot"
    started = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            seen = await begin()
            answered = await answers(seen.address or "", config.guest_command)
    except (AtollError, OSError) as error:
        # TimeoutError is an OSError without words.
        return Probe(name, ok=False, detail=str(error) or f"no answer within {limit_s:.0f} s", fix=FIX)
    finally:
        await _to_its_end(remove())
    detail = f"a guest answered after {(time.monotonic() - started) * 1000:.0f} ms" if answered else "something else answered"
    return Probe(name, ok=answered, detail=detail, fix=FIX)


async def _to_its_end(removal: Coroutine[Any, Any, None]) -> None:
    """Wait for it even when cancelled, as a driver that is closed can remove nothing any more. What it leaves goes at the next open."""
    task = asyncio.create_task(removal, name="removal of a self-check")
    try:
        await asyncio.shield(asyncio.wait({task}))
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=REMOVE_S)
        raise
    finally:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, AtollError | OSError):
            raise error


async def answers(address: str, other_command: tuple[str, ...]) -> bool:
    """Wait until the guest answers at its address; the caller sets the limit. With another command in its place nobody would answer."""
    if other_command:
        return True
    while True:
        try:
            async with asyncio.timeout(0.25):
                reader, writer = await asyncio.open_connection(address, GUEST_PORT)
                # A guest that is only just beginning takes the connection and answers later than one waits here.
                with contextlib.closing(writer):
                    writer.write(_REQUEST)
                    line = await reader.readline()
                return line.startswith(b"HTTP/1.1 ")
        except (OSError, TimeoutError):
            await asyncio.sleep(_LOOK_EVERY_S)

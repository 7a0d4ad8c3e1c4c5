"""A body of many bytes, streamed to the disk: it has its name once it is whole, and what breaks off leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from starlette.types import Receive

from atoll.base.errors import Code, Refused
from atoll.control import asgi
from atoll.control.artifacts.imports import free_bytes
from atoll.images.library import Library

SPARE_BYTES: Final = 1 << 30
QUIET_S: Final = 60.0


async def receive_file(
    receive: Receive, place: Path, name: Callable[[str], str], *, announced: bytes | None, bytes_max: int, library: Library | None
) -> tuple[str, int]:
    """Hex SHA-256 and size of what is in `place` now, under the `name` for that digest, and in the artifact store.

    `announced`: the content-length that was sent. *Errors*: Refused BODY_TOO_LARGE, INVALID_REQUEST, HOST_DISK_FULL; those of the artifact store.
    """
    place.mkdir(parents=True, exist_ok=True, mode=0o750)
    room = min(bytes_max, free_bytes(place) - SPARE_BYTES)
    if announced is not None and (not announced.isdigit() or len(announced) > 15 or int(announced) > room):
        raise Refused(Code.BODY_TOO_LARGE, f"there is room for {max(room, 0)} bytes")
    total, found = hashlib.sha256(), 0
    with tempfile.NamedTemporaryFile(dir=place, prefix=".upload-", delete=False) as file:
        path = Path(file.name)
        try:
            async for part in asgi.parts(receive, quiet_s=QUIET_S):
                found += len(part)
                if found > room:
                    raise Refused(Code.BODY_TOO_LARGE, f"there is room for {max(room, 0)} bytes")
                total.update(part)
                await asyncio.to_thread(file.write, part)
            file.flush()
            if announced is not None and found != int(announced):
                raise Refused(Code.INVALID_REQUEST, f"{found} bytes came, {int(announced)} were announced")
            target = place / name(total.hexdigest())
            if library is not None:
                # Before it has its name: who finds it here may count on it everywhere.
                await library.keep_upload(path, name=target)
            path.replace(target)
        except ConnectionError as error:
            raise Refused(Code.INVALID_REQUEST, str(error)) from error
        except OSError as error:
            raise Refused(Code.HOST_DISK_FULL, f"what was sent could not be kept: {error.strerror}") from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    return total.hexdigest(), found

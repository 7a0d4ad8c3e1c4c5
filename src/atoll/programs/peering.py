"""How one control replica reaches another: plain HTTP to the address that it is on record with."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Final

from atoll.base.errors import Code, Unavailable

if TYPE_CHECKING:
    import aiohttp

CALL_S: Final = 5.0
FETCH_S: Final = 600.0
"""While it fetches a layer, the other one says nothing."""
QUIET_S: Final = 60.0
PART_BYTES: Final = 1 << 20
_ANSWER_BYTES_MAX: Final = 64 << 10


class HttpLine:
    """Implements control.replicas.peers.Line. Opens its session with the first call: a deployment of one replica makes none."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, content: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """See Line."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=FETCH_S if url.endswith("/came") else CALL_S, sock_connect=CALL_S)
        try:
            async with self._opened().post(url, data=content, headers=headers, timeout=timeout, allow_redirects=False) as answer:
                return answer.status, await answer.content.read(_ANSWER_BYTES_MAX)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unavailable(Code.CONTROL_UNAVAILABLE, f"a replica was not reached: {type(error).__name__}") from error

    @contextlib.asynccontextmanager
    async def get(self, url: str, headers: Mapping[str, str]) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """See Line."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_S, sock_read=QUIET_S)
        try:
            async with self._opened().get(url, headers=headers, timeout=timeout, allow_redirects=False) as answer:
                yield answer.status, answer.content.iter_chunked(PART_BYTES)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(Code.CONTROL_UNAVAILABLE, f"a replica was not reached: {type(error).__name__}") from error

    async def close(self) -> None:
        """End its connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session

"""`PUT /template-files/TEAM/HASH`: what a COPY step copies, streamed to the disk by a link that control has signed.

A bare application beside the front. The link says whose files these are and until when it may be used; nothing else is asked of whoever
has it. Signature first, then length and room on the disk, then the bytes; the archive has its name once it is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code, Refused
from atoll.control.api.errors import v1_error
from atoll.control.api.exchange import Answer
from atoll.control.api.receiving import receive_file
from atoll.control.tokens import Tokens
from atoll.images.library import Library
from atoll.planning.recipes import FILES_HASH

PREFIX: Final = "/template-files/"
BYTES_MAX: Final = 8 << 30
LINK_S: Final = 3600


class Uploads:
    """The application, and the links that lead to it. `place(team_id, files_hash)` is where an archive is kept."""

    def __init__(
        self,
        tokens: Tokens,
        clock: Clock,
        place: Callable[[str, str], Path],
        *,
        request_id: Callable[[], str],
        library: Library | None = None,
    ) -> None:
        """`library`: where what has come is kept, for other replicas too."""
        self._library = library
        self._tokens = tokens
        self._clock = clock
        self._place = place
        self._request_id = request_id

    def link(self, team_id: str, files_hash: str, *, origin: str) -> str:
        """Where to send an archive. `origin`: how the client reaches us, e.g. `http://localhost:3000`."""
        until = int(self._clock.now()) + LINK_S
        return f"{origin}{PREFIX}{team_id}/{files_hash}?until={until}&signature={self._tokens.upload(team_id, files_hash, until)}"

    async def present(self, team_id: str, files_hash: str) -> bool:
        """Whether it was sent before; if so, it is kept as if it were sent now. *Errors*: those of the artifact store."""
        place = self._place(team_id, files_hash)
        if self._library is not None and not await self._library.bring_upload(place):
            return False
        try:
            os.utime(place)
        except OSError:
            return False
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            team_id, files_hash = self._allowed(scope)
            place, announced = self._place(team_id, files_hash), dict(scope["headers"]).get(b"content-length")
            await receive_file(receive, place.parent, lambda _: place.name, announced=announced, bytes_max=BYTES_MAX, library=self._library)
            answer = Answer(200)
        except AtollError as error:
            answer = v1_error(error, self._request_id())
        await answer.send(send)

    def _allowed(self, scope: Scope) -> tuple[str, str]:
        team_id, _, files_hash = str(scope["path"]).removeprefix(PREFIX).partition("/")
        asked = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=8)
        until, signature = asked.get("until", [""])[0], asked.get("signature", [""])[0]
        if scope["method"] != "PUT" or not until.isdigit() or len(until) > 12 or FILES_HASH.fullmatch(files_hash) is None:
            raise Refused(Code.INVALID_REQUEST, "files are sent by PUT to a link that was given for them")
        if not self._tokens.is_upload(team_id, files_hash, int(until), signature) or int(until) < self._clock.now():
            raise Refused(Code.FORBIDDEN, "this link was not given for these files, or is too old; ask for another")
        return team_id, files_hash

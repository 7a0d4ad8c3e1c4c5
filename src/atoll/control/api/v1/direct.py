"""The two hot routes of `/v1`, create and release, without the framework where a request is plain.

FastAPI stays what documents and defines them: whatever is not plain (a body that is not valid, a condition, an id that is none) is left to it,
and it says what is wrong with it. What it does for a plain one takes a fifth of what control spends on a sandbox.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Response
from pydantic import ValidationError

from atoll.base.errors import AtollError
from atoll.base.ids import Prefix, is_id
from atoll.control.api.v1 import models
from atoll.control.api.v1.sandboxes import Sandboxes
from atoll.control.service import Caller


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a known caller to one of our routes."""

    caller: Caller
    operation: str
    params: Mapping[str, str]
    headers: Mapping[bytes, bytes] = field(repr=False)
    content: Any = field(repr=False)
    """What its body says."""


Refusal = Callable[[str, Caller, str, AtollError], Awaitable[None]]
"""Hears what was refused: operation, caller, subject, error."""


@dataclass(frozen=True, slots=True)
class Direct:
    """Answers them."""

    sandboxes: Sandboxes
    refused: Refusal

    async def answer(self, asked: Asked) -> Response | None:
        """The answer; None: this is for FastAPI, and nothing was done. *Errors*: those of the service."""
        match asked.operation:
            case "createSandbox":
                return await self._create(asked)
            case "releaseSandbox":
                return await self._release(asked)
            case _:
                return None

    async def _create(self, asked: Asked) -> Response | None:
        try:
            body = models.NewSandbox.model_validate(asked.content)
        except ValidationError:
            return None
        return await self.sandboxes.create(asked.caller, body)

    async def _release(self, asked: Asked) -> Response | None:
        sandbox_id = asked.params["sandbox_id"]
        if b"if-match" in asked.headers or not is_id(Prefix.SANDBOX, sandbox_id):
            return None
        try:
            return await self.sandboxes.release(asked.caller, sandbox_id, None)
        except AtollError as error:
            await self.refused(asked.operation, asked.caller, sandbox_id, error)
            raise

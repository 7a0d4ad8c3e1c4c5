"""Firecracker's API, as far as one machine needs it: HTTP over a socket of its own. Blocking.

Source: Firecracker's OpenAPI description (`firecracker.yaml`, 1.17): 204 when something was done, 200 with what was asked for, else a
`fault_message`.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import Code, Refused
from atoll.drivers.sockets import connect

SOCKET: Final = "api.sock"
ANSWER_S: Final = 60.0
"""A snapshot of a large machine is written before it is answered."""
_ANSWER_BYTES_MAX: Final = 1 << 20


class _Connection(http.client.HTTPConnection):
    def __init__(self, directory: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._directory = directory
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = connect(self._directory, SOCKET, timeout_s=self._timeout_s)


class Api:
    """One machine's. Each request has a connection of its own."""

    def __init__(self, directory: Path, *, code: Code, timeout_s: float = ANSWER_S) -> None:
        """`code`: what a failure is refused with."""
        self._directory = directory
        self._code = code
        self._timeout_s = timeout_s

    def put(self, path: str, body: Mapping[str, Any]) -> None:
        """*Errors*: Refused with this conversation's code, and Firecracker's own words."""
        self._ask("PUT", path, body)

    def patch(self, path: str, body: Mapping[str, Any]) -> None:
        """*Errors*: as `put`."""
        self._ask("PATCH", path, body)

    def state(self) -> str:
        """`Not started`, `Running` or `Paused`. *Errors*: as `put`."""
        return str(self._ask("GET", "/", None).get("state", ""))

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        connection = _Connection(self._directory, self._timeout_s)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, body=text, headers={"Content-Type": "application/json", "Accept": "application/json"})
            response = connection.getresponse()
            content = response.read(_ANSWER_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            raise Refused(self._code, f"{method} {path}: the machine's API does not answer: {error}") from error
        finally:
            connection.close()
        said = _object(content)
        if response.status not in (200, 204):
            raise Refused(self._code, f"{method} {path}: {str(said.get('fault_message', response.status))[:400]}")
        return said


def _object(content: bytes) -> dict[str, Any]:
    try:
        said = json.loads(content) if content else {}
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def answers(directory: Path) -> bool:
    """Whether the API takes connections yet. *Errors*: OSError."""
    connect(directory, SOCKET, timeout_s=1.0).close()
    return True

"""Logs: one JSON object a line on standard error, with no secret in it.

Theory of operation. `configure` is called once by each program. Lines of other libraries go through the same chain: what they say is the
`message` of one event of ours, and their INFO (uvicorn's greetings, each step of alembic) is left out, since our own lines say the same.
A value of type `Secret` has no way out (its repr is `***`); beyond that, a field whose name says that it holds a secret is masked, so
that a mistake in a caller shows stars instead of a key.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
import threading
from collections.abc import Iterator, MutableMapping
from types import ModuleType
from typing import Any, Final, TextIO, cast

from atoll.base.secret import Secret
from atoll.telemetry.events import LIBRARY_SPOKE
from atoll.telemetry.keys import ALWAYS

if "rich" in sys.modules:
    import structlog
else:
    # structlog's console renderer, which nobody here uses, would load rich and pygments: 5 MiB in every process that runs for long.
    sys.modules["rich"] = cast("ModuleType", None)
    try:
        import structlog
    finally:
        del sys.modules["rich"]

MASK: Final = "***"
_SECRET_NAMES: Final = ("token", "secret", "password", "authorization", "credential", "api_key", "access_key", "private_key")
_SECRET_ALLOWED: Final = ("_digest", "_hint", "_version", "_ref", "_id", "_sha256")
_DEPTH_MAX: Final = 6
_TALKATIVE: Final = ("uvicorn", "alembic", "httpx", "httpcore", "aiohttp.access", "asyncio", "opentelemetry", "urllib3")
"""Libraries whose INFO is one line a request, or says what a line of ours says."""


@functools.lru_cache(maxsize=1024)
def _is_secret_name(name: str) -> bool:
    lowered = name.lower().replace("-", "_")
    return any(word in lowered for word in _SECRET_NAMES) and not lowered.endswith(_SECRET_ALLOWED)


def redact(value: Any, *, depth: int = 0) -> Any:
    """`value` with every `Secret`, and everything under a name that says secret, replaced by `***`."""
    if isinstance(value, Secret):
        return MASK
    if depth >= _DEPTH_MAX:
        return "..."
    if isinstance(value, dict):
        return {
            str(key): MASK if _is_secret_name(str(key)) and inner not in (None, "") else redact(inner, depth=depth + 1)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [redact(inner, depth=depth + 1) for inner in value]
    return value


def _redact_line(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return cast("MutableMapping[str, Any]", redact(dict(line)))


def _as_ours(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A library's line under our event name: its text is a sentence that changes, and nobody could search or alert by it."""
    line["message"] = line["event"]
    line["event"] = LIBRARY_SPOKE
    return line


def _order(process: str) -> structlog.typing.Processor:
    def order(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        line["process"] = process
        return {**{name: line.pop(name, None) for name in ALWAYS}, **line}

    return order


_ENCODER: Final = json.JSONEncoder(default=repr, ensure_ascii=False, separators=(",", ":"))


def _dump(line: Any, **_: Any) -> str:
    return _ENCODER.encode(line)


class _Lines:
    """The stream of all lines, ours and libraries', one line at a time whatever thread says it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        with self._lock:
            self._stream.write(text)

    def flush(self) -> None:
        with self._lock:
            self._stream.flush()

    def say(self, line: str) -> None:
        """As structlog's last step. Nobody is told when the stream is gone: there is nowhere to say it."""
        with contextlib.suppress(OSError, ValueError):
            self.write(line + "\n")
            self.flush()

    debug = info = warning = error = critical = exception = say


def configure(process: str, level: str = "info", *, stream: TextIO | None = None) -> None:
    """Send this program's logs, and those of its libraries, as JSON lines to `stream` (standard error). *Idempotency*: the last call wins."""
    chain: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        structlog.processors.format_exc_info,
        _redact_line,
    ]
    last: list[structlog.typing.Processor] = [_order(process), structlog.processors.JSONRenderer(serializer=_dump)]
    lines = _Lines(stream or sys.stderr)
    handler = logging.StreamHandler(cast("TextIO", lines))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*chain, structlog.stdlib.add_logger_name, _as_ours],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in _TALKATIVE:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    structlog.configure(
        processors=[*chain, *last],
        logger_factory=lambda *_: lines,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        cache_logger_on_first_use=False,
    )


@contextlib.contextmanager
def about_request(request_id: str) -> Iterator[None]:
    """Have every line say for which request of a client it is written, and `current_request` know it."""
    tokens = structlog.contextvars.bind_contextvars(request_id=request_id)
    try:
        yield
    finally:
        structlog.contextvars.reset_contextvars(**tokens)


def current_request() -> str | None:
    """The request of a client that this task works for; None for what control does by itself."""
    found = structlog.contextvars.get_contextvars().get("request_id")
    return str(found) if found is not None else None


def get_logger(**fields: Any) -> structlog.typing.FilteringBoundLogger:
    """A logger that adds `fields` to each of its lines; may be made at import, before `configure`."""
    return cast("structlog.typing.FilteringBoundLogger", structlog.get_logger(**fields))

"""What a shell offers after TAB. Short and silent: without an answer in a moment there is nothing to offer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from atoll.base.errors import AtollError

_PATIENCE_S: Final = 1.5


def _ask(read: Callable[[Any], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    from atoll.client.api import Api
    from atoll.client.target import find

    try:
        with Api(find(), timeout_s=_PATIENCE_S) as api:
            return read(api)
    except AtollError:
        return []


def sandboxes(incomplete: str) -> list[tuple[str, str]]:
    """Ids of running sandboxes, with what they are."""
    found = _ask(lambda api: api.sandboxes(limit=100))
    return [
        (str(item["id"]), f"{(item.get('template') or {}).get('name', '')} {item.get('state', '')}")
        for item in found
        if str(item["id"]).startswith(incomplete)
    ]


def states(incomplete: str) -> list[str]:
    """States of a sandbox."""
    from atoll.domain.sandbox import State

    return [str(state) for state in State if state.startswith(incomplete)]


def templates(incomplete: str) -> list[str]:
    """Names of templates."""
    return [str(item.get("name")) for item in _ask(lambda api: api.templates()) if str(item.get("name")).startswith(incomplete)]


def hosts(incomplete: str) -> list[str]:
    """Names of hosts."""
    return [str(item.get("name")) for item in _ask(lambda api: api.hosts()) if str(item.get("name")).startswith(incomplete)]


def keys(incomplete: str) -> list[tuple[str, str]]:
    """Ids of keys, with their names."""
    found = _ask(lambda api: api.keys())
    return [(str(item["id"]), str(item.get("name", ""))) for item in found if str(item["id"]).startswith(incomplete)]

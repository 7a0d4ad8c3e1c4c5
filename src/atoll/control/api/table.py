"""A routing table: from method and path to what answers it, and the path's parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar
from urllib.parse import unquote

T = TypeVar("T")
_PARAMETER: Final = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Route(Generic[T]):
    """A path with `{parameters}`, each one segment long."""

    method: str
    path: str
    target: T
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Parameters that come with the route itself."""


@dataclass(frozen=True, slots=True)
class Match(Generic[T]):
    """What a path leads to: the methods it has, and the route of the one that was asked for."""

    path: str
    """Its template."""
    methods: frozenset[str]
    route: Route[T] | None
    params: Mapping[str, str]


class Table(Generic[T]):
    """Paths without parameters are looked up, the others are tried in their order, so literal paths win over parameters."""

    def __init__(self, routes: Iterable[Route[T]]) -> None:
        self._literal: dict[str, dict[str, Route[T]]] = {}
        self._patterns: list[tuple[re.Pattern[str], str, dict[str, Route[T]]]] = []
        known: dict[str, dict[str, Route[T]]] = {}
        for route in routes:
            methods = known.get(route.path)
            if methods is None:
                methods = known[route.path] = {}
                if _PARAMETER.search(route.path):
                    self._patterns.append((re.compile(_PARAMETER.sub(r"(?P<\1>[^/]+)", route.path)), route.path, methods))
                else:
                    self._literal[route.path] = methods
            methods[route.method] = route

    def match(self, method: str, path: str, raw_path: str) -> Match[T] | None:
        """None when no route has this path. Parameters come from the raw path, so that one may hold a quoted slash."""
        methods = self._literal.get(path)
        if methods is not None:
            return self._found(path, methods, method, {})
        for pattern, template, candidates in self._patterns:
            matched = pattern.fullmatch(raw_path)
            if matched is not None:
                return self._found(template, candidates, method, {name: unquote(value) for name, value in matched.groupdict().items()})
        return None

    def _found(self, path: str, methods: Mapping[str, Route[T]], method: str, params: Mapping[str, str]) -> Match[T]:
        route = methods.get("GET" if method == "HEAD" else method)
        names = frozenset(methods) | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else frozenset())
        return Match(path, names, route, params if route is None or not route.fixed else {**params, **route.fixed})

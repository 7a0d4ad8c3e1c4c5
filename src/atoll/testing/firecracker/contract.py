"""Requests, checked against an OpenAPI 2.0 description: method, path, and each field of a body. What is not described is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "ATOLL_FIRECRACKER_CONTRACT"
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
}
_OPEN: Final = frozenset({"MmdsContentsObject"})


class Contract:
    """A description that was read."""

    def __init__(self, text: str) -> None:
        import yaml  # only where a description is to be read

        read: dict[str, Any] = yaml.safe_load(text)
        self._definitions: dict[str, Any] = read["definitions"]
        self._paths = {re.compile(re.sub(r"\{[^}]+\}", "([^/]+)", path) + "$"): verbs for path, verbs in read["paths"].items()}

    @classmethod
    def at(cls, path: Path) -> Contract:
        """*Errors*: OSError; ValueError, KeyError when it is no such description."""
        return cls(path.read_text())

    def problem(self, method: str, path: str, body: object) -> str | None:
        """What is wrong with a request; None: nothing. `body`: None where there is none."""
        for pattern, verbs in self._paths.items():
            found = pattern.match(path)
            if found is None:
                continue
            described = verbs.get(method.lower())
            if described is None:
                return f"{method} is no method of {path}"
            return self._body(described, found.groups(), body)
        return f"there is no {path}"

    def _body(self, described: dict[str, Any], names: tuple[str, ...], body: object) -> str | None:
        parameter = next((one for one in described.get("parameters", []) if one["in"] == "body"), None)
        if parameter is None:
            return None if body is None else "it takes no body"
        if body is None:
            return "its body is missing" if parameter.get("required") else None
        if problem := self._value(parameter["schema"], body, "body"):
            return problem
        # The name in the path is one of the fields, too: Firecracker wants them to be the same.
        ids = [value for key, value in body.items() if key in ("drive_id", "iface_id", "id")] if isinstance(body, dict) else []
        return f"the path names {names[0]}, and the body {ids[0]}" if names and ids and ids[0] != names[0] else None

    def _value(self, schema: dict[str, Any], value: object, where: str) -> str | None:
        is_open = False
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            is_open = name in _OPEN
            schema = self._definitions[name]
        kind = schema.get("type", "object")
        if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
            return f"{where} is no {kind}"
        if "enum" in schema and value not in schema["enum"]:
            return f"{where} is none of {schema['enum']}"
        if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            return f"{where} is not within its bounds"
        if isinstance(value, dict):
            return self._object(schema, value, where, is_open=is_open)
        if isinstance(value, list):
            found = (self._value(schema["items"], one, f"{where}[{place}]") for place, one in enumerate(value))
            return next((problem for problem in found if problem), None)
        return None

    def _object(self, schema: dict[str, Any], value: dict[str, Any], where: str, *, is_open: bool) -> str | None:
        known = schema.get("properties", {})
        if missing := [name for name in schema.get("required", []) if name not in value]:
            return f"{where} lacks {', '.join(missing)}"
        if not is_open and not schema.get("additionalProperties") and (unknown := [name for name in value if name not in known]):
            return f"{where} has {', '.join(unknown)}, which is not described"
        found = (self._value(known[name], inner, f"{where}.{name}") for name, inner in value.items() if name in known)
        return next((problem for problem in found if problem), None)

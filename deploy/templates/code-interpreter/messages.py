"""What a kernel says, as the lines that E2B's code interpreter SDKs read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

FIELDS: Final[Mapping[str, str]] = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}
"""Kinds of content that have a field of their own; all others go into `extra`."""


def line(kind: str, content: Mapping[str, Any]) -> dict[str, Any] | None:
    """A line for a message of a kernel's output channel; None for what clients are not told."""
    match kind:
        case "stream":
            return {"type": str(content["name"]), "text": str(content["text"]), "timestamp": time.time_ns()}
        case "display_data" | "execute_result":
            return result(content["data"], is_main=kind == "execute_result")
        case "error":
            traceback = content.get("traceback") or []
            return error(str(content.get("ename") or "Error"), str(content.get("evalue") or ""), "\n".join(traceback))
        case "execute_input":
            return {"type": "number_of_executions", "execution_count": content["execution_count"]}
    return None


def result(data: Mapping[str, Any], *, is_main: bool) -> dict[str, Any]:
    """One result, in all the kinds that the kernel has for it."""
    shown: dict[str, Any] = {"type": "result", "is_main_result": is_main}
    extra = {}
    for kind, value in data.items():
        whole = "".join(value) if isinstance(value, list) and all(isinstance(one, str) for one in value) else value
        if kind in FIELDS:
            shown[FIELDS[kind]] = whole
        else:
            extra[kind] = whole
    if isinstance(shown.get("text"), str):
        shown["text"] = unquoted(shown["text"])
    if extra:
        shown["extra"] = extra
    return shown


def unquoted(text: str) -> str:
    """Without the quotes of a plain string's representation: clients expect `'a'` as `a`."""
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


def error(name: str, value: str, traceback: str) -> dict[str, Any]:
    """What an execution ended with."""
    return {"type": "error", "name": name, "value": value, "traceback": traceback}

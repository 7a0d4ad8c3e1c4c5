"""A Dockerfile's text as instructions: comments and continued lines taken away, here-documents taken up, as Docker does it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.base.errors import Code, Refused

_DIRECTIVE: Final = re.compile(r"#\s*(?P<name>[a-z]+)\s*=\s*(?P<value>\S+)\s*", re.IGNORECASE)
_FLAG: Final = re.compile(r"--(?P<name>[a-z][a-z-]*)(?:=(?P<value>\"[^\"]*\"|'[^']*'|\S*))?(?:\s+|\Z)")
_DOCUMENT: Final = re.compile(r"(?:(?<=\s)|\A)\d*<<(?P<tabs>-?)(?P<quote>['\"]?)(?P<name>[\w.@+-]+)(?P=quote)(?=\s|\Z)")
_QUOTED: Final = re.compile(r"(?<!<)(?<!<-)(?:'[^']*'|\"(?:[^\"\\]|\\.)*\")")
WITH_DOCUMENTS: Final = frozenset({"RUN", "COPY", "ADD"})
WITH_FLAGS: Final = frozenset({"FROM", "RUN", "COPY", "ADD", "HEALTHCHECK"})


@dataclass(frozen=True, slots=True)
class Document:
    """A here-document. `literal`: its delimiter was quoted, so its dollars are dollars."""

    name: str
    text: str
    literal: bool
    mark: str
    """As the instruction's line names it, e.g. `<<EOF`."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One of them. `line`: where it begins, from 1; `word`: in capitals; `rest`: without flags, with the marks of documents."""

    line: int
    word: str
    rest: str
    flags: Mapping[str, Sequence[str]]
    documents: tuple[Document, ...] = ()

    @property
    def listed(self) -> list[str] | None:
        """The exec form; None when it is none."""
        return listed(self.rest)


def instructions(text: str) -> Iterator[Instruction]:
    """All of them in order. *Errors*: Refused INVALID_REQUEST, with the line, where a here-document does not end."""
    rows = text.splitlines()
    at, escape = _directives(rows)
    while at < len(rows):
        begun, whole, at = _joined(rows, at, escape)
        if not whole:
            continue
        word, _, rest = whole.replace("\t", " ", 1).partition(" ") if re.match(r"\S+\t", whole) else whole.partition(" ")
        word, rest = word.upper(), rest.strip()
        documents: list[Document] = []
        for mark in _marks(word, rest):
            document, at = _document(rows, at, mark, begun)
            documents.append(document)
        flags, rest = _flags(rest) if word in WITH_FLAGS else ({}, rest)
        yield Instruction(begun, word, rest, flags, tuple(documents))


def _directives(rows: Sequence[str]) -> tuple[int, str]:
    """Where the instructions begin, and what continues a line."""
    escape = "\\"
    for at, row in enumerate(rows):
        match = _DIRECTIVE.fullmatch(row.strip())
        if match is None:
            return at, escape
        if match["name"].lower() == "escape":
            if match["value"] not in ("\\", "`"):
                raise Refused(Code.INVALID_REQUEST, f"line {at + 1}: escape is \\ or `, not {match['value'][:20]!r}")
            escape = match["value"]
    return len(rows), escape


def _joined(rows: Sequence[str], at: int, escape: str) -> tuple[int, str, int]:
    """(line, the instruction that begins there, the row after it); nothing of a row that is empty or a comment."""
    begun, gathered = at + 1, ""
    while at < len(rows):
        apart = " " if rows[at][:1].isspace() and gathered and not gathered[-1].isspace() else ""
        row, at = rows[at].strip(), at + 1
        if row.startswith("#") or (not row and gathered):
            continue
        if not row.endswith(escape):
            return begun, (gathered + apart + row).strip(), at
        gathered += apart + row.removesuffix(escape)
        begun = begun if gathered.strip() else at
    return begun, gathered.strip(), at


def _marks(word: str, rest: str) -> list[re.Match[str]]:
    if word not in WITH_DOCUMENTS or "<<" not in rest or listed(rest) is not None:
        return []
    bare = _QUOTED.sub(lambda match: "_" * len(match[0]), rest)
    return list(_DOCUMENT.finditer(bare))


def _document(rows: Sequence[str], at: int, mark: re.Match[str], line: int) -> tuple[Document, int]:
    taken: list[str] = []
    for number in range(at, len(rows)):
        row = rows[number].lstrip("\t") if mark["tabs"] else rows[number]
        if row == mark["name"]:
            text = "".join(f"{one}\n" for one in taken)
            return Document(mark["name"], text, bool(mark["quote"]), mark[0]), number + 1
        taken.append(row)
    raise Refused(
        Code.INVALID_REQUEST,
        f"line {line}: the here-document {mark['name']} does not end",
        hint=f"Write {mark['name']} alone on the line after its last.",
    )


def _flags(rest: str) -> tuple[dict[str, list[str]], str]:
    found: dict[str, list[str]] = {}
    while match := _FLAG.match(rest):
        value = match["value"] or ""
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        found.setdefault(match["name"], []).append(value)
        rest = rest[match.end() :]
    return found, rest


def listed(text: str) -> list[str] | None:
    """The exec form: a JSON list of strings; None when it is none."""
    if not text.startswith("["):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return [str(one) for one in found] if isinstance(found, list) and all(isinstance(one, str) for one in found) else None

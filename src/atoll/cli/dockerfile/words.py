r"""Words of an instruction: quotes taken away and variables put in, as Docker does it.

Theory of operation. A value is known here when an ARG or an ENV of the Dockerfile gives it; what a base image brings is known to control
alone. So there are two ways: LATER leaves what is not known as it is, for control, and marks dollars that are meant (`\$`); NOW refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from atoll.base.errors import Code, Refused

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPERATOR: Final = re.compile(r":?[-+?]")


@dataclass(slots=True)
class Scope:
    """What names stand for, in one stage; `None`: declared without a value."""

    arguments: dict[str, str | None] = field(default_factory=dict)
    variables: dict[str, str | None] = field(default_factory=dict)
    """ENV; `None`: depends on the image. It hides an argument of the same name."""

    def look(self, name: str) -> tuple[bool, str | None]:
        """(whether the name is known here, its value)."""
        if name in self.variables:
            return self.variables[name] is not None, self.variables[name]
        return name in self.arguments, self.arguments.get(name)

    def exported(self) -> Mapping[str, str]:
        """The arguments that commands see."""
        return {name: value for name, value in self.arguments.items() if value is not None and name not in self.variables}


@dataclass(slots=True)
class Words:
    """Reads text in a scope. *Errors* of every call: Refused INVALID_REQUEST; ValueError of an open quotation."""

    scope: Scope
    later: bool
    empty: bool = False
    """What is not known is empty: before the first FROM there is no image that could bring it."""
    left: bool = False
    """Whether something was left for control."""

    def split(self, text: str) -> list[str]:
        """Words between blanks."""
        return self._read(text, blanks=True)

    def one(self, text: str) -> str:
        """All of it as one word."""
        return "".join(self._read(text, blanks=False))

    def document(self, text: str) -> str:
        """A text in which quotes mean nothing."""
        made, at = "", 0
        while at < len(text):
            if text[at] == "\\" and at + 1 < len(text) and text[at + 1] in "\\$":
                made, at = made + text[at + 1], at + 2
            elif text[at] == "$":
                value, at = self._variable(text, at)
                made += value
            else:
                made, at = made + text[at], at + 1
        return made

    def _read(self, text: str, *, blanks: bool) -> list[str]:
        found: list[str] = []
        word: str | None = None
        at = 0
        while at < len(text):
            sign = text[at]
            if sign.isspace() and blanks:
                found += [] if word is None else [word]
                word, at = None, at + 1
                continue
            part, at = self._part(text, at)
            word = (word or "") + part
        return found + ([] if word is None else [word])

    def _part(self, text: str, at: int) -> tuple[str, int]:
        match text[at]:
            case "'":
                end = text.find("'", at + 1)
                if end < 0:
                    raise ValueError("No closing quotation")
                return self._plain(text[at + 1 : end]), end + 1
            case '"':
                return self._quoted(text, at + 1)
            case "\\" if at + 1 < len(text):
                return self._plain(text[at + 1]), at + 2
            case "$":
                return self._variable(text, at)
            case sign:
                return sign, at + 1

    def _quoted(self, text: str, at: int) -> tuple[str, int]:
        made = ""
        while at < len(text):
            match text[at]:
                case '"':
                    return made, at + 1
                case "\\" if at + 1 < len(text) and text[at + 1] in '"$\\':
                    made, at = made + self._plain(text[at + 1]), at + 2
                case "$":
                    value, at = self._variable(text, at)
                    made += value
                case sign:
                    made, at = made + sign, at + 1
        raise ValueError("No closing quotation")

    def _plain(self, text: str) -> str:
        return text.replace("$", "\\$") if self.later else text

    def _variable(self, text: str, at: int) -> tuple[str, int]:
        """The value of the variable that begins here, and where it ends."""
        if match := _NAME.match(text, at + 1):
            return self._value(match[0], "", "", text[at : match.end()]), match.end()
        if not text.startswith("${", at):
            return self._plain("$"), at + 1
        end = _closing(text, at + 2)
        inner = text[at + 2 : end]
        match = _NAME.match(inner)
        if match is None:
            raise Refused(Code.INVALID_REQUEST, f"{text[at : end + 1][:80]!r} is no variable")
        rest = inner[match.end() :]
        operator = _OPERATOR.match(rest)
        if rest and operator is None:
            raise Refused(
                Code.INVALID_REQUEST,
                f"{text[at : end + 1][:80]!r} is not supported",
                hint="Of the forms ${NAME:-word}, -, :+, +, :? and ?.",
            )
        kind = operator[0] if operator else ""
        return self._value(match[0], kind, rest[len(kind) :], text[at : end + 1]), end + 1

    def _value(self, name: str, operator: str, word: str, source: str) -> str:
        known, value = self.scope.look(name)
        if not known and not self.empty:
            if not self.later:
                raise Refused(
                    Code.INVALID_REQUEST,
                    f"${name} is not known here: no ARG or ENV of this stage gives it a value",
                    hint=f"What an image brings is known while it is built only: say ENV {name}=..., or \\${name} where a dollar is meant.",
                )
            self.left = True
            return f"${{{name}{operator}{self.one(word)}}}" if operator else source
        there = bool(value) if operator.startswith(":") else value is not None
        match operator[-1:]:
            case "-":
                return self._plain(value or "") if there else self.one(word)
            case "+":
                return self.one(word) if there else ""
            case "?" if not there:
                raise Refused(Code.INVALID_REQUEST, f"{name}: {self.one(word) or 'has no value'}", hint=f"Say --build-arg {name}=VALUE.")
            case _:
                return self._plain(value or "")


def _closing(text: str, at: int) -> int:
    """Where the brace that is open here is closed."""
    depth = 1
    for end in range(at, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return end
    raise Refused(Code.INVALID_REQUEST, f"{text[at - 2 :][:80]!r}: its brace is not closed")

"""A value that must never be shown: its repr is `***`, and only `reveal()` gives it out."""

from __future__ import annotations


class Secret:
    """Wraps a string so that logs, errors, reprs and f-strings cannot leak it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The value itself; call it only where it is sent or compared."""
        return self._value

    def __repr__(self) -> str:
        return "***"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

"""Statements of the hot paths: compiled once, and run on SQLite by its own driver.

Theory of operation. `Connection.execute` looks up the compiled form, builds an execution context and wraps the result: five to ten times what
SQLite needs for the statement itself, and a create takes fifty of them. A `Prepared` compiles by the same dialect, once for each set of
parameter names, and converts parameters and columns by the same types; errors are wrapped as SQLAlchemy's. On any other database it is an
ordinary `execute`. What a statement may not have: parameters that expand (`IN` over a list), defaults that Python makes.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.sql.compiler import SQLCompiler

Parameters = Mapping[str, Any]
Row = Mapping[str, Any] | sa.RowMapping

_Convert = Callable[[Any], Any]


class _Compiled:
    """A statement as the driver takes it: SQL, and for each place in it the name, the fixed value and the conversion of its parameter."""

    __slots__ = ("places", "sql")

    def __init__(self, statement: sa.Executable, dialect: sa.Dialect, names: Sequence[str]) -> None:
        compiled = statement.compile(dialect=dialect, column_keys=list(names))  # type: ignore[attr-defined]
        assert isinstance(compiled, SQLCompiler)
        assert not compiled.post_compile_params, "a parameter that expands"
        assert not compiled.insert_prefetch, "a default that Python makes"
        assert not compiled.update_prefetch, "a default that Python makes"
        self.sql = str(compiled)
        self.places: Final[tuple[tuple[str, Any, _Convert | None], ...]] = tuple(
            (name, compiled.binds[name].effective_value, _writer(compiled.binds[name].type, dialect)) for name in compiled.positiontup or ()
        )

    def values(self, given: Parameters) -> list[Any]:
        found = []
        for name, fixed, convert in self.places:
            value = given.get(name, fixed)
            found.append(convert(value) if convert is not None else value)
        return found


class Prepared:
    """A statement to be run often. *Errors* of running it: those of `Connection.execute`.

    `unread`: columns of JSON that SQLite's rows hold as text, for who knows most texts already.
    """

    def __init__(
        self, statement: sa.Select[Any] | sa.Insert | sa.Update | sa.Delete | sa.TextClause, *, unread: Collection[str] = ()
    ) -> None:
        self._statement = statement
        self._unread = frozenset(unread)
        self._compiled: dict[tuple[str, ...], _Compiled] = {}
        self._columns: tuple[tuple[str, ...], tuple[tuple[str, _Convert], ...]] | None = None
        """The names of all, and the conversions of those that need one."""

    def first(self, conn: sa.Connection, given: Parameters | None = None) -> Row | None:
        """The first row, by names of columns; None when there is none."""
        driver = _driver(conn)
        if driver is None:
            return conn.execute(self._statement, given or {}).mappings().first()
        cursor = self._run(conn, driver, given or {})
        row = cursor.fetchone()
        cursor.close()
        return None if row is None else self._row(conn, row)

    def all(self, conn: sa.Connection, given: Parameters | None = None) -> Sequence[Row]:
        """Every row, by names of columns."""
        driver = _driver(conn)
        if driver is None:
            return conn.execute(self._statement, given or {}).mappings().all()
        cursor = self._run(conn, driver, given or {})
        found = cursor.fetchall()
        cursor.close()
        return [self._row(conn, row) for row in found]

    def run(self, conn: sa.Connection, given: Parameters | None = None) -> int:
        """How many rows it made or changed."""
        driver = _driver(conn)
        if driver is None:
            return conn.execute(self._statement, given or {}).rowcount
        cursor = self._run(conn, driver, given or {})
        count = cursor.rowcount
        cursor.close()
        return count

    def run_many(self, conn: sa.Connection, rows: Sequence[Parameters]) -> None:
        """Once for each of these, all with the same names."""
        driver = _driver(conn)
        if driver is None:
            conn.execute(self._statement, list(rows))
            return
        for row in rows:
            self._run(conn, driver, row).close()

    def _run(self, conn: sa.Connection, driver: sqlite3.Connection, given: Parameters) -> sqlite3.Cursor:
        names = tuple(given)
        compiled = self._compiled.get(names)
        if compiled is None:
            compiled = self._compiled[names] = _Compiled(self._statement, conn.dialect, names)
        values = compiled.values(given)
        try:
            return driver.execute(compiled.sql, values)
        except sqlite3.Error as error:
            raise _wrapped(error, compiled.sql, conn.dialect) from error

    def _row(self, conn: sa.Connection, row: Sequence[Any]) -> Row:
        columns = self._columns
        if columns is None:
            columns = self._columns = self._described(conn.dialect)
        names, converted = columns
        found = dict(zip(names, row, strict=True))
        for name, convert in converted:
            found[name] = convert(found[name])
        return found

    def _described(self, dialect: sa.Dialect) -> tuple[tuple[str, ...], tuple[tuple[str, _Convert], ...]]:
        assert isinstance(self._statement, sa.Select)
        columns = [(str(column.key), _reader(column.type, dialect)) for column in self._statement.selected_columns]
        wanted = ((name, convert) for name, convert in columns if convert is not None and name not in self._unread)
        return tuple(name for name, _ in columns), tuple(wanted)


def _writer(kind: sa.types.TypeEngine[Any], dialect: sa.Dialect) -> _Convert | None:
    convert = kind.dialect_impl(dialect).bind_processor(dialect)
    if convert is None or not isinstance(kind, sa.JSON):
        return convert
    # Most of what is written is empty, and an encoder costs more than to look.
    return lambda value: ("{}" if isinstance(value, dict) else "[]") if value in ({}, []) else convert(value)


def _reader(kind: sa.types.TypeEngine[Any], dialect: sa.Dialect) -> _Convert | None:
    return _from_json if isinstance(kind, sa.JSON) else kind.dialect_impl(dialect).result_processor(dialect, None)


def _from_json(text: str | None) -> Any:
    if text == "{}":
        return {}
    if text == "[]":
        return []
    return None if text is None else json.loads(text)


def _driver(conn: sa.Connection) -> sqlite3.Connection | None:
    found = conn.connection.driver_connection
    # A class of its own is somebody's who looks at every statement through SQLAlchemy's events.
    return found if type(found) is sqlite3.Connection else None


def _wrapped(error: sqlite3.Error, statement: str, dialect: sa.Dialect) -> BaseException:
    """As SQLAlchemy tells it; without the parameters, which may be secrets."""
    return sa.exc.DBAPIError.instance(statement, None, error, sqlite3.Error, hide_parameters=True, dialect=dialect)

"""Statements of the hot paths: compiled once, and run on SQLite by its own driver.

Theory of operation. `Connection.execute` looks up the compiled form, builds an execution context and wraps the result: five to ten times what
SQLite needs for the statement itself, and a create takes fifty of them. A `Prepared` compiles by the same dialect, once for each set of
parameter names, and converts parameters and columns by the same types; errors are wrapped as SQLAlchemy's. On any other database it is an
ordinary `execute`. What a statement may not have: parameters that expand (`IN` over a list), defaults that Python makes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
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
            (name, compiled.binds[name].effective_value, compiled.binds[name].type.dialect_impl(dialect).bind_processor(dialect))
            for name in compiled.positiontup or ()
        )

    def values(self, given: Parameters) -> list[Any]:
        found = []
        for name, fixed, convert in self.places:
            value = given.get(name, fixed)
            found.append(convert(value) if convert is not None else value)
        return found


class Prepared:
    """A statement to be run often. *Errors* of running it: those of `Connection.execute`."""

    def __init__(self, statement: sa.Select[Any] | sa.Insert | sa.Update | sa.Delete | sa.TextClause) -> None:
        self._statement = statement
        self._compiled: dict[tuple[str, ...], _Compiled] = {}
        self._columns: tuple[tuple[str, _Convert | None], ...] | None = None

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
            assert isinstance(self._statement, sa.Select)
            columns = self._columns = tuple(
                (str(column.key), column.type.dialect_impl(conn.dialect).result_processor(conn.dialect, None))
                for column in self._statement.selected_columns
            )
        return {name: value if convert is None else convert(value) for (name, convert), value in zip(columns, row, strict=True)}


def _driver(conn: sa.Connection) -> sqlite3.Connection | None:
    found = conn.connection.driver_connection
    # A class of its own is somebody's who looks at every statement through SQLAlchemy's events.
    return found if type(found) is sqlite3.Connection else None


def _wrapped(error: sqlite3.Error, statement: str, dialect: sa.Dialect) -> BaseException:
    """As SQLAlchemy tells it; without the parameters, which may be secrets."""
    return sa.exc.DBAPIError.instance(statement, None, error, sqlite3.Error, hide_parameters=True, dialect=dialect)

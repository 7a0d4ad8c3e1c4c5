"""Sandboxes as rows: each column from its field, and of a change only what differs."""

import dataclasses

from atoll.base.ids import HostId
from atoll.domain.moment import Moment
from atoll.domain.sandbox import Condition, State
from atoll.domain.spec import SaveMode
from atoll.store import rows
from atoll.store.tables import SANDBOXES
from tests.builders import sandbox

CHANGES = {
    "state": (State.READY, {"state": "ready"}),
    "conditions": (frozenset({Condition.UNREACHABLE, Condition.CLEANUP_PENDING}), {"conditions": ["CLEANUP_PENDING", "UNREACHABLE"]}),
    "metadata": ({"a": "b"}, {"metadata": {"a": "b"}}),
    "tried_hosts": (("h1", "h2"), {"tried_hosts": ["h1", "h2"]}),
    "detail": ("x" * 3000, {"detail": "x" * 2000}),
    "rested": (State.PAUSED, {"rested": "paused"}),
    "save_mode": (SaveMode.FULL, {"save_mode": SaveMode.FULL.value}),
    "moment": (Moment("sha256:1", 7, "runsc"), {"moment": "sha256:1", "moment_bytes": 7, "moment_kind": "runsc"}),
    "host_id": (HostId("host_1"), {"host_id": "host_1"}),
    "end_at": (12.5, {"end_at": 12.5}),
}


def test_every_column_is_written_but_those_that_are_written_elsewhere() -> None:
    columns = {column.name for column in SANDBOXES.columns} - {"id", "spec", "revision"}
    assert set(rows.sandbox_values(sandbox())) == columns


def test_a_sandbox_comes_back_as_it_was() -> None:
    whole = dataclasses.replace(sandbox(), **{name: said for name, (said, _) in CHANGES.items() if name != "detail"})
    row = {"id": whole.id, "revision": whole.revision, "spec": rows.spec_values(whole.spec), **rows.sandbox_values(whole)}
    assert rows.sandbox(row) == whole


def test_of_a_change_only_what_differs_is_written() -> None:
    before = sandbox()
    for name, (said, columns) in CHANGES.items():
        after = dataclasses.replace(before, **{name: said})
        assert rows.sandbox_changes(before, after) == columns
        assert rows.sandbox_changes(after, dataclasses.replace(after)) == {}
    all_at_once = dataclasses.replace(before, **{name: said for name, (said, _) in CHANGES.items()})
    assert rows.sandbox_changes(before, all_at_once) == {name: value for _, columns in CHANGES.values() for name, value in columns.items()}

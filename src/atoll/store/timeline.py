"""The wall clock that records were written by, from one control process to the next.

Theory of operation. A control process counts wall time on from its beginning and never sees a step. Before the next one reads a row, it
says what its own clock shows for the kernel's boot; another value than the last one's, in the same boot, is a step, and everything that
somebody still waits for is moved by it. So what was left of an end, a deadline or a lease is left of it still. After another boot nothing
can be compared, and nothing is moved. History (created, started, released, events) keeps the time that its clock showed.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from atoll.domain.sandbox import LIVING, State
from atoll.store.tables import COPIES, DEPLOYMENT, ENROLLMENTS, HOSTS, SANDBOXES, SNAPSHOTS, TEMPLATE_BUILDS, WARM_POLICIES

UNNOTICED_S: Final = 1.0
"""Less is how time daemons turn a clock."""
SAME_S: Final = 0.01
"""Less is how exactly the two clocks were read: nothing to note."""
MOVED: Final[tuple[tuple[sa.Table, tuple[str, ...], sa.ColumnElement[bool] | None], ...]] = (
    (
        SANDBOXES,
        ("end_at", "deadline_at", "release_requested_at"),
        SANDBOXES.c.state.in_([state.value for state in LIVING]),
    ),
    # How long it has waited for room is counted from when it was accepted, or replaced.
    (
        SANDBOXES,
        ("created_at", "waiting_since"),
        SANDBOXES.c.state.in_([State.PENDING.value, State.RESERVING.value]),
    ),
    (SNAPSHOTS, ("deadline_at",), SNAPSHOTS.c.ended_at.is_(None)),
    # A builder that is not heard of any more loses its build.
    (TEMPLATE_BUILDS, ("beat_at",), TEMPLATE_BUILDS.c.owner.is_not(None)),
    # Since when too few are made ahead: told when that lasts.
    (WARM_POLICIES, ("short_since",), None),
    # A head start that nothing has begun from for a while gives back its disk.
    (COPIES, ("used_at",), None),
    (HOSTS, ("seen_at", "lease_until"), None),
    (ENROLLMENTS, ("expires_at",), ENROLLMENTS.c.used_at.is_(None)),
)
"""Tables, their columns that somebody waits for, and of which rows. All other times are history, or begin anew with each process."""


def carry_over(conn: sa.Connection, *, boot_id: str, zero_at: float) -> float:
    """Note that it was `zero_at` by the wall when the kernel booted, and move what waits by the step since that was noted last; the step.

    *Units*: seconds. *Idempotency*: the second call finds no step. Only before anything else uses the database.
    """
    row = conn.execute(sa.select(DEPLOYMENT.c.clock_boot_id, DEPLOYMENT.c.clock_zero_at)).one()
    comparable = row.clock_boot_id == boot_id
    step_s = float(zero_at - row.clock_zero_at) if comparable else 0.0
    if comparable and abs(step_s) < SAME_S:
        return 0.0
    conn.execute(sa.update(DEPLOYMENT).values(clock_boot_id=boot_id, clock_zero_at=zero_at))
    if abs(step_s) < UNNOTICED_S:
        return 0.0
    _move(conn, step_s)
    return step_s


def _move(conn: sa.Connection, step_s: float) -> None:
    for table, names, which in MOVED:
        query = sa.update(table).values({name: table.c[name] + step_s for name in names})
        conn.execute(query if which is None else query.where(which))

"""How many sandboxes live and are on record, by client, team and deployment"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_LIVING = "COALESCE(SUM(CASE WHEN state IN ('released', 'failed') THEN 0 ELSE 1 END), 0)"


def upgrade() -> None:
    op.create_table(
        "tallies",
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("slot", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("living", sa.Integer(), nullable=False),
        sa.Column("records", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("scope", "slot", name=op.f("pk_tallies")),
    )
    for scope, place, grouped in (("'deployment'", 0, ""), ("team_id", 1, "GROUP BY team_id"), ("client_id", 2, "GROUP BY client_id")):
        op.execute(
            f"INSERT INTO tallies (scope, slot, place, living, records) "  # noqa: S608 - of constants
            f"SELECT {scope}, 0, {place}, {_LIVING}, COUNT(*) FROM sandboxes {grouped}"
        )

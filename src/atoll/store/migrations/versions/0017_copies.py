"""Copies of snapshots that hosts have fetched"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # What hosts have fetched before is put on record when they next name what they have, which they do as they begin.
    op.create_table(
        "copies",
        sa.Column("host_id", sa.Text(), nullable=False),
        sa.Column("snapshot_id", sa.Text(), nullable=False),
        sa.Column("disk_mib", sa.Integer(), nullable=False),
        sa.Column("used_at", sa.Float(), nullable=False),
        sa.Column("leaving", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["host_id"], ["hosts.id"], name="fk_copies_host_id_hosts"),
        sa.PrimaryKeyConstraint("host_id", "snapshot_id", name="pk_copies"),
    )

"""Snapshots of sandboxes"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "snapshots",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.Column("sandbox_id", sa.Text(), nullable=False),
        sa.Column("placement_id", sa.Text(), nullable=False),
        sa.Column("host_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("env", sa.JSON(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("held_disk_mib", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("taken_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("deadline_at", sa.Float(), nullable=True),
        sa.Column("code", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name=op.f("fk_snapshots_team_id")),
        sa.ForeignKeyConstraint(["host_id"], ["hosts.id"], name=op.f("fk_snapshots_host_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_snapshots")),
    )
    for column in ("sandbox_id", "ended_at", "deadline_at"):
        op.create_index(op.f(f"ix_snapshots_{column}"), "snapshots", [column], unique=False)
    op.create_index("ix_snapshots_team_state", "snapshots", ["team_id", "state", "created_at"], unique=False)
    op.create_index("ix_snapshots_host_state", "snapshots", ["host_id", "state"], unique=False)

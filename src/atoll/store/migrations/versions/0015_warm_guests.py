"""Guests that are made ahead, and how many there should be"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sandboxes", sa.Column("claimable", sa.Text(), nullable=True))
    op.create_table(
        "warm_policies",
        sa.Column("template_id", sa.Text(), nullable=False),
        sa.Column("class_name", sa.Text(), nullable=False),
        sa.Column("cpu_millis", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("memory_mib", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("disk_mib", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.Column("short_since", sa.Float(), nullable=True),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("template_id", "class_name", "cpu_millis", "memory_mib", "disk_mib", name=op.f("pk_warm_policies")),
    )

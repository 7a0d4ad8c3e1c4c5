"""The deployment document, with its history; limits of teams are in it now"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "configurations",
        sa.Column("revision", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("applied_at", sa.Float(), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("revision", name=op.f("pk_configurations")),
    )
    for column in ("max_sandboxes", "max_records", "requests_per_s"):
        op.drop_column("teams", column)

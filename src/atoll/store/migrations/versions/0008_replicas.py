"""Control processes that share the database, and restores from backups"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "replicas",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("machine", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replicas")),
    )
    op.create_table(
        "revoked_credentials",
        sa.Column("credential_digest", sa.Text(), nullable=False),
        sa.Column("host_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("credential_digest", name=op.f("pk_revoked_credentials")),
    )
    op.add_column("deployment", sa.Column("restored_at", sa.Float(), nullable=True))

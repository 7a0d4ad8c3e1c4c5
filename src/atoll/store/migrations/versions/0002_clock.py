"""Which clock the records were written by"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("deployment", sa.Column("clock_boot_id", sa.Text(), nullable=True))
    op.add_column("deployment", sa.Column("clock_zero_at", sa.Float(), nullable=True))

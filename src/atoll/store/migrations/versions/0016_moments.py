"""Moments in the artifact store"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("sandboxes", "snapshots"):
        op.add_column(table, sa.Column("moment", sa.Text(), nullable=True))
        op.add_column(table, sa.Column("moment_bytes", sa.BigInteger(), nullable=False, server_default="0"))
        op.add_column(table, sa.Column("moment_kind", sa.Text(), nullable=False, server_default=""))
    op.add_column("sandboxes", sa.Column("saved_on", sa.Text(), nullable=True))
    op.add_column("snapshots", sa.Column("copy", sa.Text(), nullable=False, server_default="here"))
    op.add_column("placements", sa.Column("moment", sa.Text(), nullable=True))
    op.add_column("placements", sa.Column("origin_moment", sa.Text(), nullable=True))
    op.add_column("hosts", sa.Column("moments", sa.JSON(), nullable=False, server_default="[]"))

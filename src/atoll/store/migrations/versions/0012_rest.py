"""What a sandbox at rest goes on from, and how it was saved"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sandboxes", sa.Column("rested", sa.Text(), nullable=True))
    op.add_column("sandboxes", sa.Column("life_s", sa.Float(), nullable=True))
    op.add_column("sandboxes", sa.Column("save_mode", sa.Text(), nullable=True))
    op.add_column("sandboxes", sa.Column("unresponsive", sa.Boolean(), nullable=False, server_default=sa.false()))

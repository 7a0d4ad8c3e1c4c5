"""To whom a payload was given, and whether its guest has it"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("payloads", sa.Column("exposes", sa.Boolean(), nullable=False, server_default=sa.true()))
    op.add_column("payloads", sa.Column("delivery", sa.Text(), nullable=True))
    op.add_column("payloads", sa.Column("delivered_to", sa.Text(), nullable=True))
    op.add_column("payloads", sa.Column("receipt", sa.Text(), nullable=True))

"""Replacement after a loss: since when a sandbox waits, and what of it was not seen gone; digests of requests are keyed from here on"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sandboxes", sa.Column("waiting_since", sa.Float(), nullable=True))
    op.add_column("sandboxes", sa.Column("unseen", sa.Integer(), nullable=False, server_default="0"))
    # Without a key they gave whoever read them a way to try out environment values; a repeated request of before is taken by its id alone.
    op.execute("UPDATE sandboxes SET request_digest = NULL")

"""What a host registered, and what a token was used for"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("hosts", sa.Column("registered", sa.JSON(), nullable=True))
    op.add_column("enrollments", sa.Column("form_digest", sa.Text(), nullable=True))
    op.create_index("ix_enrollments_expires", "enrollments", ["expires_at"])

"""Templates made of images, and the imports that make them"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("templates", sa.Column("env", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("templates", sa.Column("command", sa.JSON(), nullable=False, server_default="[]"))
    op.add_column("templates", sa.Column("source", sa.Text(), nullable=False, server_default=""))
    op.create_table(
        "template_imports",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("log", sa.JSON(), nullable=False),
        sa.Column("code", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("template_id", sa.Text(), nullable=True),
        sa.Column("image", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name=op.f("fk_template_imports_team_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_template_imports")),
    )
    op.create_index(op.f("ix_template_imports_team_id"), "template_imports", ["team_id"], unique=False)

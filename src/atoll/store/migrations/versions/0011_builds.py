"""Builds of templates, their logs, tags and the cache of steps"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("templates", sa.Column("command_user", sa.Text(), nullable=False, server_default=""))
    op.add_column("templates", sa.Column("ready_command", sa.JSON(), nullable=False, server_default="[]"))
    op.create_table(
        "template_builds",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("template_id", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("cpu_millis", sa.Integer(), nullable=False),
        sa.Column("memory_mib", sa.Integer(), nullable=False),
        sa.Column("disk_mib", sa.Integer(), nullable=False),
        sa.Column("recipe", sa.JSON(), nullable=True),
        sa.Column("sealed", sa.LargeBinary(), nullable=True),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("beat_at", sa.Float(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("code", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("failed_step", sa.Text(), nullable=True),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.Column("image", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name=op.f("fk_template_builds_team_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_template_builds")),
    )
    for column in ("template_id", "team_id", "state"):
        op.create_index(op.f(f"ix_template_builds_{column}"), "template_builds", [column], unique=False)
    op.create_table(
        "template_build_lines",
        sa.Column("build_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("step", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["build_id"], ["template_builds.id"], name=op.f("fk_template_build_lines_build_id")),
        sa.PrimaryKeyConstraint("build_id", "seq", name=op.f("pk_template_build_lines")),
    )
    op.create_table(
        "template_tags",
        sa.Column("template_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("build_id", sa.Text(), nullable=False),
        sa.Column("assigned_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("template_id", "name", name=op.f("pk_template_tags")),
    )
    op.create_table(
        "template_steps",
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("image", sa.Text(), nullable=False),
        sa.Column("used_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name=op.f("fk_template_steps_team_id")),
        sa.PrimaryKeyConstraint("team_id", "key", name=op.f("pk_template_steps")),
    )
    op.create_index(op.f("ix_template_steps_used_at"), "template_steps", ["used_at"], unique=False)

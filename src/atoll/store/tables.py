"""The schema. Times are wall seconds (float); enums and lists are text and JSON; secrets are sealed bytes or digests, never clear."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from atoll.domain.placement import Holding

METADATA: Final = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

DEPLOYMENT: Final = sa.Table(
    "deployment",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("install_id", sa.Text, nullable=False),
    sa.Column("incarnation", sa.Text, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("restored_at", sa.Float),
    sa.Column("clock_boot_id", sa.Text),
    sa.Column("clock_zero_at", sa.Float),
)

CONFIGURATIONS: Final = sa.Table(
    "configurations",
    METADATA,
    sa.Column("revision", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("document", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("settings", sa.JSON, nullable=False),
    sa.Column("applied_at", sa.Float, nullable=False),
    sa.Column("client_id", sa.Text, nullable=False),
)

REPLICAS: Final = sa.Table(
    "replicas",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("address", sa.Text, nullable=False),
    sa.Column("machine", sa.Text, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("seen_at", sa.Float, nullable=False),
)

TEAMS: Final = sa.Table(
    "teams",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("created_at", sa.Float, nullable=False),
)

CLIENTS: Final = sa.Table(
    "clients",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("team_id", sa.Text, sa.ForeignKey("teams.id"), nullable=False, index=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("key_digest", sa.Text, nullable=False, unique=True),
    sa.Column("key_hint", sa.Text, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("revoked_at", sa.Float),
)

TEMPLATES: Final = sa.Table(
    "templates",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("team_id", sa.Text, sa.ForeignKey("teams.id"), index=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("aliases", sa.JSON, nullable=False),
    sa.Column("public", sa.Boolean, nullable=False),
    sa.Column("build_id", sa.Text, nullable=False),
    sa.Column("image", sa.Text, nullable=False),
    sa.Column("cpu_millis", sa.Integer, nullable=False),
    sa.Column("memory_mib", sa.Integer, nullable=False),
    sa.Column("disk_mib", sa.Integer, nullable=False),
    sa.Column("default_user", sa.Text, nullable=False),
    sa.Column("default_workdir", sa.Text),
    sa.Column("env", sa.JSON, nullable=False, server_default="{}"),
    sa.Column("command", sa.JSON, nullable=False, server_default="[]"),
    sa.Column("source", sa.Text, nullable=False, server_default=""),
    sa.Column("command_user", sa.Text, nullable=False, server_default=""),
    sa.Column("ready_command", sa.JSON, nullable=False, server_default="[]"),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("updated_at", sa.Float, nullable=False),
    sa.Column("spawn_count", sa.Integer, nullable=False, server_default="0"),
    sa.Column("last_spawned_at", sa.Float),
)

TEMPLATE_IMPORTS: Final = sa.Table(
    "template_imports",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("team_id", sa.Text, sa.ForeignKey("teams.id"), nullable=False, index=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("log", sa.JSON, nullable=False),
    sa.Column("code", sa.Text),
    sa.Column("message", sa.Text),
    sa.Column("template_id", sa.Text),
    sa.Column("image", sa.Text),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("finished_at", sa.Float),
)

TEMPLATE_BUILDS: Final = sa.Table(
    "template_builds",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("template_id", sa.Text, nullable=False, index=True),
    sa.Column("team_id", sa.Text, sa.ForeignKey("teams.id"), nullable=False, index=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("tags", sa.JSON, nullable=False),
    sa.Column("state", sa.Text, nullable=False, index=True),
    sa.Column("cpu_millis", sa.Integer, nullable=False),
    sa.Column("memory_mib", sa.Integer, nullable=False),
    sa.Column("disk_mib", sa.Integer, nullable=False),
    sa.Column("recipe", sa.JSON),
    sa.Column("sealed", sa.LargeBinary),
    sa.Column("owner", sa.Text),
    sa.Column("beat_at", sa.Float),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("started_at", sa.Float),
    sa.Column("finished_at", sa.Float),
    sa.Column("code", sa.Text),
    sa.Column("message", sa.Text),
    sa.Column("failed_step", sa.Text),
    sa.Column("result", sa.JSON),
    sa.Column("image", sa.Text),
)

TEMPLATE_BUILD_LINES: Final = sa.Table(
    "template_build_lines",
    METADATA,
    sa.Column("build_id", sa.Text, sa.ForeignKey("template_builds.id"), primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("level", sa.Text, nullable=False),
    sa.Column("step", sa.Text),
    sa.Column("message", sa.Text, nullable=False),
)

TEMPLATE_TAGS: Final = sa.Table(
    "template_tags",
    METADATA,
    sa.Column("template_id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("build_id", sa.Text, nullable=False),
    sa.Column("assigned_at", sa.Float, nullable=False),
)

TEMPLATE_STEPS: Final = sa.Table(
    "template_steps",
    METADATA,
    sa.Column("team_id", sa.Text, sa.ForeignKey("teams.id"), primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("image", sa.Text, nullable=False),
    sa.Column("used_at", sa.Float, nullable=False, index=True),
)

TEMPLATE_STEP_LOCKS: Final = sa.Table(
    "template_step_locks",
    METADATA,
    sa.Column("team_id", sa.Text, sa.ForeignKey("teams.id"), primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("build_id", sa.Text, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
)

HOSTS: Final = sa.Table(
    "hosts",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("admin", sa.Text, nullable=False),
    sa.Column("cpu_millis", sa.Integer, nullable=False),
    sa.Column("memory_mib", sa.Integer, nullable=False),
    sa.Column("disk_mib", sa.Integer, nullable=False),
    sa.Column("slots", sa.Integer, nullable=False),
    sa.Column("arch", sa.Text, nullable=False),
    sa.Column("region", sa.Text, nullable=False),
    sa.Column("labels", sa.JSON, nullable=False),
    sa.Column("credential_digest", sa.Text, unique=True),
    sa.Column("credential_version", sa.Integer, nullable=False),
    sa.Column("epoch", sa.Text),
    sa.Column("poll_seq", sa.Integer, nullable=False),
    sa.Column("seen_at", sa.Float),
    sa.Column("lease_until", sa.Float),
    sa.Column("agent_version", sa.Text),
    sa.Column("protocol_min", sa.Integer, nullable=False),
    sa.Column("protocol_max", sa.Integer, nullable=False),
    sa.Column("isolations", sa.JSON, nullable=False),
    sa.Column("moments", sa.JSON, nullable=False, server_default="[]"),
    sa.Column("images", sa.JSON, nullable=False),
    sa.Column("problems", sa.JSON, nullable=False),
    sa.Column("facts", sa.JSON, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("registered", sa.JSON),
)

HOST_EPOCHS: Final = sa.Table(
    "host_epochs",
    METADATA,
    sa.Column("host_id", sa.Text, sa.ForeignKey("hosts.id"), primary_key=True),
    sa.Column("epoch", sa.Text, primary_key=True),
    sa.Column("ended_at", sa.Float, nullable=False),
)

REVOKED_CREDENTIALS: Final = sa.Table(
    "revoked_credentials",
    METADATA,
    sa.Column("credential_digest", sa.Text, primary_key=True),
    sa.Column("host_id", sa.Text, nullable=False),
)

ENROLLMENTS: Final = sa.Table(
    "enrollments",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("token_digest", sa.Text, nullable=False, unique=True),
    sa.Column("host_name", sa.Text, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
    sa.Column("used_at", sa.Float),
    sa.Column("host_id", sa.Text),
    sa.Column("form_digest", sa.Text),
    sa.Index("ix_enrollments_expires", "expires_at"),
)

SANDBOXES: Final = sa.Table(
    "sandboxes",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("team_id", sa.Text, sa.ForeignKey("teams.id"), nullable=False),
    sa.Column("client_id", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("spec", sa.JSON, nullable=False),
    sa.Column("generation", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("end_at", sa.Float),
    sa.Column("end_revision", sa.Integer, nullable=False),
    sa.Column("request_id", sa.Text),
    sa.Column("request_digest", sa.Text),
    sa.Column("alias", sa.Text),
    sa.Column("metadata", sa.JSON, nullable=False),
    sa.Column("payload_digest", sa.Text),
    sa.Column("started_at", sa.Float),
    sa.Column("released_at", sa.Float),
    sa.Column("host_id", sa.Text),
    sa.Column("placement_id", sa.Text),
    sa.Column("reason", sa.Text),
    sa.Column("detail", sa.Text),
    sa.Column("release_requested_at", sa.Float),
    sa.Column("failing", sa.Boolean, nullable=False),
    sa.Column("conditions", sa.JSON, nullable=False),
    sa.Column("deadline_at", sa.Float, index=True),
    sa.Column("tried_hosts", sa.JSON, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("bootstrap_exposed", sa.Boolean, nullable=False),
    sa.Column("secured", sa.Boolean, nullable=False),
    sa.Column("waiting_since", sa.Float),
    sa.Column("unseen", sa.Integer, nullable=False, server_default="0"),
    sa.Column("rested", sa.Text),
    sa.Column("life_s", sa.Float),
    sa.Column("save_mode", sa.Text),
    sa.Column("unresponsive", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("moment", sa.Text),
    sa.Column("moment_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("moment_kind", sa.Text, nullable=False, server_default=""),
    sa.Column("saved_on", sa.Text),
    sa.Column("claimable", sa.Text),
    sa.UniqueConstraint("team_id", "request_id"),
    sa.Index("ix_sandboxes_team_state", "team_id", "state", "started_at"),
    sa.Index("ix_sandboxes_state_released", "state", "released_at"),
)

WARM_POLICIES: Final = sa.Table(
    "warm_policies",
    METADATA,
    sa.Column("template_id", sa.Text, primary_key=True),
    sa.Column("class_name", sa.Text, primary_key=True),
    sa.Column("cpu_millis", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("memory_mib", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("disk_mib", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("count", sa.Integer, nullable=False),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("updated_at", sa.Float, nullable=False),
    sa.Column("short_since", sa.Float),
    sa.Column("problem", sa.Text),
)

PLACEMENTS: Final = sa.Table(
    "placements",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("sandbox_id", sa.Text, sa.ForeignKey("sandboxes.id"), nullable=False, index=True),
    sa.Column("host_id", sa.Text, sa.ForeignKey("hosts.id"), nullable=False),
    sa.Column("generation", sa.Integer, nullable=False),
    sa.Column("holding", sa.Text, nullable=False),
    sa.Column("cpu_millis", sa.Integer, nullable=False),
    sa.Column("memory_mib", sa.Integer, nullable=False),
    sa.Column("disk_mib", sa.Integer, nullable=False),
    sa.Column("slots", sa.Integer, nullable=False),
    sa.Column("held_cpu_millis", sa.Integer, nullable=False),
    sa.Column("held_memory_mib", sa.Integer, nullable=False),
    sa.Column("held_disk_mib", sa.Integer, nullable=False),
    sa.Column("held_slots", sa.Integer, nullable=False),
    sa.Column("nonce", sa.Text, nullable=False),
    sa.Column("moment", sa.Text),
    sa.Column("origin_moment", sa.Text),
    sa.Column("desired", sa.Text, nullable=False),
    sa.Column("desired_revision", sa.Integer, nullable=False),
    sa.Column("desired_reason", sa.Text),
    sa.Column("observed", sa.Text, nullable=False),
    sa.Column("seq", sa.Integer, nullable=False),
    sa.Column("applied_revision", sa.Integer, nullable=False),
    sa.Column("address", sa.Text),
    sa.Column("reason", sa.Text),
    sa.Column("detail", sa.Text),
    sa.Column("ready", sa.Boolean, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("gone_at", sa.Float),
    sa.UniqueConstraint("sandbox_id", "generation", "host_id"),
    sa.Index("ix_placements_host_holding", "host_id", "holding"),
)

SNAPSHOTS: Final = sa.Table(
    "snapshots",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("team_id", sa.Text, sa.ForeignKey("teams.id"), nullable=False),
    sa.Column("client_id", sa.Text, nullable=False),
    sa.Column("sandbox_id", sa.Text, nullable=False, index=True),
    sa.Column("placement_id", sa.Text, nullable=False),
    sa.Column("host_id", sa.Text, sa.ForeignKey("hosts.id"), nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("purpose", sa.Text, nullable=False),
    sa.Column("mode", sa.Text, nullable=False),
    sa.Column("spec", sa.JSON, nullable=False),
    sa.Column("name", sa.Text),
    sa.Column("tag", sa.Text, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("env", sa.JSON, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("held_disk_mib", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("taken_at", sa.Float),
    sa.Column("ended_at", sa.Float, index=True),
    sa.Column("deadline_at", sa.Float, index=True),
    sa.Column("code", sa.Text),
    sa.Column("message", sa.Text),
    sa.Column("moment", sa.Text),
    sa.Column("moment_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("moment_kind", sa.Text, nullable=False, server_default=""),
    sa.Column("copy", sa.Text, nullable=False, server_default="here"),
    sa.Index("ix_snapshots_team_state", "team_id", "state", "created_at"),
    sa.Index("ix_snapshots_host_state", "host_id", "state"),
)

COPIES: Final = sa.Table(
    "copies",
    METADATA,
    sa.Column("host_id", sa.Text, sa.ForeignKey("hosts.id"), primary_key=True),
    sa.Column("snapshot_id", sa.Text, primary_key=True),
    sa.Column("disk_mib", sa.Integer, nullable=False),
    sa.Column("used_at", sa.Float, nullable=False),
    sa.Column("leaving", sa.Boolean, nullable=False),
)

HOLDS: Final = sa.or_(*(PLACEMENTS.c.holding == holding.value for holding in Holding if holding is not Holding.NONE))
"""A placement that holds something. Not "is not none": an index finds these few, and would walk every one that has ended."""

TALLIES: Final = sa.Table(
    "tallies",
    METADATA,
    sa.Column("scope", sa.Text, primary_key=True),
    sa.Column("slot", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("place", sa.Integer, nullable=False),
    sa.Column("living", sa.Integer, nullable=False),
    sa.Column("records", sa.Integer, nullable=False),
)

PAYLOADS: Final = sa.Table(
    "payloads",
    METADATA,
    sa.Column("sandbox_id", sa.Text, sa.ForeignKey("sandboxes.id"), primary_key=True),
    sa.Column("sealed", sa.LargeBinary, nullable=False),
    sa.Column("exposes", sa.Boolean, nullable=False, server_default=sa.true()),
    sa.Column("delivery", sa.Text),
    sa.Column("delivered_to", sa.Text),
    sa.Column("receipt", sa.Text),
)

EVENTS: Final = sa.Table(
    "events",
    METADATA,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("sandbox_id", sa.Text, nullable=False),
    sa.Column("team_id", sa.Text, nullable=False),
    sa.Column("generation", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("reason", sa.Text),
    sa.Column("data", sa.JSON, nullable=False),
    sa.Column("host_id", sa.Text),
    sa.Column("placement_id", sa.Text),
    sa.Column("command_id", sa.Text),
    sa.Column("request_id", sa.Text),
    sa.Index("ix_events_sandbox_seq", "sandbox_id", "seq"),
    sqlite_autoincrement=True,
)

AUDIT: Final = sa.Table(
    "audit",
    METADATA,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("result", sa.Text, nullable=False),
    sa.Column("team_id", sa.Text),
    sa.Column("client_id", sa.Text),
    sa.Column("address", sa.Text),
    sa.Column("request_id", sa.Text),
    sa.Column("data", sa.JSON, nullable=False),
    sa.Index("ix_audit_subject_seq", "subject", "seq"),
    sqlite_autoincrement=True,
)

ALERTS: Final = sa.Table(
    "alerts",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("severity", sa.Text, nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
    sa.Column("raised_at", sa.Float, nullable=False),
    sa.Column("seen_at", sa.Float, nullable=False),
    sa.Column("cleared_at", sa.Float),
    # One open alert for each kind and subject, whichever replica raises it.
    sa.Index(
        "uq_alerts_open",
        "kind",
        "subject",
        unique=True,
        sqlite_where=sa.text("cleared_at IS NULL"),
        postgresql_where=sa.text("cleared_at IS NULL"),
    ),
    sa.Index("ix_alerts_cleared_at", "cleared_at"),
)

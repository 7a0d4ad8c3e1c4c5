"""Alembic's entry: runs on the connection that `store.schema.migrate` hands over."""

from __future__ import annotations

from alembic import context

from atoll.store.tables import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()

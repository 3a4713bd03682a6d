"""Run by Alembic, over a connection that `service.ledger.migrate` hands in."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from service.ledger.tables import metadata

connection: Connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()

"""Run by Alembic, over a connection that `service.ledger.migrate` hands in."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from service.ledger.tables import metadata

MIGRATION_LOCK = 0x7469_6465_7363_6865


def _alone(connection: Connection) -> None:
    """Let one replica migrate; the others wait here, and then find that it is done."""
    if connection.dialect.name == "postgresql":
        # The session's own timeouts are for transactions that somebody waits for.
        connection.exec_driver_sql("SET LOCAL lock_timeout = '60s'")
        connection.exec_driver_sql("SET LOCAL statement_timeout = '60s'")
        # Ends with the transaction, so together with the schema's change.
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
    elif connection.dialect.name == "sqlite":
        # Python's SQLite begins no transaction for a DDL statement by itself, so that a migration that
        # is killed would leave its half behind.
        connection.exec_driver_sql("BEGIN IMMEDIATE")


connection: Connection = context.config.attributes["connection"]
_alone(connection)
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()

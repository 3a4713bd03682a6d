"""Bring a ledger's schema up to date with the migrations that this release carries."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection

from service.errors import StoreRefusedError

_HERE = Path(__file__).resolve().parent.parent

# Alembic keeps the migration that runs in a global variable: one at a time in a process, whatever the
# thread or the event loop. Between processes it is `migrations/env.py` that keeps them apart.
_GATE = threading.Lock()
_POLL_S = 0.01


def migrations_folder() -> Path:
    """Find the migrations: inside the installed package, or beside it in a checkout."""
    packaged = _HERE / "migrations"
    return packaged if packaged.is_dir() else _HERE.parent / "migrations"


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Upgrade the schema behind `connection`, within its transaction."""
    with _GATE:
        run_migrations(connection, revision)


@asynccontextmanager
async def migrating() -> AsyncGenerator[None]:
    """Keep others of this process from migrating, without stopping the event loop for it.

    Taken before there is a connection: no transaction stands open while this waits.
    """
    while not _GATE.acquire(blocking=False):  # noqa: ASYNC110 - it is a lock of threads
        await asyncio.sleep(_POLL_S)
    try:
        yield
    finally:
        _GATE.release()


def run_migrations(connection: Connection, revision: str = "head") -> None:
    """Upgrade, inside of `migrating`."""
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, revision)
    except CommandError as error:
        raise StoreRefusedError(
            f"the ledger's schema is not one that this release knows ({error}): was it upgraded by a"
            " newer release? Use that one"
        ) from error

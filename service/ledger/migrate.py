"""Migration of a ledger's schema to this release's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection

from service.errors import StoreRefusedError

_HERE = Path(__file__).resolve().parent.parent

# Alembic keeps the running migration in a global variable, so a process may run only one at a time, in
# any thread or event loop. `migrations/env.py` takes a lock between processes.
_LOCK = threading.Lock()
_POLL_S = 0.01


def migrations_folder() -> Path:
    """Return the folder of the migrations: inside the installed package, or beside it in a checkout."""
    packaged = _HERE / "migrations"
    return packaged if packaged.is_dir() else _HERE.parent / "migrations"


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Upgrade the schema behind `connection`, within its transaction."""
    with _LOCK:
        run_migrations(connection, revision)


def newest_revision() -> str:
    """Return the revision of this release's schema."""
    script = ScriptDirectory(str(migrations_folder()))
    return script.get_current_head() or ""


@asynccontextmanager
async def migrating() -> AsyncGenerator[None]:
    """Hold the lock of this process without blocking the event loop.

    Entered before a connection is made, so that no transaction stays open during the wait.
    """
    while not _LOCK.acquire(blocking=False):  # noqa: ASYNC110 - a lock between threads
        await asyncio.sleep(_POLL_S)
    try:
        yield
    finally:
        _LOCK.release()


def run_migrations(connection: Connection, revision: str = "head") -> None:
    """Upgrade the schema, with the lock of `migrating` held."""
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, revision)
    except CommandError as error:
        raise StoreRefusedError(
            f"the ledger's schema is unknown to this release ({error}): if it was upgraded by a"
            " newer release, use the newer one"
        ) from error

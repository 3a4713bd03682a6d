"""Bring a ledger's schema up to date with the migrations that this release carries."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

_HERE = Path(__file__).resolve().parent.parent


def migrations_folder() -> Path:
    """Find the migrations: inside the installed package, or beside it in a checkout."""
    packaged = _HERE / "migrations"
    return packaged if packaged.is_dir() else _HERE.parent / "migrations"


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Upgrade the schema behind `connection`, within its transaction."""
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)

"""Limits of a session on Postgres: set after connecting, and checked to hold.

Given as startup parameters (`options`), the limits would be rejected or silently dropped by a pooler
such as PgBouncer. A pooler that gives each transaction another connection to the server cannot keep
them at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from secrets import token_hex
from typing import Final, Protocol

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from service.errors import StoreRefusedError

LIMITS: Final[Mapping[str, str]] = {
    "statement_timeout": "5s",
    "lock_timeout": "3s",
    # A replica that dies in the middle of a transaction must not lock a job's row for long, ...
    "idle_in_transaction_session_timeout": "10s",
    # ... nor the whole ledger, if it had taken that exclusively.
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
}
"""Settings of each session, unless the `options` of the ledger's URL set them."""

_TAG: Final = "tidegauge.session"
_SET_TAG: Final = text(f"SELECT set_config('{_TAG}', :tag, false)")
_READ_TAG: Final = text(f"SELECT current_setting('{_TAG}', true)")


class _Cursor(Protocol):
    def execute(self, statement: str, /) -> object: ...
    def close(self) -> object: ...


class RawConnection(Protocol):
    """The used part of a driver's connection."""

    def cursor(self) -> _Cursor:
        """Open a cursor."""
        ...

    def commit(self) -> object:
        """Commit the settings: a rollback would undo them."""
        ...


def setter(limits: Mapping[str, str], options: str) -> Callable[[RawConnection, object], None]:
    """Return a function that sets the limits on a new connection, except those in `options`."""
    ours = {name: value for name, value in limits.items() if name not in options}
    values = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in ours.items())

    def set_limits(connection: RawConnection, _record: object) -> None:
        if not values:
            return
        cursor = connection.cursor()
        cursor.execute(f"SELECT {values}")
        cursor.close()
        connection.commit()

    return set_limits


async def check_sessions(engine: AsyncEngine) -> None:
    """Raise `StoreRefusedError` if a connection of the service is not a single session.

    While a second connection has a transaction open, a pooler of transactions cannot have kept the
    session of the first: the second has taken its connection to the server.
    """
    async with engine.connect() as first, engine.connect() as second:
        tag = token_hex(8)
        await first.execute(_SET_TAG, {"tag": tag})
        await first.commit()
        await second.execute(_READ_TAG)
        found = await first.scalar(_READ_TAG)
        await first.rollback()
        await second.rollback()
    if found != tag:
        raise StoreRefusedError(
            "TIDEGAUGE_LEDGER_URL leads to a pooler that gives each transaction another session of"
            " Postgres, so time limits and locks of a session do not hold: set its pool_mode to session,"
            " or connect to Postgres itself"
        )

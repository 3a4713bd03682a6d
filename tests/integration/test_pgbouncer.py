"""A ledger behind PgBouncer: its sessions have our time limits, or the start is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from service.errors import StoreRefusedError
from service.ledger.sessions import LIMITS
from service.ledger.sql import SqlLedger
from tests.integration.test_doctor import examine
from tests.support.pgbouncer_server import pgbouncer
from tests.support.postgres_server import PostgresServer

pytestmark = pytest.mark.anyio


async def limits_of(url: str) -> dict[str, str]:
    """Open a ledger, and return the limits of a session of it."""
    ledger = SqlLedger(url)

    async def show(db: AsyncConnection) -> dict[str, str]:
        return {name: str(await db.scalar(text(f"SHOW {name}"))) for name in LIMITS}

    try:
        await ledger.open(exclusive=False)
        # Until the pool has given each of its connections, the first may be another.
        for _ in range(5):
            await ledger.ping()
        return await ledger.database.read(show)
    finally:
        await ledger.close()


@pytest.mark.parametrize("settings", [{}, {"ignore_startup_parameters": "options"}])
async def test_by_sessions_the_limits_hold(
    postgres_server: PostgresServer, settings: dict[str, str]
) -> None:
    """With its defaults PgBouncer refused our `options`; told to ignore them, it dropped the limits."""
    with pgbouncer(postgres_server, **settings) as url:
        assert await limits_of(url) == dict(LIMITS)


async def test_by_transactions_the_start_is_refused(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    with pgbouncer(postgres_server, pool_mode="transaction") as url:
        with pytest.raises(StoreRefusedError, match="set its pool_mode to session"):
            await limits_of(url)
        status, found = examine(tmp_path, "--ledger-url", url)
    assert (status, found["ledger's time limits"]["verdict"]) == (1, "fault")


async def test_without_a_pooler_they_hold_unless_the_url_sets_them(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    url = postgres_server.database()
    assert await limits_of(url) == dict(LIMITS)
    theirs = await limits_of(f"{url}?options=-c%20statement_timeout%3D7s")
    assert theirs == {**LIMITS, "statement_timeout": "7s"}
    _, found = examine(tmp_path, "--ledger-url", url)
    assert found["ledger's time limits"]["says"].startswith(
        "hold in each session: statement_timeout"
    )

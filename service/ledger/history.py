"""Thinning the history of watermarks by age."""

from __future__ import annotations

from sqlalchemy import Delete
from sqlalchemy.ext.asyncio import AsyncConnection

from service.ledger import statements as sql
from service.ledger.database import Database
from service.tasks import run_to_completion

_STEP_MS = 600_000
"""How much of the history one transaction covers, so that none takes long."""


class History:
    """Thins the history in steps of one transaction each."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._thinned_until_ms = 0

    async def thin(self, *, fine_until_ms: int, keep_until_ms: int) -> int:
        """See `Ledger.thin_history`."""
        deleted, _ = await self._thin_until(sql.DELETE_HISTORY, 0, keep_until_ms)
        # What this process has thinned before need not be looked at again.
        from_ms = max(self._thinned_until_ms, keep_until_ms)
        thinned, at_ms = await self._thin_until(sql.THIN_HISTORY, from_ms, fine_until_ms)
        self._thinned_until_ms = at_ms - at_ms % 60_000
        return deleted + thinned

    async def _thin_until(self, statement: Delete, at_ms: int, until_ms: int) -> tuple[int, int]:
        """Run the statement step by step; return how many rows were deleted, and where it stopped."""
        thinned = 0
        while at_ms < until_ms:
            step = await self._thin_step(statement, at_ms, until_ms)
            if step is None:
                break
            rows, at_ms = step
            thinned += rows
        return thinned, at_ms

    @run_to_completion
    async def _thin_step(
        self, statement: Delete, at_ms: int, until_ms: int
    ) -> tuple[int, int] | None:
        return await self._database.write(lambda db: self._step(db, statement, at_ms, until_ms))

    async def _step(
        self, db: AsyncConnection, statement: Delete, at_ms: int, until_ms: int
    ) -> tuple[int, int] | None:
        """Run one step; return how many rows were deleted, and where the next step begins.

        None: another replica is thinning.
        """
        if not self._database.is_sqlite and not await db.scalar(sql.BEGIN_THINNING):
            return None
        oldest_ms: int | None = await db.scalar(sql.FIND_OLDEST, {"b_from_ms": at_ms})
        if oldest_ms is None or oldest_ms >= until_ms:
            return 0, until_ms
        end_ms = min(oldest_ms - oldest_ms % _STEP_MS + _STEP_MS, until_ms)
        done = await db.execute(statement, {"b_from_ms": oldest_ms, "b_until_ms": end_ms})
        return done.rowcount, end_ms

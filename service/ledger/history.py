"""The history of watermarks, which gets thinner with age."""

from __future__ import annotations

from sqlalchemy import Delete
from sqlalchemy.ext.asyncio import AsyncConnection

from service.ledger import statements as sql
from service.ledger.database import Database
from service.tasks import to_its_end

_THIN_STEP_MS = 600_000
"""It is thinned in pieces of this length: none of them takes long."""


class History:
    """Thins it, in steps of one transaction each."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._thinned_until_ms = 0

    async def thin(self, *, fine_until_ms: int, keep_until_ms: int) -> int:
        """Thin what is older; see `Ledger.thin_history`."""
        gone, _ = await self._thin_until(sql.FORGET, 0, keep_until_ms)
        # Where this process has been before there is nothing left to do.
        from_ms = max(self._thinned_until_ms, keep_until_ms)
        thinned, at_ms = await self._thin_until(sql.THIN, from_ms, fine_until_ms)
        self._thinned_until_ms = at_ms - at_ms % 60_000
        return gone + thinned

    async def _thin_until(self, how: Delete, at_ms: int, until_ms: int) -> tuple[int, int]:
        """Go through the history in steps; return how many rows went, and how far it came."""
        thinned = 0
        while at_ms < until_ms:
            step = await self._thin_step(how, at_ms, until_ms)
            if step is None:
                break
            rows, at_ms = step
            thinned += rows
        return thinned, at_ms

    @to_its_end
    async def _thin_step(self, how: Delete, at_ms: int, until_ms: int) -> tuple[int, int] | None:
        return await self._database.write(lambda db: self._step(db, how, at_ms, until_ms))

    async def _step(
        self, db: AsyncConnection, how: Delete, at_ms: int, until_ms: int
    ) -> tuple[int, int] | None:
        """Do one step; return how many rows went, and where the next begins.

        None: another replica is at it.
        """
        if not self._database.is_sqlite and not await db.scalar(sql.BEGIN_THINNING):
            return None
        oldest_ms: int | None = await db.scalar(sql.FIND_OLDEST, {"b_from_ms": at_ms})
        if oldest_ms is None or oldest_ms >= until_ms:
            return 0, until_ms
        end_ms = min(oldest_ms - oldest_ms % _THIN_STEP_MS + _THIN_STEP_MS, until_ms)
        done = await db.execute(how, {"b_from_ms": oldest_ms, "b_until_ms": end_ms})
        return done.rowcount, end_ms

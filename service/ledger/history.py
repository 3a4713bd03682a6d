"""The history of watermarks: its reading, and its thinning by age in slices that do not delay others."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from service.ledger import history_statements as sql
from service.ledger.database import Database
from service.ledger.loading import unknown_job
from service.ledger.port import Span, Thinned
from service.ledger.rows import history_points
from service.ledger.statements import FIND_CREATION
from service.model.history import HistoryPoint

_SLICE = 2_000
"""Number of rows in one transaction, which takes some ten milliseconds."""

_MINUTE_MS = 60_000


class History:
    """Thinning of the history. Each call is one transaction, and resumes at the end of the last one."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._from_ms = 0
        """The minute up to which this process has thinned all rows."""
        self._slice = _SLICE

    async def thin(self, db: AsyncConnection, fine_until_ms: int, keep_until_ms: int) -> Thinned:
        """See `Ledger.thin_history`."""
        if not self._database.is_sqlite and not await db.scalar(sql.BEGIN_THINNING):
            # Another replica is thinning.
            return Thinned(0, more=False)
        too_old = {"b_until_ms": keep_until_ms, "b_slice": _SLICE}
        deleted = (await db.execute(sql.DELETE_OLD_HISTORY, too_old)).rowcount
        if deleted:
            return Thinned(deleted, more=True)
        return await self._thin(db, fine_until_ms - fine_until_ms % _MINUTE_MS)

    async def _thin(self, db: AsyncConnection, until_ms: int) -> Thinned:
        """Keep the last row of each stage and minute, of the next rows.

        A minute may have more rows than a slice. So a slice begins with the last minute of the slice
        before: again only the last rows of this minute stay. The work is linear in the number of rows,
        as long as a slice is larger than the rows that stay of one minute.
        """
        found = {"b_from_ms": self._from_ms, "b_until_ms": until_ms, "b_slice": self._slice}
        seen, last_ms = (await db.execute(sql.FIND_SLICE, found)).one()
        if not seen:
            return Thinned(0, more=False)
        rows = (await db.execute(sql.THIN_SLICE, found)).rowcount
        if seen < self._slice:
            self._from_ms, self._slice = until_ms, _SLICE
            return Thinned(rows, more=False)
        next_ms = last_ms - last_ms % _MINUTE_MS
        # A slice has room for as many new rows as rows of this minute that stay.
        self._slice = 2 * self._slice if next_ms == self._from_ms and 2 * rows < seen else _SLICE
        self._from_ms = next_ms
        return Thinned(rows, more=True)


async def find_history(
    db: AsyncConnection,
    job: str,
    stage: str,
    generation: int,
    newest: int,
    span: Span,
    intervals: int,
) -> Sequence[HistoryPoint]:
    """See `Ledger.history`."""
    found = await db.execute(
        sql.FIND_HISTORY,
        {
            "b_job": job,
            "b_stage": stage,
            "b_generation": generation,
            "b_newest": newest,
            "b_from_ms": span[0],
            "b_span_ms": span[1] - span[0],
            "b_intervals": intervals,
        },
    )
    return history_points(found, job, stage, generation)


async def began_after(
    db: AsyncConnection, job: str, stage: str, generation: int, at_ms: int
) -> bool:
    """See `Ledger.began_after`."""
    # Several, as those of the same millisecond come in any order.
    wanted = {"b_job": job, "b_stage": stage, "b_at_ms": at_ms, "b_limit": 10}
    found = await db.execute(sql.FIND_NEXT_HISTORY, wanted)
    rows = [row for row in found if (row.job, row.stage) == (job, stage)]
    return any(
        # While an earlier generation went on, this one had not begun.
        row.generation < generation or (row.generation == generation and row.version == 1)
        for row in rows
        if row.at_ms == rows[0].at_ms
    )


async def created_at_ms(db: AsyncConnection, job: str) -> int:
    """See `Ledger.created_at_ms`."""
    found = (await db.execute(FIND_CREATION, {"b_job": job})).scalar_one_or_none()
    if found is None:
        raise unknown_job(job)
    return int(found)


async def last_advances(
    db: AsyncConnection, job: str, stage: str, generation: int, newest: int, limit: int
) -> Sequence[HistoryPoint]:
    """See `Ledger.last_advances`."""
    found = await db.execute(
        sql.FIND_LAST_HISTORY,
        {
            "b_job": job,
            "b_stage": stage,
            "b_generation": generation,
            "b_newest": newest,
            "b_limit": limit,
        },
    )
    points = history_points(found, job, stage, generation)
    return sorted(points, key=lambda point: (point.at_ms, point.version))

"""Saving checkpoints of ranges, within a transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from sqlalchemy import tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from service.ledger import statements as sql
from service.ledger.audit import write_returns
from service.ledger.rows import chunk_row
from service.ledger.tables import promise_chunks
from service.model.checkpoints import COLUMNS, CheckpointChunk

_ORDER: Final = ("generation", "layout_since", "incarnation", "stamp")
"""Order of the versions of a chunk: the greatest is the newest."""


class Checkpoints:
    """Saving of chunks. Checkpoints of several replicas arrive in any order, and the newest stays."""

    def __init__(self, upsert: Any) -> None:  # noqa: ANN401 - `insert` of one of the dialects
        chunk = upsert(promise_chunks)
        self._save_chunks = chunk.on_conflict_do_update(
            index_elements=["job", "stage", "chunk"],
            set_={name: chunk.excluded[name] for name in (*_ORDER, *COLUMNS)},
            where=tuple_(*(chunk.excluded[name] for name in _ORDER))
            >= tuple_(*(promise_chunks.c[name] for name in _ORDER)),
        )

    async def save(
        self, db: AsyncConnection, chunks: Sequence[CheckpointChunk], at_ms: int
    ) -> None:
        """Save the chunks of the current layout, of jobs whose rows are locked.

        The ends of retirements among them are recorded in the audit.
        """
        if not chunks:
            return
        names = sorted({chunk.job for chunk in chunks})
        current = {
            (row.job, row.stage): (row.incarnation, row.generation, row.layout_since)
            for row in await db.execute(sql.FIND_LAYOUTS, {"b_jobs": names})
        }
        newest = {
            (chunk.job, chunk.stage, chunk.chunk): chunk
            for chunk in sorted(chunks, key=lambda chunk: chunk.stamp)
            if current.get((chunk.job, chunk.stage))
            == (chunk.incarnation, chunk.generation, chunk.layout_since)
        }
        if newest:
            rows = [
                chunk_row(chunk) for _, chunk in sorted(newest.items(), key=lambda item: item[0])
            ]
            await db.execute(self._save_chunks, rows)
            await self._record_returns(db, newest.values(), at_ms)

    async def _record_returns(
        self, db: AsyncConnection, chunks: Iterable[CheckpointChunk], at_ms: int
    ) -> None:
        """Record the ends of retirements of those chunks that are saved now, rather than newer ones."""
        ended = [chunk for chunk in chunks if chunk.returned]
        if not ended:
            return
        key = {
            "b_jobs": sorted({chunk.job for chunk in ended}),
            "b_stages": sorted({chunk.stage for chunk in ended}),
        }
        saved = {
            (row.job, row.stage, row.chunk): (row.incarnation, row.stamp)
            for row in await db.execute(sql.FIND_STAMPS, key)
        }
        by_job: dict[str, dict[tuple[str, str], str]] = {}
        for chunk in ended:
            if saved.get((chunk.job, chunk.stage, chunk.chunk)) == (chunk.incarnation, chunk.stamp):
                found = by_job.setdefault(chunk.job, {})
                found.update(((chunk.stage, name), who) for name, who in chunk.returned.items())
        for job, ranges in by_job.items():
            await write_returns(db, job, ranges, at_ms)

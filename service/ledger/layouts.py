"""Writing a job's layouts, within a transaction that has locked the job."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Row, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from service.errors import InvalidRequestError
from service.frontier.graph import StageWatermark
from service.frontier.timestamps import MAX
from service.ledger import statements as sql
from service.ledger.checkpoints import Checkpoints
from service.ledger.port import NewLayout
from service.ledger.rows import chunks_of, columns_of, watermark_row
from service.ledger.tables import stages
from service.model.checkpoints import Columns, inherited_columns, join_readings
from service.model.jobs import StoredJob


async def change_layouts(
    db: AsyncConnection,
    checkpoints: Checkpoints,
    layout: NewLayout,
    incarnation: int,
    generation: int,
    layout_version: int,
    at_ms: int,
) -> None:
    """Write the stages whose ranges have changed, and the inherited columns."""
    # Before their chunks are dropped.
    inherited = await _with_saved(db, layout, generation)
    keys = [{"b_job": layout.job, "b_stage": stage} for stage in sorted(set(layout.changed))]
    if keys:
        await db.execute(sql.DROP_CHUNKS_OF_STAGE, keys)
        await db.execute(
            sql.CHANGE_LAYOUT_OF_STAGE,
            [key | {"b_layout_since": layout_version} for key in keys],
        )
    await add_stages(db, layout, layout_version, at_ms)
    layout = replace(layout, inherited=inherited)
    chunks = chunks_of(layout, incarnation, generation, layout_version)
    await checkpoints.save(db, chunks, at_ms)


async def _with_saved(
    db: AsyncConnection, layout: NewLayout, generation: int
) -> Mapping[str, Columns]:
    """Join what is saved for the former layouts to the inherited columns.

    The live store was read before the job was locked. A report or a commit may have been answered since,
    once it was saved here: after a loss of the live store, its promises must come back.
    """
    names = sorted(layout.inherited.keys() & layout.layouts.keys())
    if not names:
        return layout.inherited
    rows = {row.stage: row for row in await db.execute(sql.FIND_STAGES, {"b_jobs": [layout.job]})}
    key = {"b_jobs": [layout.job], "b_stages": names, "b_generation": generation}
    chunks: dict[str, list[Row[Any]]] = {}
    for chunk in await db.execute(sql.FIND_CHUNKS_OF_STAGES, key):
        chunks.setdefault(chunk.stage, []).append(chunk)
    # In a thread: a million ranges take a while.
    return await asyncio.to_thread(_joined, layout, rows, chunks)


def _joined(
    layout: NewLayout, rows: Mapping[str, Row[Any]], chunks: Mapping[str, Sequence[Row[Any]]]
) -> Mapping[str, Columns]:
    joined = dict(layout.inherited)
    for name in chunks:
        before, after = layout.layouts[name]
        saved = columns_of(rows[name], before, chunks[name])
        if saved is not None:
            joined[name] = join_readings(joined[name], inherited_columns(before, saved, after))
    return joined


async def add_stages(
    db: AsyncConnection, layout: NewLayout, layout_version: int, at_ms: int
) -> None:
    """Add the rows of changed stages that lack one."""
    present = {row.stage for row in await db.execute(sql.FIND_STAGES, {"b_jobs": [layout.job]})}
    row = (await db.execute(sql.FIND_JOBS, {"b_jobs": [layout.job]})).one()
    new = [
        {
            "job": layout.job,
            "stage": stage,
            "layout_since": layout_version,
            "run": 0,
            "epoch": None,
            **watermark_row(StageWatermark()),
            "version": 0,
            "revision": row.revision,
            "updated_at_ms": at_ms,
            "advanced_at_ms": at_ms,
        }
        for stage in layout.changed
        if stage not in present
    ]
    if new:
        await db.execute(insert(stages), new)


def check_joined(stored: StoredJob, source: str | None) -> None:
    """Raise `InvalidRequestError` if shards joined a final source: a final source stays final."""
    if source is None or stored.installed.stages[source].view.watermark.output != MAX:
        return
    raise InvalidRequestError(
        f"no shard can join {source!r}, which is final: all rows of another shard would be late. To"
        " start over, reset the job; next time, keep one shard that is not final"
    )

"""Recording of advances and committed epochs, within a transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from service.ledger import statements as sql
from service.ledger.checkpoints import Checkpoints
from service.ledger.database import Database
from service.ledger.port import JobRecord, Recorded
from service.ledger.rows import (
    advance_row,
    advance_rows,
    counts_row,
    packed_rows,
    record_row,
    view_of,
)
from service.model.checkpoints import CheckpointChunk
from service.model.jobs import StageView


async def record_in_one_statement(
    database: Database, simple: Sequence[JobRecord], at_ms: int
) -> Mapping[str, Recorded] | None:
    """Record the advances of jobs that nothing else has been recorded for.

    None: the connection was lost. The advances may have been recorded; then a retry has no effect, or is
    rejected.
    """
    if not simple:
        return {}
    rows = await database.run_statement(
        sql.RECORD_IN_ONE_STATEMENT,
        {
            "b_record": packed_rows(map(record_row, simple)),
            "b_advance": packed_rows(row for record in simple for row in advance_rows(record)),
            "b_at_ms": at_ms,
        },
    )
    if rows is None:
        return None
    moved: dict[str, dict[str, StageView]] = {row.name: {} for row in rows}
    for row in rows:
        if row.stage is not None:
            moved[row.name][row.stage] = view_of(row)
    return {row.name: Recorded(row.taken, moved[row.name]) for row in rows}


async def record_each(
    db: AsyncConnection, checkpoints: Checkpoints, records: Sequence[JobRecord], at_ms: int
) -> Mapping[str, Recorded]:
    """Record job by job, with the checkpoints that the records bring."""
    taken: dict[str, Recorded] = {}
    chunks: list[CheckpointChunk] = []
    for record in sorted(records, key=lambda record: record.job):
        recorded = await _record_job(db, record, at_ms)
        if recorded is not None:
            taken[record.job] = recorded
            chunks += record.chunks
    await checkpoints.save(db, chunks, at_ms)
    return taken


async def _record_job(db: AsyncConnection, record: JobRecord, at_ms: int) -> Recorded | None:
    """Record one job's record; None: the job has changed since the record was made."""
    at = {
        "b_job": record.job,
        "b_incarnation": record.incarnation,
        "b_generation": record.generation,
        "b_layout_version": record.layout_version,
        "b_in_any_order": not record.unless_newer,
        "b_seen": record.seen,
    }
    row = (await db.execute(sql.TAKE_REVISION, at)).one_or_none()
    if row is None:
        return None
    if record.advances:
        await _advance(db, record, row.revision, at_ms)
    if record.epochs:
        epochs = sorted(record.epochs.items())
        await db.execute(
            sql.COMMIT_EPOCH,
            [{"b_job": record.job, "b_stage": s, "b_epoch": epoch} for s, epoch in epochs],
        )
    # Including records of other replicas, which may have died before their publication.
    newer = await db.execute(sql.FIND_NEWER, {"b_job": record.job, "b_seen": record.seen})
    return Recorded(row.revision, {r.stage: view_of(r) for r in newer})


async def _advance(db: AsyncConnection, record: JobRecord, revision: int, at_ms: int) -> None:
    key = {"b_job": record.job, "b_revision": revision}
    advances = sorted(record.advances.items())
    await db.execute(
        sql.ADVANCE_STAGE, [advance_row(s, w) | key | {"b_at_ms": at_ms} for s, w in advances]
    )
    await db.execute(
        sql.ADD_TO_HISTORY,
        [
            key
            | {"b_stage": stage, "b_generation": record.generation}
            | {f"b_{name}": value for name, value in counts_row(record, stage).items()}
            for stage, _ in advances
        ],
    )

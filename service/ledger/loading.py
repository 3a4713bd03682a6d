"""Loading jobs from the ledger, within a transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from service.errors import UnknownJobError
from service.ledger import statements as sql
from service.ledger.rows import installed_of
from service.model.jobs import InstalledJob, StoredJob
from service.model.pipeline_spec import decode_spec


def unknown_job(job: str) -> UnknownJobError:
    """Return the error for a job that is not in the ledger."""
    return UnknownJobError(f"there is no job {job!r}")


async def draw_incarnation(db: AsyncConnection, job: str, at_ms: int) -> int:
    """Draw the number of a job's next incarnation."""
    row = (await db.execute(sql.DRAW_INCARNATION, {"job": job, "opened_at_ms": at_ms})).one()
    return int(row.number)


async def load_job(db: AsyncConnection, job: str) -> StoredJob:
    """Load a job, without its checkpoint. Raises `UnknownJobError`."""
    found = await load_jobs(db, [job])
    if job not in found:
        raise unknown_job(job)
    return found[job]


async def load_jobs(
    db: AsyncConnection, jobs: Sequence[str], *, with_checkpoint: bool = False
) -> dict[str, StoredJob]:
    """Load the jobs that exist, with their checkpoints if requested."""
    names = {"b_jobs": list(jobs)}
    rows = [row for row in await db.execute(sql.FIND_JOBS, names) if not row.deleted]
    stages = _by_job(await db.execute(sql.FIND_STAGES, names))
    chunks = _by_job(await db.execute(sql.FIND_CHUNKS, names)) if with_checkpoint else {}
    return {
        row.name: _stored(row, stages.get(row.name, []), chunks.get(row.name, [])) for row in rows
    }


def _by_job(rows: Iterable[Row[Any]]) -> dict[str, list[Row[Any]]]:
    found: dict[str, list[Row[Any]]] = {}
    for row in rows:
        found.setdefault(row.job, []).append(row)
    return found


def _stored(row: Row[Any], stages: Sequence[Row[Any]], chunks: Sequence[Row[Any]]) -> StoredJob:
    pipeline = decode_spec(row.spec).stored_pipeline()
    by_stage: dict[str, list[Row[Any]]] = {}
    for chunk in chunks:
        if chunk.generation == row.generation:
            by_stage.setdefault(chunk.stage, []).append(chunk)
    installed = {
        stage.stage: installed_of(stage, pipeline, by_stage.get(stage.stage, []))
        for stage in stages
        if stage.stage in pipeline.stages
    }
    job = InstalledJob(
        name=row.name,
        pipeline=pipeline,
        incarnation=row.incarnation,
        generation=row.generation,
        layout_version=row.layout_version,
        revision=row.revision,
        last_run=row.last_run,
        stages=installed,
    )
    return StoredJob(bytes(row.spec), job)

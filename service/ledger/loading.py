"""Loading jobs from the ledger, within a transaction."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from service.errors import UnknownJobError
from service.ledger import statements as sql
from service.ledger.rows import installed_of
from service.model.jobs import InstalledJob, StoredJob
from service.spec import decode_spec


def unknown_job(job: str) -> UnknownJobError:
    """Return the error for a job that is not in the ledger."""
    return UnknownJobError(f"there is no job {job!r}")


async def load_job(db: AsyncConnection, job: str, *, with_promises: bool = False) -> StoredJob:
    """Load a job, with its checkpoint if asked to. Raises `UnknownJobError`."""
    row = (await db.execute(sql.FIND_JOB, {"b_job": job})).one_or_none()
    if row is None or row.deleted:
        raise unknown_job(job)
    return await _stored(db, row, with_promises=with_promises)


async def _stored(db: AsyncConnection, row: Row[Any], *, with_promises: bool) -> StoredJob:
    pipeline = decode_spec(row.spec).pipeline()
    key = {"b_job": row.name}
    chunks: dict[str, list[Row[Any]]] = {}
    if with_promises:
        for chunk in await db.execute(sql.FIND_CHUNKS, key):
            if chunk.generation == row.generation:
                chunks.setdefault(chunk.stage, []).append(chunk)
    installed = {
        stage.stage: installed_of(stage, pipeline, chunks.get(stage.stage, []))
        for stage in await db.execute(sql.FIND_STAGES, key)
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

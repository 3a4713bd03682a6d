"""The ledger on a SQL database, through SQLAlchemy: SQLite embedded, Postgres in production.

A transaction that writes to a job first locks its row in `jobs`, and jobs are locked in the order of
their names. So the transactions on one job run one after the other, across replicas, and never
deadlock. The statements are in `service.ledger.statements`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import delete
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

from service.ledger import audit, changes, history, keys, runs, tables
from service.ledger import statements as sql
from service.ledger.checkpoints import Checkpoints
from service.ledger.database import Database
from service.ledger.layouts import add_stages, change_layouts, check_joined
from service.ledger.loading import draw_incarnation, load_job, load_jobs, unknown_job
from service.ledger.port import (
    JobHead,
    JobRecord,
    Ledger,
    NewLayout,
    Recorded,
    RecordedChanges,
    Span,
    Thinned,
)
from service.ledger.recording import record_each, record_in_one_statement
from service.ledger.rows import new_job_row
from service.ledger.run_statements import SAVE_EPOCHS_OF_RUNS
from service.ledger.tables import jobs, promise_chunks, stages
from service.ledger.transactions import reading, writing
from service.model.audit import Action, AuditRecord, Deed, specification_of
from service.model.checkpoints import CheckpointChunk
from service.model.history import HistoryPoint
from service.model.jobs import Specification, StoredJob
from service.model.keys import Key
from service.model.runs import EndedRun, NewRun, RunEnd, RunRecord
from service.tasks import run_to_completion


class SqlLedger(Ledger):
    """A ledger in a database.

    If the connection is lost during a commit, its outcome is unknown, and `UnavailableError` is raised
    as if the transaction had never started. Each may be retried: a monotone write has no effect the
    second time, and the result of a conditional one shows that it was done.
    """

    def __init__(self, url: str) -> None:
        self.database = Database(url)
        upsert: Any = sqlite_insert if self.database.is_sqlite else postgres_insert
        self._add_job = upsert(jobs).on_conflict_do_nothing().returning(jobs.c.name)
        self._checkpoints = Checkpoints(upsert)
        self._history = history.History(self.database)

    @override
    @run_to_completion
    async def open(self, *, exclusive: bool) -> None:
        await self.database.open(exclusive=exclusive)

    @override
    async def close(self) -> None:
        await self.database.close()

    @override
    @writing
    async def ping(self, db: AsyncConnection) -> None:
        # A row that nobody ever sees. Its transaction is written all the same.
        await db.execute(sql.PROBE)
        await db.execute(sql.REMOVE_PROBE)

    @override
    @reading
    async def heads(self, db: AsyncConnection) -> Sequence[JobHead]:
        return [JobHead(*row) for row in await db.execute(sql.FIND_HEADS)]

    @override
    @reading
    async def deleted(self, db: AsyncConnection, jobs: Collection[str]) -> Mapping[str, int]:
        found = await db.execute(sql.FIND_DELETED, {"b_jobs": list(jobs)})
        return {row.name: row.generation for row in found}

    @override
    @reading
    async def head(self, db: AsyncConnection, job: str) -> JobHead:
        row = (await db.execute(sql.FIND_HEAD, {"b_job": job})).one_or_none()
        if row is None:
            raise unknown_job(job)
        return JobHead(*row)

    @override
    @reading
    async def get(self, db: AsyncConnection, job: str) -> StoredJob:
        return await load_job(db, job)

    @override
    @reading
    async def specification(self, db: AsyncConnection, job: str) -> Specification:
        row = (await db.execute(sql.FIND_JOBS, {"b_jobs": [job]})).one_or_none()
        if row is None or row.deleted:
            raise unknown_job(job)
        return Specification(row.name, row.generation, row.layout_version, bytes(row.spec))

    @override
    @writing
    async def begin_incarnations(
        self, db: AsyncConnection, seen: Mapping[str, int], at_ms: int
    ) -> Mapping[str, StoredJob]:
        locked = await db.execute(sql.LOCK_JOBS, {"b_jobs": sorted(seen)})
        jobs = [row.name for row in locked if not row.deleted and row.incarnation == seen[row.name]]
        if not jobs:
            return {}
        # Drawn only once the rows are locked, so that a job's numbers rise in the order they are begun.
        drawn = [await draw_incarnation(db, job, at_ms) for job in jobs]
        await db.execute(
            sql.BEGIN_INCARNATION,
            [
                {"b_job": job, "b_incarnation": number, "b_at_ms": at_ms}
                for job, number in zip(jobs, drawn, strict=True)
            ],
        )
        return await load_jobs(db, jobs, with_checkpoint=True)

    @override
    @writing
    async def create(
        self, db: AsyncConnection, layout: NewLayout, at_ms: int, deed: Deed | None = None
    ) -> StoredJob | None:
        row = (await db.execute(sql.LOCK_JOB, {"b_job": layout.job})).one_or_none()
        if row is not None and not row.deleted:
            return None
        number = await draw_incarnation(db, layout.job, at_ms)
        if row is not None:
            await db.execute(
                sql.REVIVE_JOB,
                {
                    "b_job": layout.job,
                    "b_incarnation": number,
                    "b_spec": layout.spec,
                    "b_at_ms": at_ms,
                },
            )
        else:
            added = await db.execute(self._add_job, new_job_row(layout, number, at_ms))
            if added.one_or_none() is None:
                # There was no row to lock, and another replica has added it since.
                return None
        await add_stages(db, layout, 1, at_ms)
        await audit.write_audit(db, deed, job=layout.job)
        return await load_job(db, layout.job)

    @override
    @writing
    async def replace(
        self,
        db: AsyncConnection,
        layout: NewLayout,
        generation: int,
        layout_version: int,
        at_ms: int,
        deed: Deed | None = None,
    ) -> StoredJob | None:
        done = await db.execute(
            sql.REPLACE_SPEC,
            {
                "b_job": layout.job,
                "b_generation": generation,
                "b_layout_version": layout_version,
                "b_spec": layout.spec,
                "b_at_ms": at_ms,
            },
        )
        row = done.one_or_none()
        if row is None:
            return None
        await change_layouts(
            db, self._checkpoints, layout, row.incarnation, generation, layout_version + 1, at_ms
        )
        detail = specification_of(layout_version + 1, layout.differences)
        await audit.write_audit(db, deed, job=layout.job, detail=detail)
        stored = await load_job(db, layout.job)
        check_joined(stored, layout.joined)
        return stored

    @override
    @writing
    async def reset(
        self, db: AsyncConnection, job: str, at_ms: int, deed: Deed | None = None
    ) -> StoredJob:
        key = {"b_job": job, "b_at_ms": at_ms}
        row = (await db.execute(sql.START_GENERATION, key)).one_or_none()
        if row is None:
            raise unknown_job(job)
        await db.execute(sql.DROP_CHUNKS, {"b_job": job})
        await db.execute(SAVE_EPOCHS_OF_RUNS, {"b_job": job})
        generation = f"generation {row.generation}"
        await runs.fence_runs(db, job, at_ms, f"the job was reset: {generation} began", deed)
        await db.execute(sql.START_STAGES_OVER, key | {"b_revision": row.revision})
        await audit.write_audit(db, deed, job=job, detail=generation)
        return await load_job(db, job)

    @override
    @writing
    async def delete(
        self, db: AsyncConnection, job: str, at_ms: int, deed: Deed | None = None
    ) -> int:
        row = (await db.execute(sql.DELETE_JOB, {"b_job": job, "b_at_ms": at_ms})).one_or_none()
        if row is None:
            raise unknown_job(job)
        for table in (stages, promise_chunks, tables.history, tables.runs):
            await db.execute(delete(table).where(table.c.job == job))
        await audit.write_audit(db, deed, job=job)
        return int(row.generation)

    @override
    @writing
    async def open_run(
        self, db: AsyncConnection, job: str, run: NewRun, at_ms: int, deed: Deed | None = None
    ) -> int:
        return await runs.open_run(db, job, run, at_ms, deed)

    @override
    @writing
    async def end_run(
        self, db: AsyncConnection, job: str, end: RunEnd, deed: Deed | None = None
    ) -> EndedRun:
        return await runs.end_run(db, job, end, deed)

    @override
    @reading
    async def runs(
        self,
        db: AsyncConnection,
        job: str,
        limit: int,
        before: int | None = None,
        stage: str | None = None,
    ) -> Sequence[RunRecord]:
        return await runs.find_runs(db, job, limit, before, stage)

    @override
    @reading
    async def run_holder(self, db: AsyncConnection, job: str, run: int) -> str | None:
        return await runs.find_holder(db, job, run)

    @override
    @run_to_completion
    async def record(self, records: Sequence[JobRecord], at_ms: int) -> Mapping[str, Recorded]:
        if self.database.is_sqlite:
            return await self._record_each(records, at_ms)
        simple = [r for r in records if not r.epochs and not r.chunks]
        whole = [r for r in records if r.epochs or r.chunks]
        recorded = await record_in_one_statement(self.database, simple, at_ms)
        taken = {} if recorded is None else dict(recorded)
        refused = {r.job for r in simple if recorded is not None and r.unless_newer}
        left = [*whole, *(r for r in simple if r.job not in taken and r.job not in refused)]
        if left:
            taken |= await self._record_each(left, at_ms)
        return taken

    @writing
    async def _record_each(
        self, db: AsyncConnection, records: Sequence[JobRecord], at_ms: int
    ) -> Mapping[str, Recorded]:
        return await record_each(db, self._checkpoints, records, at_ms)

    @override
    @run_to_completion
    async def checkpoint(self, chunks: Sequence[CheckpointChunk], at_ms: int) -> None:
        if chunks:
            await self._checkpoint(chunks, at_ms)

    @writing
    async def _checkpoint(
        self, db: AsyncConnection, chunks: Sequence[CheckpointChunk], at_ms: int
    ) -> None:
        # Locked like any other write: once the next incarnation has begun from the saved chunks, none of
        # an earlier one may be added.
        await db.execute(sql.LOCK_JOBS, {"b_jobs": sorted({chunk.job for chunk in chunks})})
        await self._checkpoints.save(db, chunks, at_ms)

    @override
    @reading
    async def history(
        self,
        db: AsyncConnection,
        job: str,
        stage: str,
        *,
        generation: int,
        newest: int,
        from_ms: int,
        until_ms: int,
        intervals: int,
    ) -> Sequence[HistoryPoint]:
        return await history.find_history(
            db, job, stage, generation, newest, (from_ms, until_ms), intervals
        )

    @override
    @reading
    async def began_after(
        self, db: AsyncConnection, job: str, stage: str, *, generation: int, at_ms: int
    ) -> bool:
        return await history.began_after(db, job, stage, generation, at_ms)

    @override
    @reading
    async def created_at_ms(self, db: AsyncConnection, job: str) -> int:
        return await history.created_at_ms(db, job)

    @override
    @reading
    async def last_advances(
        self,
        db: AsyncConnection,
        job: str,
        stage: str,
        *,
        generation: int,
        newest: int,
        limit: int,
    ) -> Sequence[HistoryPoint]:
        return await history.last_advances(db, job, stage, generation, newest, limit)

    @override
    @writing
    async def thin_history(
        self, db: AsyncConnection, *, fine_until_ms: int, keep_until_ms: int
    ) -> Thinned:
        return await self._history.thin(db, fine_until_ms, keep_until_ms)

    # ---- keys and the audit

    @override
    @reading
    async def keys(self, db: AsyncConnection) -> Sequence[Key]:
        return await keys.find_keys(db)

    @override
    @writing
    async def add_key(
        self, db: AsyncConnection, key: Key, deed: Deed, *, first: bool = False
    ) -> bool:
        return await keys.add_key(db, key, deed, first=first)

    @override
    @writing
    async def delete_key(self, db: AsyncConnection, name: str, deed: Deed) -> bool:
        return await keys.delete_key(db, name, deed)

    @override
    @writing
    async def note_uses(self, db: AsyncConnection, used_at_ms: Mapping[bytes, int]) -> None:
        await keys.note_uses(db, used_at_ms)

    @override
    @reading
    async def read_audit(
        self,
        db: AsyncConnection,
        limit: int,
        before: int | None,
        job: str | None,
        action: Action | None = None,
    ) -> Sequence[AuditRecord]:
        return await audit.read_audit(db, limit, before, job, action)

    @override
    @reading
    async def changes(
        self, db: AsyncConnection, job: str, stage: str | None, span: Span, limit: int
    ) -> RecordedChanges:
        return await changes.find_changes(db, job, stage, span, limit)

    @override
    @writing
    async def note_deed(self, db: AsyncConnection, deed: Deed, job: str, detail: str) -> None:
        await audit.write_audit(db, deed, job=job, detail=detail)

    @override
    @writing
    async def trim_audit(self, db: AsyncConnection, keep_until_ms: int) -> int:
        return await audit.trim_audit(db, keep_until_ms)

"""The ledger on a SQL database, through SQLAlchemy: SQLite embedded, Postgres in production.

Every statement stands here, with its purpose as its name. One writer at a time in this process; on
Postgres the row of the job in `jobs` is each transaction's first write, which makes those on one job
queue up behind each other, in whatever replica they run.
"""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
from sqlalchemy import (
    BigInteger,
    Row,
    bindparam,
    case,
    delete,
    event,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from service.errors import StoreRefusedError, UnavailableError, UnknownJobError
from service.frontier.graph import Pipeline, StageWatermark
from service.frontier.ranges import Layout
from service.frontier.timestamps import MIN
from service.ledger.migrate import upgrade
from service.ledger.port import JobRecord, NewLayout, StoredJob
from service.ledger.tables import history, incarnations, jobs, promise_chunks, stages
from service.spec import decode_spec
from service.state import (
    CHUNK,
    InstalledJob,
    InstalledStage,
    PromiseChunk,
    StageProgress,
    StageView,
)
from service.tasks import to_its_end

# ---- statements

FIND_JOB = select(jobs).where(jobs.c.name == bindparam("b_job"))
FIND_JOBS = select(jobs).where(~jobs.c.deleted).order_by(jobs.c.name)
FIND_STAGES = select(stages).where(stages.c.job == bindparam("b_job"))
FIND_CHUNKS = (
    select(promise_chunks)
    .where(promise_chunks.c.job == bindparam("b_job"))
    .order_by(promise_chunks.c.stage, promise_chunks.c.chunk)
)
OPEN_INCARNATION = insert(incarnations).returning(incarnations.c.number)
LOCK_NEW_JOB = insert(jobs)
REVIVE_JOB = (
    update(jobs)
    .where(jobs.c.name == bindparam("b_job"), jobs.c.deleted)
    .values(
        generation=jobs.c.generation + 1,
        layout_version=1,
        revision=jobs.c.revision + 1,
        spec=bindparam("b_spec"),
        deleted=False,
        updated_at_ms=bindparam("b_at_ms"),
    )
)
REPLACE_SPEC = (
    update(jobs)
    .where(
        jobs.c.name == bindparam("b_job"),
        jobs.c.generation == bindparam("b_generation"),
        jobs.c.layout_version == bindparam("b_layout_version"),
        ~jobs.c.deleted,
    )
    .values(
        layout_version=jobs.c.layout_version + 1,
        spec=bindparam("b_spec"),
        updated_at_ms=bindparam("b_at_ms"),
    )
)
START_GENERATION = (
    update(jobs)
    .where(jobs.c.name == bindparam("b_job"), ~jobs.c.deleted)
    .values(
        generation=jobs.c.generation + 1,
        revision=jobs.c.revision + 1,
        updated_at_ms=bindparam("b_at_ms"),
    )
)
BURY_JOB = (
    update(jobs)
    .where(jobs.c.name == bindparam("b_job"), ~jobs.c.deleted)
    .values(deleted=True, updated_at_ms=bindparam("b_at_ms"))
)
TAKE_RUN_NUMBER = (
    update(jobs)
    .where(jobs.c.name == bindparam("b_job"), ~jobs.c.deleted)
    .values(last_run=jobs.c.last_run + 1)
    .returning(jobs.c.last_run)
)
TAKE_REVISION = (
    update(jobs)
    .where(
        jobs.c.name == bindparam("b_job"),
        jobs.c.generation == bindparam("b_generation"),
        jobs.c.layout_version == bindparam("b_layout_version"),
        ~jobs.c.deleted,
    )
    .values(revision=jobs.c.revision + 1)
    .returning(jobs.c.revision)
)
GIVE_STAGE_TO_RUN = (
    update(stages)
    .where(stages.c.job == bindparam("b_job"), stages.c.stage == bindparam("b_stage"))
    .values(run=bindparam("b_run"))
)
CHANGE_LAYOUT_OF_STAGE = (
    update(stages)
    .where(stages.c.job == bindparam("b_job"), stages.c.stage == bindparam("b_stage"))
    .values(layout_since=bindparam("b_layout_since"))
)
_INPUT = bindparam("b_input", type_=BigInteger)
_OUTPUT = bindparam("b_output", type_=BigInteger)
ADVANCE_STAGE = (
    update(stages)
    .where(
        stages.c.job == bindparam("b_job"),
        stages.c.stage == bindparam("b_stage"),
        or_(
            stages.c.input < _INPUT,
            stages.c.output < _OUTPUT,
            stages.c.idle != bindparam("b_idle"),
        ),
    )
    .values(
        input=case((stages.c.input < _INPUT, _INPUT), else_=stages.c.input),
        output=case((stages.c.output < _OUTPUT, _OUTPUT), else_=stages.c.output),
        idle=bindparam("b_idle"),
        version=stages.c.version + 1,
        revision=bindparam("b_revision"),
        updated_at_ms=bindparam("b_at_ms"),
    )
)
FIND_ADVANCED = select(stages).where(
    stages.c.job == bindparam("b_job"), stages.c.revision == bindparam("b_revision")
)
REMEMBER_ADVANCED = insert(history).from_select(
    ["job", "stage", "generation", "version", "input", "output", "idle", "at_ms"],
    select(
        stages.c.job,
        stages.c.stage,
        bindparam("b_generation", type_=BigInteger),
        stages.c.version,
        stages.c.input,
        stages.c.output,
        stages.c.idle,
        stages.c.updated_at_ms,
    ).where(stages.c.job == bindparam("b_job"), stages.c.revision == bindparam("b_revision")),
)
COMMIT_EPOCH = (
    update(stages)
    .where(
        stages.c.job == bindparam("b_job"),
        stages.c.stage == bindparam("b_stage"),
        or_(stages.c.epoch.is_(None), stages.c.epoch < bindparam("b_epoch")),
    )
    .values(epoch=bindparam("b_epoch"))
)


class SqlLedger:
    """Keeps everything in a database. See `service.ledger.port.Ledger` for what each method does."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url)
        self._engine = _engine(url)
        self._lock_file: TextIO | None = None
        # SQLite has one writer. Waiting for it here costs nothing, waiting in SQLite is a poll.
        self._writer = asyncio.Lock()
        upsert: Any = sqlite_insert if self._engine.dialect.name == "sqlite" else postgres_insert
        statement = upsert(promise_chunks)
        self._save_chunks = statement.on_conflict_do_update(
            index_elements=["job", "stage", "chunk"],
            set_={
                name: statement.excluded[name]
                for name in ("generation", "layout_since", "promises")
            },
        )

    @to_its_end
    async def open(self, at_ms: int) -> int:
        """See the port."""
        self._take_lock()
        async with self._transaction() as db:
            await db.run_sync(upgrade)
            row = (await db.execute(OPEN_INCARNATION, {"opened_at_ms": at_ms})).one()
            return int(row.number)

    @to_its_end
    async def load(self) -> Sequence[StoredJob]:
        """See the port."""
        async with self._transaction() as db:
            return [
                await self._stored(db, row, with_promises=True)
                for row in (await db.execute(FIND_JOBS)).all()
            ]

    @to_its_end
    async def get(self, job: str) -> StoredJob:
        """See the port."""
        async with self._transaction() as db:
            return await self._find(db, job)

    @to_its_end
    async def create(self, layout: NewLayout, at_ms: int) -> StoredJob | None:
        """See the port."""
        async with self._transaction() as db:
            row = (await db.execute(FIND_JOB, {"b_job": layout.job})).one_or_none()
            if row is not None and not row.deleted:
                return None
            if row is None:
                await db.execute(
                    LOCK_NEW_JOB,
                    {
                        "name": layout.job,
                        "generation": 1,
                        "layout_version": 1,
                        "revision": 0,
                        "last_run": 0,
                        "spec": layout.spec,
                        "deleted": False,
                        "created_at_ms": at_ms,
                        "updated_at_ms": at_ms,
                    },
                )
            else:
                await db.execute(
                    REVIVE_JOB, {"b_job": layout.job, "b_spec": layout.spec, "b_at_ms": at_ms}
                )
            await self._add_stages(db, layout, 1, at_ms)
            return await self._find(db, layout.job)

    @to_its_end
    async def replace(
        self, layout: NewLayout, generation: int, layout_version: int, at_ms: int
    ) -> StoredJob | None:
        """See the port."""
        async with self._transaction() as db:
            done = await db.execute(
                REPLACE_SPEC,
                {
                    "b_job": layout.job,
                    "b_generation": generation,
                    "b_layout_version": layout_version,
                    "b_spec": layout.spec,
                    "b_at_ms": at_ms,
                },
            )
            if done.rowcount == 0:
                return None
            await self._change_layouts(db, layout, generation, layout_version + 1, at_ms)
            return await self._find(db, layout.job)

    @to_its_end
    async def reset(self, job: str, at_ms: int) -> StoredJob:
        """See the port."""
        async with self._transaction() as db:
            done = await db.execute(START_GENERATION, {"b_job": job, "b_at_ms": at_ms})
            if done.rowcount == 0:
                raise _unknown(job)
            row = (await db.execute(FIND_JOB, {"b_job": job})).one()
            await db.execute(delete(promise_chunks).where(promise_chunks.c.job == job))
            await db.execute(
                update(stages)
                .where(stages.c.job == job)
                .values(
                    run=0,
                    epoch=None,
                    input=MIN,
                    output=MIN,
                    idle=False,
                    version=0,
                    revision=row.revision,
                    updated_at_ms=at_ms,
                )
            )
            return await self._find(db, job)

    @to_its_end
    async def delete(self, job: str, at_ms: int) -> None:
        """See the port."""
        async with self._transaction() as db:
            done = await db.execute(BURY_JOB, {"b_job": job, "b_at_ms": at_ms})
            if done.rowcount == 0:
                raise _unknown(job)
            for table in (stages, promise_chunks, history):
                await db.execute(delete(table).where(table.c.job == job))

    @to_its_end
    async def open_run(self, job: str, stages: Sequence[str]) -> int:
        """See the port."""
        async with self._transaction() as db:
            row = (await db.execute(TAKE_RUN_NUMBER, {"b_job": job})).one_or_none()
            if row is None:
                raise _unknown(job)
            run = int(row.last_run)
            await db.execute(
                GIVE_STAGE_TO_RUN,
                [{"b_job": job, "b_stage": stage, "b_run": run} for stage in sorted(set(stages))],
            )
            return run

    @to_its_end
    async def record(
        self, records: Sequence[JobRecord], at_ms: int
    ) -> Mapping[str, Mapping[str, StageView]]:
        """See the port."""
        taken: dict[str, Mapping[str, StageView]] = {}
        async with self._transaction() as db:
            # In one order everywhere, so that two transactions never wait for each other in a ring.
            for record in sorted(records, key=lambda record: record.job):
                views = await self._record_job(db, record, at_ms)
                if views is not None:
                    taken[record.job] = views
        return taken

    async def _record_job(
        self, db: AsyncConnection, record: JobRecord, at_ms: int
    ) -> Mapping[str, StageView] | None:
        at = {
            "b_job": record.job,
            "b_generation": record.generation,
            "b_layout_version": record.layout_version,
        }
        row = (await db.execute(TAKE_REVISION, at)).one_or_none()
        if row is None:
            return None
        views: dict[str, StageView] = {}
        if record.advances:
            key = {"b_job": record.job, "b_revision": row.revision}
            rows = [
                _advance(stage, w) | key | {"b_at_ms": at_ms}
                for stage, w in sorted(record.advances.items())
            ]
            await db.execute(ADVANCE_STAGE, rows)
            views = {r.stage: _view(r) for r in await db.execute(FIND_ADVANCED, key)}
            await db.execute(REMEMBER_ADVANCED, key | {"b_generation": record.generation})
        if record.epochs:
            epochs = sorted(record.epochs.items())
            await db.execute(
                COMMIT_EPOCH,
                [{"b_job": record.job, "b_stage": s, "b_epoch": epoch} for s, epoch in epochs],
            )
        await self._save(db, record.chunks)
        return views

    @to_its_end
    async def checkpoint(self, chunks: Sequence[PromiseChunk]) -> None:
        """See the port."""
        if chunks:
            async with self._transaction() as db:
                await self._save(db, chunks)

    async def _save(self, db: AsyncConnection, chunks: Sequence[PromiseChunk]) -> None:
        if not chunks:
            return
        names = sorted({chunk.job for chunk in chunks})
        current = {
            (row.job, row.stage): (row.generation, row.layout_since)
            for row in await db.execute(
                select(stages.c.job, stages.c.stage, stages.c.layout_since, jobs.c.generation)
                .join(jobs, jobs.c.name == stages.c.job)
                .where(stages.c.job.in_(names))
            )
        }
        rows = [
            {
                "job": chunk.job,
                "stage": chunk.stage,
                "chunk": chunk.chunk,
                "generation": chunk.generation,
                "layout_since": chunk.layout_since,
                "promises": chunk.promises,
            }
            for chunk in sorted(chunks, key=lambda c: (c.job, c.stage, c.chunk))
            if current.get((chunk.job, chunk.stage)) == (chunk.generation, chunk.layout_since)
        ]
        if rows:
            await db.execute(self._save_chunks, rows)

    @to_its_end
    async def thin_history(self, *, fine_until_ms: int, keep_until_ms: int) -> int:
        """See the port."""
        minute = history.c.at_ms // 60_000
        last_of_minute = select(func.max(history.c.id)).group_by(
            history.c.job, history.c.stage, history.c.generation, minute
        )
        async with self._transaction() as db:
            old = await db.execute(delete(history).where(history.c.at_ms < keep_until_ms))
            fine = await db.execute(
                delete(history).where(
                    history.c.at_ms < fine_until_ms, history.c.id.not_in(last_of_minute)
                )
            )
            return old.rowcount + fine.rowcount

    @to_its_end
    async def ping(self) -> None:
        """See the port."""
        async with self._transaction() as db:
            await db.execute(select(1))

    async def close(self) -> None:
        """See the port."""
        await self._engine.dispose()
        if self._lock_file is not None:
            self._lock_file.close()

    # ---- parts of the transactions above

    @asynccontextmanager
    async def _transaction(self) -> AsyncGenerator[AsyncConnection]:
        async with self._writer:
            try:
                async with self._engine.begin() as db:
                    yield db
            except (DBAPIError, OSError) as error:
                raise UnavailableError(f"the ledger does not answer: {error}") from error

    async def _find(self, db: AsyncConnection, job: str) -> StoredJob:
        row = (await db.execute(FIND_JOB, {"b_job": job})).one_or_none()
        if row is None or row.deleted:
            raise _unknown(job)
        return await self._stored(db, row, with_promises=False)

    async def _stored(
        self, db: AsyncConnection, row: Row[Any], *, with_promises: bool
    ) -> StoredJob:
        pipeline = decode_spec(row.spec).pipeline()
        key = {"b_job": row.name}
        chunks: dict[str, list[Row[Any]]] = {}
        if with_promises:
            for chunk in await db.execute(FIND_CHUNKS, key):
                if chunk.generation == row.generation:
                    chunks.setdefault(chunk.stage, []).append(chunk)
        installed = {
            stage.stage: _installed(stage, pipeline, chunks.get(stage.stage, []))
            for stage in await db.execute(FIND_STAGES, key)
            if stage.stage in pipeline.stages
        }
        job = InstalledJob(
            row.name, pipeline, row.generation, row.layout_version, row.revision, installed
        )
        return StoredJob(bytes(row.spec), job)

    async def _change_layouts(
        self,
        db: AsyncConnection,
        layout: NewLayout,
        generation: int,
        layout_version: int,
        at_ms: int,
    ) -> None:
        for stage in layout.changed:
            await db.execute(
                delete(promise_chunks).where(
                    promise_chunks.c.job == layout.job, promise_chunks.c.stage == stage
                )
            )
            await db.execute(
                CHANGE_LAYOUT_OF_STAGE,
                {"b_job": layout.job, "b_stage": stage, "b_layout_since": layout_version},
            )
        await self._add_stages(db, layout, layout_version, at_ms)
        await self._save(
            db,
            [
                PromiseChunk(
                    layout.job,
                    stage,
                    generation,
                    layout_version,
                    number,
                    packed[8 * CHUNK * number : 8 * CHUNK * (number + 1)],
                )
                for stage, packed in layout.promises.items()
                for number in range(-(-len(packed) // (8 * CHUNK)))
            ],
        )

    async def _add_stages(
        self, db: AsyncConnection, layout: NewLayout, layout_version: int, at_ms: int
    ) -> None:
        known = {row.stage for row in await db.execute(FIND_STAGES, {"b_job": layout.job})}
        row = (await db.execute(FIND_JOB, {"b_job": layout.job})).one()
        new = [
            {
                "job": layout.job,
                "stage": stage,
                "layout_since": layout_version,
                "run": 0,
                "epoch": None,
                "input": MIN,
                "output": MIN,
                "idle": False,
                "version": 0,
                "revision": row.revision,
                "updated_at_ms": at_ms,
            }
            for stage in layout.changed
            if stage not in known
        ]
        if new:
            await db.execute(insert(stages), new)

    def _take_lock(self) -> None:
        """Keep other processes off an SQLite ledger: beside it, each would have leases of its own."""
        path = self._url.database
        if self._engine.dialect.name != "sqlite" or not path or path == ":memory:":
            return
        lock = Path(f"{path}.lock")
        try:
            handle = lock.open("w")
        except OSError as error:
            raise StoreRefusedError(
                f"cannot write the ledger {path}: {error.strerror}; choose another TIDEGAUGE_LEDGER_URL"
            ) from error
        try:
            # The kernel lets go of it when the process dies, however it dies.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.close()
            raise StoreRefusedError(
                f"another process serves {path}, and memory:// with SQLite is for one process: stop it,"
                " or use TIDEGAUGE_LIVE_URL=redis://… and TIDEGAUGE_LEDGER_URL=postgresql+psycopg://…"
            ) from None
        self._lock_file = handle


class _Cursor(Protocol):
    def execute(self, statement: str, /) -> object: ...
    def close(self) -> object: ...


class _RawConnection(Protocol):
    def cursor(self) -> _Cursor: ...


def _engine(url: str) -> AsyncEngine:
    try:
        sqlite = make_url(url).get_backend_name() == "sqlite"
        engine = (
            create_async_engine(url, pool_size=1, max_overflow=0)
            if sqlite
            else create_async_engine(url, pool_size=4, max_overflow=4, pool_pre_ping=True)
        )
    except (SQLAlchemyError, ImportError) as error:
        raise StoreRefusedError(f"TIDEGAUGE_LEDGER_URL {url!r} cannot be used: {error}") from error
    if sqlite:
        event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    return engine


def _prepare_sqlite(connection: _RawConnection, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # FULL: a commit is on the disk, not in its cache, before anybody is told of an advance.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA busy_timeout=5000")
    cursor.close()


def _unknown(job: str) -> UnknownJobError:
    return UnknownJobError(f"there is no job {job!r}")


def _advance(stage: str, watermark: StageWatermark) -> dict[str, Any]:
    return {
        "b_stage": stage,
        "b_input": watermark.input,
        "b_output": watermark.output,
        "b_idle": watermark.idle,
    }


def _view(row: Row[Any]) -> StageView:
    return StageView(
        watermark=StageWatermark(row.input, row.output, row.idle),
        version=row.version,
        revision=row.revision,
        updated_at_ms=row.updated_at_ms,
    )


def _installed(row: Row[Any], pipeline: Pipeline, chunks: Sequence[Row[Any]]) -> InstalledStage:
    layout = pipeline.stages[row.stage].layout
    return InstalledStage(
        view=_view(row),
        progress=StageProgress(row.run, row.epoch),
        layout_since=row.layout_since,
        promises=None if layout is None else _promises(row, layout, chunks),
    )


def _promises(row: Row[Any], layout: Layout, chunks: Sequence[Row[Any]]) -> Sequence[int] | None:
    if not chunks:
        return None
    promises = np.full(len(layout), MIN, dtype=np.int64)
    for chunk in chunks:
        if chunk.layout_since == row.layout_since:
            start = chunk.chunk * CHUNK
            packed = np.frombuffer(chunk.promises, dtype="<i8")
            promises[start : start + len(packed)] = packed
    return promises.tolist()

"""The ledger's SQL statements, each named after its purpose. Runs and the history have modules of their
own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    ColumnClause,
    ColumnElement,
    Executable,
    String,
    TableValuedAlias,
    Text,
    and_,
    bindparam,
    case,
    cast,
    column,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from service.frontier.graph import StageWatermark
from service.ledger.tables import (
    COUNTS,
    WATERMARK,
    history,
    incarnations,
    jobs,
    promise_chunks,
    runs,
    stages,
)

LOCK_JOB = select(jobs).where(jobs.c.name == bindparam("b_job")).with_for_update()
FIND_JOBS = (
    select(jobs).where(jobs.c.name.in_(bindparam("b_jobs", expanding=True))).order_by(jobs.c.name)
)
LOCK_JOBS = (
    select(jobs.c.name, jobs.c.deleted, jobs.c.incarnation)
    .where(jobs.c.name.in_(bindparam("b_jobs", expanding=True)))
    .order_by(jobs.c.name)
    .with_for_update()
)
# In the order of the members of `JobHead`. A deleted job's row stays for ever, and is not read.
_HEAD = select(
    jobs.c.incarnation,
    jobs.c.generation,
    jobs.c.layout_version,
    jobs.c.revision,
    jobs.c.last_run,
    jobs.c.name,
).where(~jobs.c.deleted)
FIND_HEAD = _HEAD.where(jobs.c.name == bindparam("b_job"))
FIND_CREATION = select(jobs.c.created_at_ms).where(
    jobs.c.name == bindparam("b_job"), ~jobs.c.deleted
)
FIND_HEADS = _HEAD.order_by(jobs.c.name)
FIND_DELETED = select(jobs.c.name, jobs.c.generation).where(
    jobs.c.name.in_(bindparam("b_jobs", expanding=True)), jobs.c.deleted
)
FIND_STAGES = (
    select(stages, runs.c.outcome, runs.c.ended_at_ms, runs.c.because, runs.c.holder)
    .outerjoin(runs, and_(runs.c.job == stages.c.job, runs.c.run == stages.c.run))
    .where(stages.c.job.in_(bindparam("b_jobs", expanding=True)))
)
FIND_CHUNKS = (
    select(promise_chunks)
    .where(promise_chunks.c.job.in_(bindparam("b_jobs", expanding=True)))
    .order_by(promise_chunks.c.job, promise_chunks.c.stage, promise_chunks.c.chunk)
)
FIND_STAMPS = select(
    promise_chunks.c.job,
    promise_chunks.c.stage,
    promise_chunks.c.chunk,
    promise_chunks.c.incarnation,
    promise_chunks.c.stamp,
).where(
    promise_chunks.c.job.in_(bindparam("b_jobs", expanding=True)),
    promise_chunks.c.stage.in_(bindparam("b_stages", expanding=True)),
)
FIND_CHUNKS_OF_STAGES = FIND_CHUNKS.where(
    promise_chunks.c.stage.in_(bindparam("b_stages", expanding=True)),
    promise_chunks.c.generation == bindparam("b_generation"),
)
DRAW_INCARNATION = insert(incarnations).returning(incarnations.c.number)
BEGIN_INCARNATION = (
    update(jobs)
    .where(jobs.c.name == bindparam("b_job"))
    .values(incarnation=bindparam("b_incarnation"), updated_at_ms=bindparam("b_at_ms"))
)
REVIVE_JOB = (
    update(jobs)
    .where(jobs.c.name == bindparam("b_job"), jobs.c.deleted)
    .values(
        incarnation=bindparam("b_incarnation"),
        generation=jobs.c.generation + 1,
        layout_version=1,
        revision=jobs.c.revision + 1,
        spec=bindparam("b_spec"),
        deleted=False,
        created_at_ms=bindparam("b_at_ms"),
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
    .returning(jobs.c.incarnation)
)
START_GENERATION = (
    update(jobs)
    .where(jobs.c.name == bindparam("b_job"), ~jobs.c.deleted)
    .values(
        generation=jobs.c.generation + 1,
        revision=jobs.c.revision + 1,
        updated_at_ms=bindparam("b_at_ms"),
    )
    .returning(jobs.c.revision, jobs.c.generation)
)
DELETE_JOB = (
    update(jobs)
    .where(jobs.c.name == bindparam("b_job"), ~jobs.c.deleted)
    .values(deleted=True, updated_at_ms=bindparam("b_at_ms"))
    .returning(jobs.c.generation)
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
        jobs.c.incarnation == bindparam("b_incarnation"),
        jobs.c.generation == bindparam("b_generation"),
        jobs.c.layout_version == bindparam("b_layout_version"),
        or_(bindparam("b_in_any_order", type_=Boolean), jobs.c.revision == bindparam("b_seen")),
        ~jobs.c.deleted,
    )
    .values(revision=jobs.c.revision + 1)
    .returning(jobs.c.revision)
)
GIVE_STAGE_TO_RUN = (
    update(stages)
    .where(stages.c.job == bindparam("b_job"), stages.c.stage == bindparam("b_stage"))
    .values(run=bindparam("b_run"), run_holder=bindparam("b_holder"))
)
CHANGE_LAYOUT_OF_STAGE = (
    update(stages)
    .where(stages.c.job == bindparam("b_job"), stages.c.stage == bindparam("b_stage"))
    .values(layout_since=bindparam("b_layout_since"))
)


def _rises(name: str) -> bool:
    return isinstance(stages.c[name].type, BigInteger)


def _moves(to: Mapping[str, ColumnElement[Any]]) -> ColumnElement[bool]:
    """Return the condition that an advance to these values changes a stage."""
    return or_(
        *(
            stages.c[name] < new if _rises(name) else stages.c[name] != new
            for name, new in to.items()
        )
    )


def _advanced(to: Mapping[str, ColumnElement[Any]]) -> dict[str, ColumnElement[Any]]:
    """Return a stage's values after an advance to these."""
    return {
        name: case((stages.c[name] < new, new), else_=stages.c[name]) if _rises(name) else new
        for name, new in to.items()
    }


def _changed(
    to: Mapping[str, ColumnElement[Any]], revision: ColumnElement[Any]
) -> dict[str, ColumnElement[Any]]:
    """Return all columns of a stage that an advance to these values changes."""
    at_ms = bindparam("b_at_ms", type_=BigInteger)
    return _advanced(to) | {
        "version": stages.c.version + 1,
        "revision": revision,
        "updated_at_ms": at_ms,
        "advanced_at_ms": case(
            (stages.c.output < to["output"], at_ms),
            else_=func.coalesce(stages.c.advanced_at_ms, stages.c.updated_at_ms),
        ),
    }


_TO = {name: bindparam(f"b_{name}", type_=stages.c[name].type) for name in WATERMARK}
_HISTORY = ["job", "stage", "generation", "version", *WATERMARK, "at_ms", *COUNTS]
ADVANCE_STAGE = (
    update(stages)
    .where(
        stages.c.job == bindparam("b_job"),
        stages.c.stage == bindparam("b_stage"),
        _moves(_TO),
    )
    .values(**_changed(_TO, bindparam("b_revision", type_=BigInteger)))
)
FIND_NEWER = select(stages).where(
    stages.c.job == bindparam("b_job"), stages.c.revision > bindparam("b_seen")
)
ADD_TO_HISTORY = insert(history).from_select(
    _HISTORY,
    select(
        stages.c.job,
        stages.c.stage,
        bindparam("b_generation", type_=BigInteger),
        stages.c.version,
        *(stages.c[name] for name in WATERMARK),
        stages.c.updated_at_ms,
        *(bindparam(f"b_{name}", type_=BigInteger) for name in COUNTS),
    ).where(
        stages.c.job == bindparam("b_job"),
        stages.c.stage == bindparam("b_stage"),
        stages.c.revision == bindparam("b_revision"),
    ),
)


def _rows_of(name: str, *columns: ColumnClause[Any]) -> TableValuedAlias:
    """Read rows from the parameter of that name, which is JSON."""
    given = func.json_to_recordset(cast(bindparam(f"b_{name}", type_=Text), JSON))
    return given.table_valued(*columns).render_derived(name, with_types=True)


def _record_in_one_statement() -> Executable:
    """Record the advances of many jobs, each only if its revision is unchanged since it was seen.

    One statement is one round trip to the server instead of six. It also has only one snapshot, taken
    before it waits for any lock. This is safe: every change of a watermark takes a new revision, and the
    seen revision was committed before the statement began. So if a job's revision is unchanged, the
    watermarks in the snapshot are the newest.
    """
    record = _rows_of(
        "record",
        column("job", String),
        column("incarnation", BigInteger),
        column("generation", BigInteger),
        column("layout_version", BigInteger),
        column("seen", BigInteger),
    )
    advance = _rows_of(
        "advance",
        column("job", String),
        column("stage", String),
        *(column(name, stages.c[name].type) for name in WATERMARK),
        *(column(name, BigInteger) for name in COUNTS),
    )
    to = {name: advance.c[name] for name in WATERMARK}
    # Separate from the update, which would lock the rows in an arbitrary order.
    locked = (
        select(jobs.c.name)
        .join_from(jobs, record, jobs.c.name == record.c.job)
        .where(
            jobs.c.incarnation == record.c.incarnation,
            jobs.c.generation == record.c.generation,
            jobs.c.layout_version == record.c.layout_version,
            jobs.c.revision == record.c.seen,
            ~jobs.c.deleted,
        )
        .order_by(jobs.c.name)
        .with_for_update(of=jobs)
        .cte("locked")
    )
    taken = (
        update(jobs)
        .where(jobs.c.name == locked.c.name)
        .values(revision=jobs.c.revision + 1)
        .returning(jobs.c.name, jobs.c.generation, jobs.c.revision)
        .cte("taken")
    )
    moved = (
        update(stages)
        .where(
            stages.c.job == taken.c.name,
            stages.c.job == advance.c.job,
            stages.c.stage == advance.c.stage,
            _moves(to),
        )
        .values(**_changed(to, taken.c.revision))
        .returning(*stages.c)
        .cte("moved")
    )
    in_history = insert(history).from_select(
        _HISTORY,
        select(
            moved.c.job,
            moved.c.stage,
            taken.c.generation,
            moved.c.version,
            *(moved.c[name] for name in WATERMARK),
            moved.c.updated_at_ms,
            *(advance.c[name] for name in COUNTS),
        )
        .join_from(moved, taken, moved.c.job == taken.c.name)
        .join(advance, and_(advance.c.job == moved.c.job, advance.c.stage == moved.c.stage)),
    )
    return (
        select(
            taken.c.name,
            taken.c.revision.label("taken"),
            moved.c.stage,
            *(moved.c[name] for name in WATERMARK),
            moved.c.version,
            moved.c.revision,
            moved.c.updated_at_ms,
            moved.c.advanced_at_ms,
        )
        .select_from(taken.outerjoin(moved, moved.c.job == taken.c.name))
        .add_cte(in_history.cte("in_history"))
    )


RECORD_IN_ONE_STATEMENT = _record_in_one_statement()
COMMIT_EPOCH = (
    update(stages)
    .where(
        stages.c.job == bindparam("b_job"),
        stages.c.stage == bindparam("b_stage"),
        or_(stages.c.epoch.is_(None), stages.c.epoch < bindparam("b_epoch")),
    )
    .values(epoch=bindparam("b_epoch"))
)
FIND_LAYOUTS = (
    select(
        stages.c.job,
        stages.c.stage,
        stages.c.layout_since,
        jobs.c.generation,
        jobs.c.incarnation,
    )
    .join(jobs, jobs.c.name == stages.c.job)
    .where(jobs.c.name.in_(bindparam("b_jobs", expanding=True)), ~jobs.c.deleted)
)
START_STAGES_OVER = (
    update(stages)
    .where(stages.c.job == bindparam("b_job"))
    .values(
        run=0,
        epoch=None,
        **asdict(StageWatermark()),
        version=0,
        revision=bindparam("b_revision"),
        updated_at_ms=bindparam("b_at_ms"),
        advanced_at_ms=bindparam("b_at_ms"),
    )
)
DROP_CHUNKS = delete(promise_chunks).where(promise_chunks.c.job == bindparam("b_job"))
DROP_CHUNKS_OF_STAGE = DROP_CHUNKS.where(promise_chunks.c.stage == bindparam("b_stage"))
PROBE = insert(history).values(
    job="", stage="", generation=0, version=0, at_ms=0, **asdict(StageWatermark())
)
REMOVE_PROBE = delete(history).where(history.c.job == "", history.c.at_ms == 0)

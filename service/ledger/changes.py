"""Changes of a job in the ledger, within a transaction. See `Ledger.changes`."""

from __future__ import annotations

from sqlalchemy import ColumnElement, case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from service.ledger import run_statements as run_sql
from service.ledger import statements as sql
from service.ledger.audit import OF_RANGES, record_of
from service.ledger.loading import unknown_job
from service.ledger.port import RecordedChanges, Span
from service.ledger.rows import run_of
from service.ledger.tables import audit, runs
from service.model.audit import Action

_ACTIONS = (
    Action.CREATE_JOB,
    Action.CHANGE_JOB,
    Action.RESET_JOB,
    Action.DELETE_JOB,
    Action.RETIRE_RANGE,
    Action.RETURN_RANGE,
)
"""Those without runs, which the ledger keeps apart. The index passes over the records of runs."""


_OF_SOME_STAGES = (
    (audit.c.action == Action.CHANGE_JOB.value)
    & run_sql.holds(audit.c.detail, "; ")
    # Cut: others may follow.
    & ~audit.c.detail.endswith("…", autoescape=True)
)
"""Changes of a specification whose detail has every stage that differs (see `specification_of`)."""


def _names(stage: str) -> ColumnElement[bool]:
    return run_sql.holds(audit.c.detail, f"; {stage}: ")


async def find_changes(
    db: AsyncConnection, job: str, stage: str | None, span: Span, limit: int
) -> RecordedChanges:
    """See `Ledger.changes`."""
    if (await db.execute(sql.FIND_HEAD, {"b_job": job})).one_or_none() is None:
        raise unknown_job(job)
    records = (
        select(audit)
        .where(
            audit.c.job == job,
            audit.c.at_ms.between(*span),
            audit.c.action.in_([each.value for each in _ACTIONS]),
        )
        .order_by(audit.c.at_ms.desc(), audit.c.number.desc())
        .limit(limit)
    )
    if stage is not None:
        # The detail of a retirement, or of its end, begins with the stage. Names do not have blanks.
        of_stage = func.substr(audit.c.detail, 1, len(stage) + 1) == f"{stage} "
        of_range = audit.c.action.in_(OF_RANGES)
        records = records.where(or_(~of_range, of_stage), or_(~_OF_SOME_STAGES, _names(stage)))
    started = runs.c.started_at_ms.between(*span)
    ended = runs.c.ended_at_ms.between(*span)
    # Each run has at least one change, so the newest changes are of at most as many runs.
    newest: ColumnElement[int] = case((ended, runs.c.ended_at_ms), else_=runs.c.started_at_ms)
    executed = (
        run_sql.RUNS_OF_JOB.where(or_(started, ended))
        .order_by(newest.desc(), runs.c.run.desc())
        .limit(limit)
    )
    if stage is not None:
        executed = executed.where(run_sql.opened_for(stage))
    return RecordedChanges(
        [record_of(row) for row in await db.execute(records)],
        [run_of(row) for row in await db.execute(executed, {"b_job": job})],
    )

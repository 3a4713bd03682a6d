"""Runs in the ledger, within a transaction."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace
from sqlalchemy.ext.asyncio import AsyncConnection

from service.errors import StaleRunError, UnknownRunError
from service.frontier.health import past
from service.ledger import run_statements as run_sql
from service.ledger import statements as sql
from service.ledger.audit import write_audit
from service.ledger.loading import unknown_job
from service.ledger.rows import end_of, run_of, run_row
from service.model.audit import Action, Deed
from service.model.runs import MAX_NUMBER, MAX_RUNS, EndedRun, NewRun, RunEnd, RunRecord


async def open_run(
    db: AsyncConnection, job: str, run: NewRun, at_ms: int, deed: Deed | None
) -> int:
    """See `Ledger.open_run`."""
    row = (await db.execute(sql.TAKE_RUN_NUMBER, {"b_job": job})).one_or_none()
    if row is None:
        raise unknown_job(job)
    number = int(row.last_run)
    stages = sorted(set(run.stages))
    # Before the stages are taken from the earlier runs.
    await db.execute(run_sql.SAVE_EPOCHS_OF_RUNS, {"b_job": job})
    found = await db.execute(run_sql.FIND_LAST_EPOCH, {"b_job": job, "b_stages": stages})
    await db.execute(run_sql.ADD_RUN, run_row(job, number, run, at_ms, found.scalar_one()))
    await db.execute(
        sql.GIVE_STAGE_TO_RUN,
        [
            {"b_job": job, "b_stage": stage, "b_run": number, "b_holder": run.holder}
            for stage in stages
        ],
    )
    await db.execute(run_sql.DROP_OLD_RUNS, {"b_job": job, "b_until": number - MAX_RUNS})
    detail = f"run {number} of {', '.join(stages)} by {run.holder}"
    await write_audit(db, deed, job=job, detail=detail)
    return number


async def end_run(db: AsyncConnection, job: str, end: RunEnd, deed: Deed | None) -> EndedRun:
    """See `Ledger.end_run`."""
    head = (await db.execute(sql.LOCK_JOB, {"b_job": job})).one_or_none()
    if head is None or head.deleted:
        raise unknown_job(job)
    key = {"b_job": job, "b_run": end.run}
    row = (await db.execute(run_sql.FIND_RUN, key)).one_or_none()
    if row is None and end.run > head.last_run:
        raise UnknownRunError(f"job {job!r} has no run {end.run}")
    stages = [each.stage for each in await db.execute(run_sql.FIND_STAGES_OF_RUN, key)]
    before = None if row is None else end_of(row)
    if before is not None:
        if before.outcome is not end.outcome:
            raise StaleRunError(
                f"run {end.run} has already ended: it {past(before.outcome)}, and cannot be ended as"
                f" {end.outcome.value}",
                end.run,
                outcome=before.outcome.value,
            )
        return EndedRun(before, stages)
    if not stages:
        raise StaleRunError(
            f"run {end.run} is fenced: each of its stages belongs to a newer run, or to none", None
        )
    await db.execute(
        run_sql.END_RUN,
        {
            **key,
            "b_outcome": end.outcome.value,
            "b_at_ms": end.at_ms,
            "b_because": end.because,
        },
    )
    await write_audit(db, deed, job=job, detail=_end_text(end, stages))
    return EndedRun(replace(end, holder="" if row is None else row.holder), stages)


async def fence_runs(
    db: AsyncConnection, job: str, at_ms: int, because: str, deed: Deed | None
) -> None:
    """End the runs of a job that go on, before all their stages are taken from them."""
    values = {"b_job": job, "b_at_ms": at_ms, "b_because": because}
    ended = None if deed is None else dataclasses.replace(deed, action=Action.END_RUN)
    for row in sorted(await db.execute(run_sql.FENCE_RUNS, values)):
        stages = ", ".join(msgspec.json.decode(row.stages, type=list[str]))
        detail = f"run {row.run} of {stages} was fenced: {because}"
        await write_audit(db, ended, job=job, detail=detail)


def _end_text(end: RunEnd, stages: Sequence[str]) -> str:
    cause = f": {end.because}" if end.because else ""
    return f"run {end.run} of {', '.join(stages)} {past(end.outcome)}{cause}"


async def find_runs(
    db: AsyncConnection, job: str, limit: int, before: int | None, stage: str | None
) -> Sequence[RunRecord]:
    """See `Ledger.runs`."""
    if (await db.execute(sql.FIND_HEAD, {"b_job": job})).one_or_none() is None:
        raise unknown_job(job)
    values = {
        "b_job": job,
        "b_limit": limit,
        "b_before": MAX_NUMBER + 1 if before is None else before,
    }
    found = (
        run_sql.FIND_RUNS if stage is None else run_sql.FIND_RUNS.where(run_sql.opened_for(stage))
    )
    return [run_of(row) for row in await db.execute(found, values)]


async def find_holder(db: AsyncConnection, job: str, run: int) -> str | None:
    """See `Ledger.run_holder`."""
    found = await db.execute(run_sql.FIND_RUN_HOLDER, {"b_job": job, "b_run": run})
    return found.scalar_one_or_none()

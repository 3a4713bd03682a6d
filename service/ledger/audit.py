"""The audit in the ledger, within a transaction. See `service.ledger.port.Ledger`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row, bindparam, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from service.ledger.tables import audit
from service.model.audit import (
    ITSELF,
    Action,
    Actor,
    AuditRecord,
    Deed,
    detail_of,
    parts_of,
    return_of,
    shortened,
)

OF_RANGES = (Action.RETIRE_RANGE.value, Action.RETURN_RANGE.value)
"""Actions whose detail begins with a stage and a range (see `detail_of`)."""

_SEARCHED = 20_000
"""Records of a job's ranges, the newest first, that are searched for the last ones of some."""

_NEWEST_OF_RANGES = (
    select(audit.c.action, audit.c.detail)
    .where(audit.c.job == bindparam("b_job"), audit.c.action.in_(OF_RANGES))
    .order_by(audit.c.number.desc())
    .limit(_SEARCHED)
)
TRIM_AUDIT = delete(audit).where(audit.c.at_ms < bindparam("b_keep_until_ms"))


async def write_audit(
    db: AsyncConnection,
    deed: Deed | None,
    *,
    job: str | None = None,
    key: str | None = None,
    detail: str = "",
) -> None:
    """Record a change in its own transaction. None: a change without a request."""
    if deed is None:
        return
    row = {
        "at_ms": deed.at_ms,
        "action": deed.action.value,
        "actor": deed.by.name,
        "address": deed.by.address[:128],
        "job": job,
        "key": key,
        # That of a specification names all stages that differ, and is short enough.
        "detail": detail if deed.action is Action.CHANGE_JOB else shortened(detail),
    }
    await db.execute(insert(audit), row)


async def write_returns(
    db: AsyncConnection, job: str, ranges: Mapping[tuple[str, str], str], at_ms: int
) -> None:
    """Record that retired ranges (stage, range) report again, by their holders, but for those of which
    this is recorded.

    Replicas may save one end of a retirement twice. The job's row is locked, so one of them is first.
    """
    records = await db.execute(_NEWEST_OF_RANGES, {"b_job": job})
    newest: dict[tuple[str, str], str] = {}
    for action, detail in records:
        stage, name, _ = parts_of(detail)
        newest.setdefault((stage, name), action)
    rows = [
        {
            "at_ms": at_ms,
            "action": Action.RETURN_RANGE.value,
            "actor": ITSELF if holder else "",
            "address": "",
            "job": job,
            "key": None,
            "detail": detail_of(stage, name, return_of(holder)),
        }
        for (stage, name), holder in sorted(ranges.items())
        if newest.get((stage, name)) != Action.RETURN_RANGE.value
    ]
    if rows:
        await db.execute(insert(audit), rows)


async def read_audit(
    db: AsyncConnection,
    limit: int,
    before: int | None,
    job: str | None,
    action: Action | None,
) -> Sequence[AuditRecord]:
    """Return the newest records, newest first."""
    found = select(audit).order_by(audit.c.number.desc()).limit(limit)
    if before is not None:
        found = found.where(audit.c.number < before)
    if job is not None:
        found = found.where(audit.c.job == job)
    if action is not None:
        found = found.where(audit.c.action == action.value)
    return [record_of(row) for row in await db.execute(found)]


def record_of(row: Row[Any]) -> AuditRecord:
    """Return the record in a row of the audit."""
    return AuditRecord(
        number=row.number,
        deed=Deed(Action(row.action), Actor(row.actor, row.address), row.at_ms),
        job=row.job,
        key=row.key,
        detail=row.detail,
    )


async def trim_audit(db: AsyncConnection, keep_until_ms: int) -> int:
    """Delete old records; return their number."""
    return (await db.execute(TRIM_AUDIT, {"b_keep_until_ms": keep_until_ms})).rowcount

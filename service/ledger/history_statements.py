"""SQL statements that read and thin the history of watermarks, each named after its purpose."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Executable,
    Select,
    String,
    and_,
    bindparam,
    case,
    delete,
    func,
    literal,
    or_,
    select,
    tuple_,
)

from service.frontier.timestamps import LATEST, MIN
from service.ledger.tables import history

_THINNING_LOCK = 0x7469_6465_7468_696E

_GENERATION = bindparam("b_generation", type_=BigInteger)


def _until(
    rows: Select[*tuple[Any, ...]], until_ms: ColumnElement[int]
) -> Select[*tuple[Any, ...]]:
    """Read the history backwards, from the last advance of a stage that is no later than this.

    The rows may be of an earlier generation or, beyond the stage's first advance, of another stage;
    `history_points` drops them. With conditions on these columns, the database would skip over all
    other rows, and there may be millions. Advances of one generation are dated before those of the
    next, except for the differences of the replicas' clocks.
    """
    job, stage = bindparam("b_job", type_=String), bindparam("b_stage", type_=String)
    # As one row, so that only the index by stage has this order. For `job = … AND stage = …`, Postgres
    # may choose the index by age, and skip over the advances of all other stages; or sort a whole
    # history that it expects to be short. The order is not that of the ids either: Postgres would read
    # and sort all rows, where it expects few. Of advances in the same millisecond, the index usually
    # has the newest last.
    return rows.where(
        tuple_(history.c.job, history.c.stage, history.c.at_ms) <= tuple_(job, stage, until_ms),
        # Without advances that are not visible yet, which are few.
        or_(
            history.c.job != job,
            history.c.stage != stage,
            history.c.generation < _GENERATION,
            and_(
                history.c.generation == _GENERATION,
                history.c.version <= bindparam("b_newest", type_=BigInteger),
            ),
        ),
    ).order_by(history.c.job.desc(), history.c.stage.desc(), history.c.at_ms.desc())


def _find_history() -> Executable:
    """Find the last advance of each interval, with one descent of the index for each."""
    from_ms = bindparam("b_from_ms", type_=BigInteger)
    span_ms = bindparam("b_span_ms", type_=BigInteger)
    intervals = bindparam("b_intervals", type_=BigInteger)
    interval = select(literal(0, BigInteger).label("n")).cte("interval", recursive=True)
    interval = interval.union_all(select(interval.c.n + 1).where(interval.c.n < intervals))

    def edge_ms(n: ColumnElement[int]) -> ColumnElement[int]:
        # Without intervals, the first edge is the only one.
        return from_ms + span_ms * n // func.coalesce(func.nullif(intervals, 0), 1)

    edges = select(
        interval.c.n,
        case((interval.c.n == 0, MIN), else_=edge_ms(interval.c.n - 1)).label("after_ms"),
        edge_ms(interval.c.n).label("until_ms"),
    ).cte("edges")
    last = _until(select(history.c.id), edges.c.until_ms).limit(1).correlate(edges)
    found = select(edges.c.n, edges.c.after_ms, last.scalar_subquery().label("id")).cte("found")
    # Without conditions, for which Postgres might not find the rows by their ids.
    return (
        select(found.c.after_ms, history)
        .join_from(found, history, history.c.id == found.c.id)
        .order_by(found.c.n)
    )


FIND_HISTORY = _find_history()
FIND_NEXT_HISTORY = (
    select(history)
    .where(
        tuple_(history.c.job, history.c.stage, history.c.at_ms)
        > tuple_(
            bindparam("b_job", type_=String),
            bindparam("b_stage", type_=String),
            bindparam("b_at_ms", type_=BigInteger),
        )
    )
    .order_by(history.c.job, history.c.stage, history.c.at_ms)
    .limit(bindparam("b_limit"))
)
# The interval begins with the minute: the thinned rows were of the same one.
_MINUTE = (history.c.at_ms - history.c.at_ms % 60_000 - 1).label("after_ms")
FIND_LAST_HISTORY = _until(select(_MINUTE, history), literal(LATEST, BigInteger)).limit(
    bindparam("b_limit")
)
BEGIN_THINNING = select(func.pg_try_advisory_xact_lock(_THINNING_LOCK))
_SLICE_OF_HISTORY = (
    select(
        history.c.id,
        history.c.at_ms,
        history.c.job,
        history.c.stage,
        history.c.generation,
    )
    .where(history.c.at_ms >= bindparam("b_from_ms"), history.c.at_ms < bindparam("b_until_ms"))
    .order_by(history.c.at_ms, history.c.id)
    .limit(bindparam("b_slice"))
    .subquery("slice")
)
FIND_SLICE = select(func.count(), func.max(_SLICE_OF_HISTORY.c.at_ms)).select_from(
    _SLICE_OF_HISTORY
)
_IN_MINUTE = select(
    _SLICE_OF_HISTORY.c.id,
    func.max(_SLICE_OF_HISTORY.c.id)
    .over(
        partition_by=(
            _SLICE_OF_HISTORY.c.job,
            _SLICE_OF_HISTORY.c.stage,
            _SLICE_OF_HISTORY.c.generation,
            _SLICE_OF_HISTORY.c.at_ms - _SLICE_OF_HISTORY.c.at_ms % 60_000,
        )
    )
    .label("last"),
).subquery("in_minute")
THIN_SLICE = delete(history).where(
    history.c.id.in_(select(_IN_MINUTE.c.id).where(_IN_MINUTE.c.id < _IN_MINUTE.c.last))
)
DELETE_OLD_HISTORY = delete(history).where(
    history.c.id.in_(
        select(history.c.id)
        .where(history.c.at_ms < bindparam("b_until_ms"))
        .order_by(history.c.at_ms)
        .limit(bindparam("b_slice"))
        .scalar_subquery()
    )
)

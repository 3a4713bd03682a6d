"""Decoding of the facts about ranges' work in a report, besides their promises."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import UNSET

from service.api.report_checks import check_times
from service.api.requests import Pending, ShardReport, WorkColumns, WorkReport
from service.errors import InvalidReportError
from service.frontier.errors import InvalidSketchError
from service.frontier.facts import ReportedFacts
from service.frontier.sketches import check_sketch

_SKETCHES_AT_ONCE: Final = 200
"""Number of sketches that are checked without a pause for other requests."""

_NOTHING_IN_FLIGHT: Final = b""


async def read_facts(
    ranges: Mapping[str, object], silent: ReportedFacts | None
) -> Sequence[ReportedFacts | None] | None:
    """Read the facts of ranges by name. `silent`: the facts of a range that reports none."""
    facts = [
        await _facts(f"ranges.{name}", each, silent) if isinstance(each, WorkReport) else silent
        for name, each in ranges.items()
    ]
    return facts if any(each is not None for each in facts) else None


async def _facts(
    where: str, work: WorkReport, silent: ReportedFacts | None
) -> ReportedFacts | None:
    # For shards alone: a key range has no policy of idleness that could skip its hold.
    keeps_back = isinstance(work, ShardReport) and bool(work.holds)
    if (
        not keeps_back
        and work.oldest_work is None
        and work.pending is UNSET
        and work.records is UNSET
        and not work.late
        and not work.backlog
    ):
        return silent
    if work.oldest_work is not None:
        check_times(where, {"oldest_work": work.oldest_work})
    pending = None
    if work.pending is not UNSET:
        pending = _check_pending(f"{where}.pending", work.pending)
        await asyncio.sleep(0)
    return ReportedFacts(
        work.oldest_work,
        pending,
        None if work.records is UNSET else work.records,
        work.late,
        work.backlog,
        keeps_back,
    )


async def column_facts(
    columns: WorkColumns,
    rows: int,
    oldest: Sequence[int | None] | None,
    silent: ReportedFacts | None,
    keeping_back: Sequence[bool] | None = None,
) -> Sequence[ReportedFacts | None] | None:
    """Read the facts of the ranges of a lease in a packed report. `oldest`: its column `oldest_work`.
    `keeping_back`: flags of the ranges that keep a hold; None: no range does.
    """
    pending, records = columns.pending, columns.records
    late, backlog = columns.late, columns.backlog
    if oldest is pending is records is late is backlog is keeping_back is None:
        return None if silent is None else [silent] * rows
    facts: list[ReportedFacts | None] = []
    for k in range(rows):
        in_flight = None
        if pending is not None:
            in_flight = _check_pending(f"columns.pending.{k}", pending[k])
            if not k % _SKETCHES_AT_ONCE:
                await asyncio.sleep(0)
        facts.append(
            ReportedFacts(
                None if oldest is None else oldest[k],
                in_flight,
                None if records is None else records[k],
                0 if late is None else late[k],
                0 if backlog is None else backlog[k],
                keeping_back is not None and keeping_back[k],
            )
        )
    return facts


def _check_pending(where: str, pending: Pending | None) -> bytes:
    """Return the sketch of the rows in flight. Raises `InvalidReportError`."""
    if pending is None:
        return _NOTHING_IN_FLIGHT
    try:
        count = check_sketch(pending.event_times)
    except InvalidSketchError as error:
        raise InvalidReportError(f"{where}.event_times cannot be read: {error}") from None
    if count != pending.count:
        raise InvalidReportError(
            f"{where}.count is {pending.count}, and its sketch has {count} event times"
        )
    return pending.event_times if count else _NOTHING_IN_FLIGHT

"""Reading packed reports: columns over all ranges of a lease."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from msgspec import UNSET

from service.api import byte_columns
from service.api.report_checks import (
    are_times,
    as_column,
    check_idle,
    check_shard,
    check_times,
    observed_input,
    right,
)
from service.api.report_facts import column_facts
from service.api.requests import MAX_REPORTED, KeyedReport, SourceColumns, SourceReport, WorkColumns
from service.errors import InvalidReportError, PayloadTooLargeError
from service.frontier.columns import Int64s
from service.frontier.facts import ReportedFacts
from service.frontier.timestamps import MAX, MIN
from service.model.reports import Column, HoldColumns, Report

_FLAGS: Final = frozenset({"idle", "final"})


async def read_source_columns(
    read: SourceReport, columns: SourceColumns, silent: ReportedFacts | None
) -> Report:
    """Read the columns of a source. Raises `InvalidReportError`, `PayloadTooLargeError`."""
    rows = _rows(columns)
    if rows is None:
        raise InvalidReportError(
            "columns is empty: send columns.watermark, or columns.idle or columns.final"
        )
    idle, final = _flags("idle", columns.idle), _flags("final", columns.final)
    _check_shards(columns.watermark is not None, idle, final, rows)
    watermarks = _times_column("watermark", columns.watermark, MIN, rows)
    holds = _hold_columns(columns, rows, MAX)
    promises = np.minimum.reduce([watermarks, *holds.values()])
    if final is not None:
        promises[np.array(final, dtype=np.bool_)] = MAX
    return Report(
        right(read, None)[0],
        None,
        promises,
        idle=idle,
        epoch=read.epoch,
        facts=await column_facts(
            columns, rows, _oldest_work(columns, rows), silent, _keeping_back(holds)
        ),
        hold_columns=holds,
    )


def _check_shards(
    has_watermark: bool, idle: Sequence[bool] | None, final: Sequence[bool] | None, rows: int
) -> None:
    if has_watermark and (idle is None or final is None):
        return
    idle, final = idle or (False,) * rows, final or (False,) * rows
    for k in range(rows):
        check_shard(f"columns, entry {k}", has_watermark, idle[k], final[k])


def _keeping_back(holds: HoldColumns) -> Sequence[bool] | None:
    """Return the ranges that keep a hold, as a mask; None: none does."""
    keeping = (
        np.minimum.reduce(list(holds.values())) < MAX if holds else np.zeros(0, dtype=np.bool_)
    )
    return keeping.tolist() if np.count_nonzero(keeping) else None


async def read_keyed_columns(
    read: KeyedReport, columns: WorkColumns, silent: ReportedFacts | None
) -> Report:
    """Read the columns of a keyed stage. Raises `InvalidReportError`, `PayloadTooLargeError`."""
    rows, observed = _rows(columns), observed_input(read)
    idle = _flags("idle", columns.idle)
    holds = {} if rows is None else _keyed_holds(columns, idle, rows)
    promises: Column | int = observed
    for column in holds.values():
        # Mostly there is one column, and all of it is behind the input. Then the promises are the same
        # column, and a store gets it once.
        is_least = isinstance(promises, int) and column.max() <= promises
        promises = column if is_least else np.minimum(promises, column)
    if rows is not None and isinstance(promises, int):
        promises = np.full(rows, observed, dtype=np.int64)
    return Report(
        right(read, None)[0],
        None,
        promises,
        idle=idle,
        epoch=read.epoch,
        observed_input=None if read.input_watermark is UNSET else observed,
        capped_at_commit=read.input_watermark is UNSET,
        facts=None
        if rows is None
        else await column_facts(columns, rows, _oldest_work(columns, rows), silent),
        hold_columns=holds,
    )


def _keyed_holds(columns: WorkColumns, idle: Sequence[bool] | None, rows: int) -> dict[str, Int64s]:
    """Read the holds of key ranges. Raises `InvalidReportError` if an idle range keeps one."""
    if idle is None or not any(idle):
        return _hold_columns(columns, rows, MAX)
    # A hold at MAX is a hold, too: null stays distinct from MAX until the idle ranges are checked.
    holds = _hold_columns(columns, rows, MIN)
    is_idle = np.array(idle, dtype=np.bool_)
    for component, times in holds.items():
        for k in np.flatnonzero(is_idle & (times != MIN)).tolist():
            check_idle(f"columns, entry {k}", {component: int(times[k])})
    return {component: np.where(times == MIN, MAX, times) for component, times in holds.items()}


def _rows(columns: WorkColumns) -> int | None:
    """Return the common length of the columns; None: without columns."""
    given = _lengths(columns)
    if not given:
        return None
    first, rows = given[0]
    for name, length in given:
        if length != rows:
            raise InvalidReportError(
                f"columns.{name} has {length} entries and columns.{first} has {rows}: each has one for"
                " each range of the lease, in the order of `granted`"
            )
    if not rows:
        raise InvalidReportError(f"columns.{first} is empty: a report carries at least one range")
    if rows > MAX_REPORTED:
        raise PayloadTooLargeError(
            f"columns.{first} has {rows} entries, a report carries at most {MAX_REPORTED}"
        )
    return rows


def _lengths(columns: WorkColumns) -> list[tuple[str, int]]:
    given = [
        (f"holds.{name}", _length(f"holds.{name}", column, byte_columns.TIME_BYTES))
        for name, column in columns.holds.items()
    ]
    for name, column in zip(
        columns.__struct_fields__, msgspec.structs.astuple(columns), strict=True
    ):
        if column is not None and name != "holds":
            is_flag = name in _FLAGS
            width = byte_columns.FLAG_BYTES if is_flag else byte_columns.TIME_BYTES
            given.append((name, _length(name, column, width)))
    return given


def _length(name: str, column: Sequence[object], width: int) -> int:
    if isinstance(column, str):
        return byte_columns.entries(f"columns.{name}", column, width)
    return len(column)


def _flags(name: str, column: Sequence[bool] | str | None) -> Sequence[bool] | None:
    return byte_columns.flags(f"columns.{name}", column) if isinstance(column, str) else column


def _hold_columns(columns: WorkColumns, rows: int, missing: int) -> dict[str, Int64s]:
    return {
        name: _times_column(f"holds.{name}", column, missing, rows)
        for name, column in columns.holds.items()
    }


def _oldest_work(columns: WorkColumns, rows: int) -> Sequence[int | None] | None:
    if columns.oldest_work is None:
        return None
    times = _times_column("oldest_work", columns.oldest_work, MIN, rows)
    return [None if time == MIN else time for time in times.tolist()]


def _times_column(
    name: str, column: Sequence[int | None] | str | None, missing: int, rows: int
) -> Int64s:
    """Read a column of times, with `missing` in place of null."""
    if column is None:
        return np.full(rows, missing, dtype=np.int64)
    if isinstance(column, str):
        return byte_columns.times(f"columns.{name}", column, missing)
    try:
        times = np.asarray(column, dtype=np.int64)
    except TypeError:
        # null is in the column: the first time, if any, is checked in its place.
        stand_in = next((time for time in column if time is not None), 0)
        given = as_column([stand_in if time is None else time for time in column])
        _check_times_column(name, column, given)
        return np.array([missing if time is None else time for time in column], dtype=np.int64)
    except OverflowError:
        times = np.full(1, MIN, dtype=np.int64)
    _check_times_column(name, column, times)
    return times


def _check_times_column(name: str, column: Sequence[int | None], times: Column) -> None:
    """Raise `InvalidReportError` with the first entry of `times` that is not a time, if any."""
    if not are_times(times):
        named = {str(k): time for k, time in enumerate(column) if time is not None}
        check_times(f"columns.{name}", named)

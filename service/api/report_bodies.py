"""Reading reports: what each range reports becomes its promise, by the rules of `service.frontier`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np
from msgspec import UNSET

from service.api import byte_columns
from service.api.exchange import NOT_JSON, Body, decode
from service.api.report_facts import check_times, column_facts, read_facts
from service.api.requests import (
    MAX_REPORTED,
    KeyedReport,
    KeyRangeWorkReport,
    PlainKeyedReport,
    PlainReport,
    ShardReport,
    SourceColumns,
    SourceReport,
    WorkColumns,
)
from service.errors import InvalidReportError, PayloadTooLargeError
from service.frontier.facts import NO_FACTS, ReportedFacts
from service.frontier.graph import Stage
from service.frontier.promises import keyed_promise, source_promise
from service.frontier.timestamps import EARLIEST, LATEST, MAX, MIN, from_wire
from service.model.reports import Column, HoldColumns, RangeNote, Report, noted

_plain = msgspec.json.Decoder(PlainReport)
_source = msgspec.json.Decoder(SourceReport)
_plain_keyed = msgspec.json.Decoder(PlainKeyedReport)
_keyed = msgspec.json.Decoder(KeyedReport)

_HEAD = 512
"""Bytes of a body that are searched for what tells its form."""

_BULK = 64
"""From this many numbers on, an array is faster than a list."""


async def read_report(stage_name: str, stage: Stage, body: Body) -> Report:
    """Read a report of any form. Raises `InvalidReportError`, `PayloadTooLargeError`."""
    if stage.is_passthrough:
        raise InvalidReportError(
            f"stage {stage_name!r} is a passthrough: it has no ranges to report for"
        )
    # Most packed reports show it by then. One that does not is only read twice.
    is_packed = body.find(b'"columns"', 0, _HEAD) >= 0
    plain = None if is_packed else _read_plain(stage, body)
    if plain is not None:
        return plain
    if stage.is_source:
        return await _read_shards(body, _silent(stage))
    return await _read_keyed(body, _silent(stage))


def _read_plain(stage: Stage, body: Body) -> Report | None:
    """Read a report of the most common form: for a source watermarks alone, else holds alone.

    None: it has another form, or does not fit.
    """
    try:
        if not stage.is_source:
            return _plain_keyed_report(_plain_keyed.decode(body), _silent(stage))
        plain = _plain.decode(body)
    except NOT_JSON:
        return None
    _check_size(plain.ranges)
    promises = _column(list(plain.ranges.values()))
    if not _are_times(promises):
        check_times("ranges", plain.ranges)
    silent = _silent(stage)
    facts = None if silent is None else [silent] * len(plain.ranges)
    return Report(plain.token, list(plain.ranges), promises, epoch=plain.epoch, facts=facts)


def _silent(stage: Stage) -> ReportedFacts | None:
    """Return what it means that a report says nothing of its work: something, if there is a policy."""
    return NO_FACTS if stage.policy.needs_facts else None


# ---- sources


async def _read_shards(body: Body, silent: ReportedFacts | None) -> Report:
    read = decode(_source, body, InvalidReportError)
    _check_form(read.ranges, read.columns)
    if read.columns is not None:
        return await _read_source_columns(read, read.columns, silent)
    shards = read.ranges or {}
    _check_size(shards)
    check_times("ranges", {n: s for n, s in shards.items() if isinstance(s, int)})
    return Report(
        read.token,
        list(shards),
        [
            _shard_promise(n, s) if isinstance(s, ShardReport) else from_wire(s)
            for n, s in shards.items()
        ],
        idle=[isinstance(s, ShardReport) and s.idle for s in shards.values()],
        notes=[
            RangeNote(s.holds) if isinstance(s, ShardReport) and s.holds else None
            for s in shards.values()
        ],
        epoch=read.epoch,
        facts=await read_facts(shards, silent),
    )


def _shard_promise(name: str, shard: ShardReport) -> int:
    _check_shard(f"ranges.{name}", shard.watermark is not UNSET, shard.idle, shard.final)
    check_times(f"ranges.{name}.holds", shard.holds)
    if isinstance(shard.watermark, int):
        check_times(f"ranges.{name}", {"watermark": shard.watermark})
    watermark = MIN if shard.watermark is UNSET else from_wire(shard.watermark)
    return source_promise(watermark, shard.holds.values(), final=shard.final)


def _check_shard(where: str, has_watermark: bool, idle: bool, final: bool) -> None:
    if idle and final:
        raise InvalidReportError(
            f"{where} is both idle and final: idle means that more may come, final that nothing will"
        )
    if not has_watermark and not (idle or final):
        raise InvalidReportError(f"{where}.watermark is missing: send a time, null, idle or final")


async def _read_source_columns(
    read: SourceReport, columns: SourceColumns, silent: ReportedFacts | None
) -> Report:
    rows = _rows(columns)
    if rows is None:
        raise InvalidReportError(
            "columns is empty: send columns.watermark, or columns.idle or columns.final"
        )
    idle, final = _flags("idle", columns.idle), _flags("final", columns.final)
    _check_shards(columns.watermark is not None, idle, final, rows)
    watermarks = _times_column("watermark", columns.watermark, MIN, rows)
    holds = _hold_columns(columns, rows)
    promises = np.minimum.reduce([watermarks, *holds.values()])
    if final is not None:
        promises[np.array(final, dtype=np.bool_)] = MAX
    return Report(
        read.token,
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
        _check_shard(f"columns, entry {k}", has_watermark, idle[k], final[k])


def _keeping_back(holds: HoldColumns) -> Sequence[bool] | None:
    """Return which ranges keep a hold; None: none does."""
    keeping = (
        np.minimum.reduce(list(holds.values())) < MAX if holds else np.zeros(0, dtype=np.bool_)
    )
    return keeping.tolist() if np.count_nonzero(keeping) else None


# ---- keyed stages


def _plain_keyed_report(read: PlainKeyedReport, silent: ReportedFacts | None) -> Report:
    _check_size(read.ranges)
    observed = _observed(read)
    notes = list(read.ranges.values())
    holds = [note.holds for note in notes]
    return Report(
        read.token,
        list(read.ranges),
        _keyed_promises(read.ranges, observed, holds),
        # Most reports have holds for all of their ranges, and this is the hot path.
        notes=notes if all(holds) else noted(notes),
        epoch=read.epoch,
        observed_input=None if read.input_watermark is UNSET else observed,
        capped_at_commit=read.input_watermark is UNSET,
        facts=None if silent is None else [silent] * len(read.ranges),
    )


async def _read_keyed(body: Body, silent: ReportedFacts | None) -> Report:
    read = decode(_keyed, body, InvalidReportError)
    _check_form(read.ranges, read.columns)
    if read.columns is not None:
        return await _read_keyed_columns(read, read.columns, silent)
    ranges: dict[str, KeyRangeWorkReport] = read.ranges or {}
    _check_size(ranges)
    observed = _observed(read)
    holds = [key_range.holds for key_range in ranges.values()]
    for name, key_range in ranges.items():
        _check_idle(f"ranges.{name}", key_range.holds if key_range.idle else {})
    return Report(
        read.token,
        list(ranges),
        _keyed_promises(ranges, observed, holds),
        idle=[key_range.idle for key_range in ranges.values()],
        notes=noted([RangeNote(each) for each in holds]),
        epoch=read.epoch,
        observed_input=None if read.input_watermark is UNSET else observed,
        capped_at_commit=read.input_watermark is UNSET,
        facts=await read_facts(ranges, silent),
    )


async def _read_keyed_columns(
    read: KeyedReport, columns: WorkColumns, silent: ReportedFacts | None
) -> Report:
    rows, observed = _rows(columns), _observed(read)
    idle = _flags("idle", columns.idle)
    if rows is not None and idle is not None:
        _check_idle_columns(columns, idle, rows)
    holds = {} if rows is None else _hold_columns(columns, rows)
    promises: Column | int = observed
    for column in holds.values():
        # Mostly there is one column, and all of it is behind the input. Then the promises are that very
        # column, which a store need not be sent twice.
        is_least = isinstance(promises, int) and column.max() <= promises
        promises = column if is_least else np.minimum(promises, column)
    if rows is not None and isinstance(promises, int):
        promises = np.full(rows, observed, dtype=np.int64)
    return Report(
        read.token,
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


def _check_idle(where: str, holds: Mapping[str, int]) -> None:
    """Refuse a key range that is idle and keeps a hold: downstream stages would go on past the hold."""
    for component, time in holds.items():
        raise InvalidReportError(
            f"{where} is idle, and keeps a hold {component!r} at {time}: an idle key range holds nothing"
            " that it has not emitted; leave out the hold, or idle"
        )


def _check_idle_columns(columns: WorkColumns, idle: Sequence[bool], rows: int) -> None:
    if not any(idle):
        return
    for component, column in columns.holds.items():
        times = _times_column(f"holds.{component}", column, MIN, rows)
        for k in np.flatnonzero(np.array(idle, dtype=np.bool_) & (times != MIN)).tolist():
            _check_idle(f"columns, entry {k}", {component: int(times[k])})


def _observed(read: PlainKeyedReport | KeyedReport) -> int:
    """Return the input watermark that caps the promises; MAX: the commit brings it."""
    if read.input_watermark is UNSET:
        if read.epoch is None:
            raise InvalidReportError(
                "input_watermark is missing: send the input watermark that this worker has itself"
                " observed (null: none yet); only with an epoch may it be left to the commit"
            )
        return MAX
    if isinstance(read.input_watermark, int):
        check_times("the report", {"input_watermark": read.input_watermark})
    return from_wire(read.input_watermark)


def _keyed_promises(
    ranges: Iterable[str], observed: int, holds: Sequence[dict[str, int]]
) -> Column:
    """Apply `keyed_promise` to each range. Raises `InvalidReportError` if a hold is not a time.

    If all ranges have the same number of holds they form a table, whose minima are one array operation.
    """
    times = _column(list(chain.from_iterable(map(dict[str, int].values, holds))))
    if not _are_times(times):
        for range_name, kept in zip(ranges, holds, strict=True):
            check_times(f"ranges.{range_name}.holds", kept)
    widths = set(map(len, holds))
    if isinstance(times, np.ndarray) and len(widths) == 1:
        return np.minimum(times.reshape(len(holds), -1).min(axis=1), observed)
    return [keyed_promise(observed, kept.values()) for kept in holds]


# ---- columns


def _rows(columns: WorkColumns) -> int | None:
    """Return how many entries all columns have; None: there are no columns."""
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


_FLAGS = frozenset({"idle", "final"})


def _length(name: str, column: Sequence[object], width: int) -> int:
    if isinstance(column, str):
        return byte_columns.entries(f"columns.{name}", column, width)
    return len(column)


def _flags(name: str, column: Sequence[bool] | str | None) -> Sequence[bool] | None:
    return byte_columns.flags(f"columns.{name}", column) if isinstance(column, str) else column


def _hold_columns(
    columns: WorkColumns, rows: int
) -> dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    return {
        name: _times_column(f"holds.{name}", column, MAX, rows)
        for name, column in columns.holds.items()
    }


def _oldest_work(columns: WorkColumns, rows: int) -> Sequence[int | None] | None:
    if columns.oldest_work is None:
        return None
    times = _times_column("oldest_work", columns.oldest_work, MIN, rows)
    return [None if time == MIN else time for time in times.tolist()]


def _times_column(
    name: str, column: Sequence[int | None] | str | None, missing: int, rows: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Read a column of times, with `missing` in place of null."""
    if column is None:
        return np.full(rows, missing, dtype=np.int64)
    if isinstance(column, str):
        return byte_columns.times(f"columns.{name}", column, missing)
    try:
        times = np.asarray(column, dtype=np.int64)
    except TypeError:
        # null is among them: it is checked in place of the first time there is, if there is any.
        stand_in = next((time for time in column if time is not None), 0)
        given = _column([stand_in if time is None else time for time in column])
        _check_times_column(name, column, given)
        return np.array([missing if time is None else time for time in column], dtype=np.int64)
    except OverflowError:
        times = np.full(1, MIN, dtype=np.int64)
    _check_times_column(name, column, times)
    return times


def _check_times_column(name: str, column: Sequence[int | None], times: Column) -> None:
    """Raise `InvalidReportError` naming the first entry that is no time, if `times` has any."""
    if not _are_times(times):
        named = {str(k): time for k, time in enumerate(column) if time is not None}
        check_times(f"columns.{name}", named)


# ---- checks


def _check_form(ranges: object, columns: object) -> None:
    if ranges is None and columns is None:
        raise InvalidReportError("ranges is missing: send it, or columns for all of the lease's")
    if ranges is not None and columns is not None:
        raise InvalidReportError(
            "ranges and columns are both there: ranges speaks for some, columns for all of the lease's"
        )


def _column(values: list[int]) -> Column:
    if len(values) < _BULK:
        return values
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        return values


def _are_times(values: Column) -> bool:
    """Return whether all are instants. May be False only because MAX is among them."""
    if isinstance(values, np.ndarray):
        return bool(values.min() >= EARLIEST and values.max() <= LATEST)
    return not values or (min(values) >= EARLIEST and max(values) <= LATEST)


def _check_size(ranges: Mapping[str, object]) -> None:
    if not ranges:
        raise InvalidReportError("ranges is empty: a report carries at least one")
    if len(ranges) > MAX_REPORTED:
        raise PayloadTooLargeError(
            f"ranges has {len(ranges)} entries, a report carries at most {MAX_REPORTED}"
        )

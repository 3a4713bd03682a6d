"""Reading reports: what each range reports becomes its promise, by the rules of `service.frontier`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np
from msgspec import UNSET

from service.api.body_times import report_in_ms
from service.api.exchange import NOT_JSON, Body, check_members, decode
from service.api.packed_reports import read_keyed_columns, read_source_columns
from service.api.report_checks import (
    are_times,
    as_column,
    check_idle,
    check_shard,
    check_times,
    observed_input,
    right,
)
from service.api.report_facts import read_facts
from service.api.requests import (
    MAX_REPORTED,
    KeyedReport,
    KeyRangeWorkReport,
    PlainKeyedReport,
    PlainReport,
    ShardReport,
    SourceReport,
)
from service.errors import InvalidReportError, PayloadTooLargeError
from service.frontier.facts import NO_FACTS, ReportedFacts
from service.frontier.graph import Stage
from service.frontier.promises import keyed_promise, source_promise
from service.frontier.timestamps import MIN, from_wire
from service.model.reports import Column, RangeNote, Report, noted

_plain = msgspec.json.Decoder(PlainReport)
_source = msgspec.json.Decoder(SourceReport)
_plain_keyed = msgspec.json.Decoder(PlainKeyedReport)
_keyed = msgspec.json.Decoder(KeyedReport)

_HEAD = 512
"""Bytes of a body in which the members that give its form are searched."""


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
            read = _plain_keyed.decode(body)
            check_members(body, InvalidReportError)
            return _plain_keyed_report(read, _silent(stage))
        plain = _plain.decode(body)
    except NOT_JSON:
        return None
    check_members(body, InvalidReportError)
    _check_size(plain.ranges)
    promises = as_column(list(plain.ranges.values()))
    if not are_times(promises):
        check_times("ranges", plain.ranges)
    silent, names = _silent(stage), list(plain.ranges)
    token, claim = right(plain, names)
    return Report(
        token,
        names,
        promises,
        epoch=plain.epoch,
        facts=None if silent is None else [silent] * len(names),
        claim=claim,
        releases=plain.release,
    )


def _silent(stage: Stage) -> ReportedFacts | None:
    """Return the facts of a report without any: they count where the stage has a policy for them."""
    return NO_FACTS if stage.policy.needs_facts else None


# ---- sources


async def _read_shards(body: Body, silent: ReportedFacts | None) -> Report:
    read = decode(_source, body, InvalidReportError, report_in_ms)
    _check_form(read.ranges, read.columns)
    if read.columns is not None:
        return await read_source_columns(read, read.columns, silent)
    shards = read.ranges or {}
    _check_size(shards)
    check_times("ranges", {n: s for n, s in shards.items() if isinstance(s, int)})
    names = list(shards)
    token, claim = right(read, names)
    return Report(
        token,
        names,
        [
            _shard_promise(n, s) if isinstance(s, ShardReport) else from_wire(s)
            for n, s in shards.items()
        ],
        idle=[isinstance(s, ShardReport) and s.idle for s in shards.values()],
        notes=[
            RangeNote(s.holds, s.position)
            if isinstance(s, ShardReport) and (s.holds or s.position)
            else None
            for s in shards.values()
        ],
        epoch=read.epoch,
        facts=await read_facts(shards, silent),
        claim=claim,
        releases=read.release,
    )


def _shard_promise(name: str, shard: ShardReport) -> int:
    check_shard(f"ranges.{name}", shard.watermark is not UNSET, shard.idle, shard.final)
    check_times(f"ranges.{name}.holds", shard.holds)
    if isinstance(shard.watermark, int):
        check_times(f"ranges.{name}", {"watermark": shard.watermark})
    watermark = MIN if shard.watermark is UNSET else from_wire(shard.watermark)
    return source_promise(watermark, shard.holds.values(), final=shard.final)


# ---- keyed stages


def _plain_keyed_report(read: PlainKeyedReport, silent: ReportedFacts | None) -> Report:
    _check_size(read.ranges)
    observed = observed_input(read)
    notes = list(read.ranges.values())
    holds = [note.holds for note in notes]
    names = list(read.ranges)
    token, claim = right(read, names)
    return Report(
        token,
        names,
        _keyed_promises(read.ranges, observed, holds),
        # Most reports have holds for all of their ranges, and this is the hot path.
        notes=notes if all(holds) else noted(notes),
        epoch=read.epoch,
        observed_input=None if read.input_watermark is UNSET else observed,
        capped_at_commit=read.input_watermark is UNSET,
        facts=None if silent is None else [silent] * len(names),
        claim=claim,
        releases=read.release,
    )


async def _read_keyed(body: Body, silent: ReportedFacts | None) -> Report:
    read = decode(_keyed, body, InvalidReportError, report_in_ms)
    _check_form(read.ranges, read.columns)
    if read.columns is not None:
        return await read_keyed_columns(read, read.columns, silent)
    ranges: dict[str, KeyRangeWorkReport] = read.ranges or {}
    _check_size(ranges)
    observed = observed_input(read)
    holds = [key_range.holds for key_range in ranges.values()]
    for name, key_range in ranges.items():
        check_idle(f"ranges.{name}", key_range.holds if key_range.idle else {})
    names = list(ranges)
    token, claim = right(read, names)
    return Report(
        token,
        names,
        _keyed_promises(ranges, observed, holds),
        idle=[key_range.idle for key_range in ranges.values()],
        notes=noted([RangeNote(each) for each in holds]),
        epoch=read.epoch,
        observed_input=None if read.input_watermark is UNSET else observed,
        capped_at_commit=read.input_watermark is UNSET,
        facts=await read_facts(ranges, silent),
        claim=claim,
        releases=read.release,
    )


def _keyed_promises(
    ranges: Iterable[str], observed: int, holds: Sequence[dict[str, int]]
) -> Column:
    """Apply `keyed_promise` to each range. Raises `InvalidReportError` if a hold is not a time.

    If all ranges have the same number of holds they form a table, whose minima are one array operation.
    """
    times = as_column(list(chain.from_iterable(map(dict[str, int].values, holds))))
    if not are_times(times):
        for range_name, kept in zip(ranges, holds, strict=True):
            check_times(f"ranges.{range_name}.holds", kept)
    widths = set(map(len, holds))
    if isinstance(times, np.ndarray) and len(widths) == 1:
        return np.minimum(times.reshape(len(holds), -1).min(axis=1), observed)
    return [keyed_promise(observed, kept.values()) for kept in holds]


# ---- checks


def _check_form(ranges: object, columns: object) -> None:
    if ranges is None and columns is None:
        raise InvalidReportError("ranges is missing: send it, or columns for all of the lease's")
    if ranges is not None and columns is not None:
        raise InvalidReportError(
            "ranges and columns are both there: ranges speaks for some, columns for all of the lease's"
        )


def _check_size(ranges: Mapping[str, object]) -> None:
    if not ranges:
        raise InvalidReportError("ranges is empty: a report carries at least one")
    if len(ranges) > MAX_REPORTED:
        raise PayloadTooLargeError(
            f"ranges has {len(ranges)} entries, a report carries at most {MAX_REPORTED}"
        )

"""Reports and commits, the hot path of the service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np
from msgspec import UNSET

from service.api.endpoints import Call, Endpoints, json_body, raw_body
from service.api.exchange import NOT_JSON, Body, decode
from service.api.requests import (
    MAX_REPORTED,
    CommitBody,
    KeyedReport,
    PlainReport,
    ShardReport,
    SourceReport,
    StageCommitBody,
)
from service.api.responses import (
    CommittedBody,
    RejectedBody,
    ReportedBody,
    stage_watermark_body,
    watermark_body,
)
from service.errors import (
    EpochsWaitingError,
    InputAheadError,
    InvalidReportError,
    InvalidRequestError,
    LeaseLostError,
    PayloadTooLargeError,
    StaleEpochError,
    StaleRunError,
    UnavailableError,
    UnknownJobError,
    UnknownStageError,
)
from service.frontier.graph import Stage
from service.frontier.promises import keyed_promise, source_promise
from service.frontier.timestamps import EARLIEST, LATEST, MAX, MIN, from_wire, is_timestamp
from service.model.keys import Role
from service.model.reports import Column, Commit, RangeNote, Report, StageCommit

endpoints = Endpoints("reports")
_plain = msgspec.json.Decoder(PlainReport)
_source = msgspec.json.Decoder(SourceReport)
_keyed = msgspec.json.Decoder(KeyedReport)

_BULK = 64
"""From this many numbers on, an array is faster than a list."""


@endpoints.post(
    "/v1/jobs/{job}/stages/{stage}/reports",
    raw_body(SourceReport, KeyedReport),
    role=Role.REPORT,
    gives=ReportedBody,
    errors=(
        UnknownJobError,
        UnknownStageError,
        InvalidReportError,
        LeaseLostError,
        StaleRunError,
        StaleEpochError,
        InputAheadError,
        EpochsWaitingError,
    ),
    hot=True,
)
async def report(call: Call[Body]) -> ReportedBody:
    """Report for ranges under a lease, with effect at once or, with an epoch, at its commit."""
    aggregator, job, stage = call.aggregator, call.job, call.stage
    sent = read_report(stage, await aggregator.find_stage(job, stage), call.body)
    reported, view = await aggregator.report(job, stage, sent)
    return ReportedBody(
        reported.accepted,
        list(reported.behind),
        [RejectedBody(one, reason) for one, reason in reported.rejected],
        reported.expires_in_ms,
        stage_watermark_body(view),
    )


def read_report(stage_name: str, stage: Stage, body: Body) -> Report:
    """Read a report to a stage, and turn what each range reports into its promise."""
    if stage.is_passthrough:
        raise InvalidReportError(
            f"stage {stage_name!r} is a passthrough: it has no ranges to report for"
        )
    return _read_source(body) if stage.is_source else _read_keyed(body)


def _read_source(body: Body) -> Report:
    try:
        plain = _plain.decode(body)
    except NOT_JSON:
        return _read_shards(body)
    # Only watermarks, by far the most common report: each is its range's promise.
    _check_size(plain.ranges)
    promises = _column(list(plain.ranges.values()))
    if not _are_times(promises):
        _check_times("ranges", plain.ranges)
    return Report(plain.token, list(plain.ranges), promises, epoch=plain.epoch)


def _read_shards(body: Body) -> Report:
    read = decode(_source, body, InvalidReportError)
    _check_size(read.ranges)
    shards = read.ranges
    _check_times("ranges", {n: s for n, s in shards.items() if isinstance(s, int)})
    return Report(
        read.token,
        list(shards),
        [
            _shard_promise(n, s) if isinstance(s, ShardReport) else from_wire(s)
            for n, s in shards.items()
        ],
        idle=[isinstance(s, ShardReport) and s.idle for s in shards.values()],
        notes=[RangeNote(s.holds) if isinstance(s, ShardReport) else None for s in shards.values()],
        epoch=read.epoch,
    )


def _shard_promise(name: str, shard: ShardReport) -> int:
    if shard.idle and shard.final:
        raise InvalidReportError(
            f"ranges.{name} is both idle and final: idle means that more may come, final that"
            " nothing will"
        )
    if shard.watermark is UNSET and not (shard.idle or shard.final):
        raise InvalidReportError(
            f"ranges.{name}.watermark is missing: send a time, null, idle or final"
        )
    _check_times(f"ranges.{name}.holds", shard.holds)
    if isinstance(shard.watermark, int):
        _check_times(f"ranges.{name}", {"watermark": shard.watermark})
    watermark = MIN if shard.watermark is UNSET else from_wire(shard.watermark)
    return source_promise(watermark, shard.holds.values(), final=shard.final)


def _read_keyed(body: Body) -> Report:
    read = decode(_keyed, body, InvalidReportError)
    _check_size(read.ranges)
    capped_at_commit = read.input_watermark is UNSET
    if capped_at_commit and read.epoch is None:
        raise InvalidReportError(
            "input_watermark is missing: send the input watermark that this worker has itself"
            " observed (null: none yet); only with an epoch may it be left to the commit"
        )
    observed = MAX if read.input_watermark is UNSET else from_wire(read.input_watermark)
    if isinstance(read.input_watermark, int):
        _check_times("the report", {"input_watermark": read.input_watermark})
    holds = [key_range.holds for key_range in read.ranges.values()]
    return Report(
        read.token,
        list(read.ranges),
        _keyed_promises(read.ranges, observed, holds),
        notes=list(read.ranges.values()),
        epoch=read.epoch,
        observed_input=None if capped_at_commit else observed,
        capped_at_commit=capped_at_commit,
    )


def _keyed_promises(
    ranges: Iterable[str], observed: int, holds: Sequence[dict[str, int]]
) -> Column:
    """Apply `keyed_promise` to each range. Raises `InvalidReportError` if a hold is not a time.

    If all ranges have the same number of holds they form a table, whose minima are one array operation.
    """
    times = _column(list(chain.from_iterable(kept.values() for kept in holds)))
    if not _are_times(times):
        for range_name, kept in zip(ranges, holds, strict=True):
            _check_times(f"ranges.{range_name}.holds", kept)
    widths = set(map(len, holds))
    if isinstance(times, np.ndarray) and len(widths) == 1:
        return np.minimum(times.reshape(len(holds), -1).min(axis=1), observed)
    return [keyed_promise(observed, kept.values()) for kept in holds]


def _column(values: list[int]) -> Column:
    if len(values) < _BULK:
        return values
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        return values


def _are_times(values: Column) -> bool:
    """Whether all are instants. May be False only because MAX is among them."""
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


def _check_times(where: str, times: Mapping[str, int]) -> None:
    """Raise `InvalidReportError` if a value is not a time."""
    for member, value in times.items():
        if not is_timestamp(value):
            raise InvalidReportError(
                f"{where}.{member} is {value}: it must be milliseconds since the Unix epoch within the"
                f" years 0001 to 9999 ({EARLIEST} to {LATEST}), or {MAX}"
            )


@endpoints.post(
    "/v1/jobs/{job}/commits",
    json_body(CommitBody),
    role=Role.DRIVE,
    gives=CommittedBody,
    errors=(
        UnknownJobError,
        UnknownStageError,
        StaleRunError,
        StaleEpochError,
        InputAheadError,
        UnavailableError,
    ),
)
async def commit(call: Call[CommitBody]) -> CommittedBody:
    """Commit an epoch: what was reported for it counts, for all its stages or for none."""
    aggregator, job, body = call.aggregator, call.job, call.body
    stages: dict[str, StageCommit] = {}
    for name, committed in body.stages.items():
        stage = await aggregator.find_stage(job, name)
        stages[name] = StageCommit(_observed(name, stage, committed))
    applied, states = await aggregator.commit(job, Commit(body.run or 0, body.epoch, stages))
    return CommittedBody(
        dict(applied), {stage: watermark_body(state) for stage, state in states.items()}
    )


def _observed(name: str, stage: Stage, committed: StageCommitBody) -> int | None:
    if committed.input_watermark is UNSET:
        return None
    observed = committed.input_watermark
    if observed is None:
        return None if stage.is_source else MIN
    if stage.is_source:
        raise InvalidRequestError(
            f"stages.{name}.input_watermark is {observed}: a source has no input"
        )
    if not is_timestamp(observed):
        raise InvalidRequestError(
            f"stages.{name}.input_watermark is {observed}: it must be milliseconds since the Unix"
            f" epoch within the years 0001 to 9999, or {MAX}"
        )
    return observed

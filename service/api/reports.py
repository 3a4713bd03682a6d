"""Reports and commits: how far the workers have come. The hot path of the service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import msgspec
from fastapi import Request, Response
from msgspec import UNSET

from service.api import routing
from service.api.bodies import (
    MAX_REPORTED,
    CommitBody,
    CommittedBody,
    KeyedReport,
    PlainReport,
    RejectedBody,
    ReportedBody,
    ShardReport,
    SourceReport,
    StageCommitBody,
    stage_watermark_body,
    watermark_body,
)
from service.api.exchange import aggregator, answer, decode, describe, name, read
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
from service.frontier.promises import keyed_promises, source_promise
from service.frontier.timestamps import EARLIEST, LATEST, MAX, MIN, from_wire, is_timestamp
from service.live.port import Commit, Report, StageCommit

router = routing.router("reports")
_plain = msgspec.json.Decoder(PlainReport)
_source = msgspec.json.Decoder(SourceReport)
_keyed = msgspec.json.Decoder(KeyedReport)
_commit = msgspec.json.Decoder(CommitBody)


@router.post(
    "/v1/jobs/{job}/stages/{stage}/reports",
    **describe(
        path=("job", "stage"),
        body=(SourceReport, KeyedReport),
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
    ),
)
async def report(request: Request) -> Response:
    """Report for ranges under a lease, at once or, with an epoch, as of that epoch's commit."""
    job, stage = name(request, "job"), name(request, "stage")
    use = aggregator(request)
    kind = await use.kind(job, stage)
    said = read_report(stage, kind, await read(request))
    reported, view = await use.report(job, stage, said)
    return answer(
        ReportedBody(
            reported.accepted,
            list(reported.behind),
            [RejectedBody(one, reason) for one, reason in reported.rejected],
            reported.expires_in_ms,
            stage_watermark_body(view),
        )
    )


def read_report(stage: str, kind: Stage, body: bytes) -> Report:
    """Read a report to a stage of this kind, and fold each range's word into its promise."""
    if kind.is_passthrough:
        raise InvalidReportError(
            f"stage {stage!r} is a passthrough: it has no ranges to report for"
        )
    return _read_source(body) if kind.is_source else _read_keyed(body)


def _read_source(body: bytes) -> Report:
    try:
        plain = _plain.decode(body)
    except msgspec.DecodeError:
        return _read_shards(body)
    # Nothing but watermarks, by far the most common report: they are their own promises.
    _check_size(plain.ranges)
    _check_times("ranges", plain.ranges)
    return Report(plain.token, list(plain.ranges), list(plain.ranges.values()), epoch=plain.epoch)


def _read_shards(body: bytes) -> Report:
    said = decode(_source, body, InvalidReportError)
    _check_size(said.ranges)
    words = said.ranges
    _check_times("ranges", {n: w for n, w in words.items() if isinstance(w, int)})
    return Report(
        said.token,
        list(words),
        [
            _shard_promise(n, w) if isinstance(w, ShardReport) else from_wire(w)
            for n, w in words.items()
        ],
        idle=[isinstance(w, ShardReport) and w.idle for w in words.values()],
        holds=[w.holds if isinstance(w, ShardReport) else None for w in words.values()],
        epoch=said.epoch,
    )


def _shard_promise(range_name: str, word: ShardReport) -> int:
    if word.idle and word.final:
        raise InvalidReportError(
            f"ranges.{range_name} is both idle and final: idle means that more may come, final that"
            " nothing will"
        )
    if word.watermark is UNSET and not (word.idle or word.final):
        raise InvalidReportError(
            f"ranges.{range_name}.watermark is missing: say a time, null, idle or final"
        )
    _check_times(f"ranges.{range_name}.holds", word.holds)
    if isinstance(word.watermark, int):
        _check_times(f"ranges.{range_name}", {"watermark": word.watermark})
    watermark = MIN if word.watermark is UNSET else from_wire(word.watermark)
    return source_promise(watermark, word.holds.values(), final=word.final)


def _read_keyed(body: bytes) -> Report:
    said = decode(_keyed, body, InvalidReportError)
    _check_size(said.ranges)
    capped_at_commit = said.input_watermark is UNSET
    if capped_at_commit and said.epoch is None:
        raise InvalidReportError(
            "input_watermark is missing: say the input watermark that this worker has itself"
            " observed (null: none yet); only with an epoch may it come with the commit"
        )
    observed = MAX if said.input_watermark is UNSET else from_wire(said.input_watermark)
    if isinstance(said.input_watermark, int):
        _check_times("the report", {"input_watermark": said.input_watermark})
    holds = [word.holds for word in said.ranges.values()]
    _check_holds(said.ranges, holds)
    return Report(
        said.token,
        list(said.ranges),
        keyed_promises(observed, holds),
        holds=holds,
        epoch=said.epoch,
        observed_input=None if capped_at_commit else observed,
        capped_at_commit=capped_at_commit,
    )


def _check_holds(ranges: Iterable[str], holds: Sequence[dict[str, int]]) -> None:
    """Refuse a hold that is no time. All are looked over at once, and one by one only to name it."""
    times = list(chain.from_iterable(kept.values() for kept in holds))
    if times and not (min(times) >= EARLIEST and max(times) <= LATEST):
        for range_name, kept in zip(ranges, holds, strict=True):
            _check_times(f"ranges.{range_name}.holds", kept)


def _check_size(ranges: Mapping[str, object]) -> None:
    if not ranges:
        raise InvalidReportError("ranges is empty: a report carries at least one")
    if len(ranges) > MAX_REPORTED:
        raise PayloadTooLargeError(
            f"ranges has {len(ranges)} entries, a report carries at most {MAX_REPORTED}"
        )


def _check_times(where: str, times: Mapping[str, int]) -> None:
    """Refuse a time that is none."""
    values = times.values()
    if not values or (min(values) >= EARLIEST and max(values) <= LATEST):
        return
    for member, value in times.items():
        if not is_timestamp(value):
            raise InvalidReportError(
                f"{where}.{member} is {value}: it must be milliseconds since the Unix epoch within the"
                f" years 0001 to 9999 ({EARLIEST} to {LATEST}), or {MAX}"
            )


@router.post(
    "/v1/jobs/{job}/commits",
    **describe(
        path=("job",),
        body=(CommitBody,),
        gives=CommittedBody,
        errors=(
            UnknownJobError,
            UnknownStageError,
            StaleRunError,
            StaleEpochError,
            InputAheadError,
            UnavailableError,
        ),
    ),
)
async def commit(request: Request) -> Response:
    """Commit an epoch: what was reported for it counts, for all its stages or for none."""
    job = name(request, "job")
    body = decode(_commit, await read(request))
    use = aggregator(request)
    kinds = {stage: await use.kind(job, stage) for stage in body.stages}
    stages = {s: StageCommit(_observed(s, kinds[s], word)) for s, word in body.stages.items()}
    applied, states = await use.commit(job, Commit(body.run or 0, body.epoch, stages))
    return answer(
        CommittedBody(
            dict(applied), {stage: watermark_body(state) for stage, state in states.items()}
        )
    )


def _observed(stage: str, kind: Stage, word: StageCommitBody) -> int | None:
    if word.input_watermark is UNSET:
        return None
    observed = word.input_watermark
    if observed is None:
        return None if kind.is_source else MIN
    if kind.is_source:
        raise InvalidRequestError(
            f"stages.{stage}.input_watermark is {observed}: a source has no input"
        )
    if not is_timestamp(observed):
        raise InvalidRequestError(
            f"stages.{stage}.input_watermark is {observed}: it must be milliseconds since the Unix"
            f" epoch within the years 0001 to 9999, or {MAX}"
        )
    return observed

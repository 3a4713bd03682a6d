"""Reports and commits, the hot path of the service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import UNSET, UnsetType

from service.api.body_times import commit_in_ms
from service.api.endpoints import Call, Endpoints, json_body, raw_body
from service.api.exchange import Body
from service.api.report_bodies import read_report
from service.api.requests import CommitBody, KeyedReport, SourceReport, StageCommitBody
from service.api.responses.reports import ReportedBody, reported_body
from service.api.responses.throttle import AdviceBody, advice_bodies
from service.api.responses.watermarks import CommittedBody, watermark_body
from service.errors import (
    EpochsWaitingError,
    InputAheadError,
    InvalidReportError,
    InvalidRequestError,
    LeaseConflictError,
    LeaseLostError,
    StaleEpochError,
    StaleRunError,
    UnavailableError,
    UnknownJobError,
    UnknownStageError,
)
from service.frontier.graph import Stage
from service.frontier.timestamps import MAX, MIN, is_timestamp
from service.model.keys import Role
from service.model.reports import Commit, StageCommit

endpoints = Endpoints("reports")


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
        LeaseConflictError,
        StaleRunError,
        StaleEpochError,
        InputAheadError,
        EpochsWaitingError,
    ),
    hot=True,
)
async def report(call: Call[Body]) -> ReportedBody:
    """Report for ranges under a lease, with effect at once or, with an epoch, at its commit.

    In place of a lease's `token`, a report may bring its `claim`: the ranges are claimed and the granted
    ones reported in one atomic step. A report that is refused claims nothing.

    `ranges` has the reports of ranges by name, `columns` those of all ranges of the lease in their
    order: send one of them. The answer has the stage's present watermarks and, if the job has a
    throttle, the throttle advice for the reported shards.
    """
    aggregator, job, stage = call.aggregator, call.job, call.stage
    found = await aggregator.find_stage(job, stage)
    sent = await read_report(stage, found, call.body)
    reported, view = await aggregator.report(job, stage, sent)
    advice = await _advice(call, reported.ranges) if found.policy.is_throttled else UNSET
    return await reported_body(reported, view, advice)


async def _advice(call: Call[Body], shards: Sequence[str]) -> dict[str, AdviceBody] | UnsetType:
    """Return the throttle advice for the reported shards; unset: none."""
    advice = await call.aggregator.throttling.advice_for(call.job, call.stage, shards)
    return advice_bodies(advice) if advice else UNSET


@endpoints.post(
    "/v1/jobs/{job}/commits",
    json_body(CommitBody, times=commit_in_ms),
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
    """Commit an epoch: its reports take effect, for all its stages or for none."""
    aggregator, job, body = call.aggregator, call.job, call.body
    stages: dict[str, StageCommit] = {}
    for name, committed in body.stages.items():
        stage = await aggregator.find_stage(job, name)
        observed = _observed(name, stage, committed)
        holds = _holds(name, stage, observed, committed)
        late, corrections = _late(name, stage, committed), _corrections(name, stage, committed)
        stages[name] = StageCommit(observed, holds, late, corrections)
    applied, states = await aggregator.commit(
        job, Commit(body.run or 0, body.epoch, stages, body.evidence_age_ms)
    )
    return CommittedBody(
        dict(applied), {stage: watermark_body(state) for stage, state in states.items()}
    )


def _holds(
    name: str, stage: Stage, observed: int | None, committed: StageCommitBody
) -> Mapping[str, int]:
    for component, hold in committed.holds.items():
        if stage.is_passthrough:
            raise InvalidRequestError(
                f"stages.{name}.holds.{component} is {hold}: a passthrough stage has no holds;"
                " its watermark is that of its inputs"
            )
        if observed is None:
            raise InvalidRequestError(
                f"stages.{name}.holds.{component} is {hold}: holds require an input_watermark,"
                " which is missing here"
            )
        if not is_timestamp(hold):
            raise InvalidRequestError(
                f"stages.{name}.holds.{component} is {hold}: it must be milliseconds since the Unix"
                f" epoch within the years 0001 to 9999, or {MAX}"
            )
    return committed.holds


def _late(name: str, stage: Stage, committed: StageCommitBody) -> int:
    if committed.late and stage.is_passthrough:
        raise InvalidRequestError(
            f"stages.{name}.late is {committed.late}: a passthrough stage counts no records"
        )
    return committed.late


def _corrections(name: str, stage: Stage, committed: StageCommitBody) -> int:
    if committed.corrections and stage.is_passthrough:
        raise InvalidRequestError(
            f"stages.{name}.corrections is {committed.corrections}: a passthrough stage counts no values"
        )
    return committed.corrections


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

"""Responses with the present watermarks of stages."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from service.aggregator import (
    StageState,
)
from service.api.responses.common import Count, Instant, Watermark
from service.frontier.graph import Status
from service.frontier.health import Health
from service.frontier.timestamps import data_lag_ms, iso, to_wire


class RangeCounts(Struct, frozen=True):
    """Completeness of a watermark."""

    total: Count
    reported: Count
    idle: Count
    final: Count
    leased: Count
    retired: Annotated[
        Count | UnsetType,
        Meta(description="Ranges that an operator has retired: they count as final; absent: 0"),
    ] = UNSET


class WatermarkBody(Struct, frozen=True, kw_only=True):
    """The watermarks of a stage. A commit's answer leaves out values that are computed at requests."""

    job: str
    stage: str
    generation: Count
    version: Count
    status: Status
    input_watermark: Watermark
    output_watermark: Watermark
    ranges: RangeCounts
    updated_at: Annotated[
        Instant,
        Meta(description="Instant of the last change, also of the input or of the idleness"),
    ]
    health: (
        Annotated[
            Health | None,
            Meta(
                description="The first that applies: `final`; `unpublished` (its ranges have moved on,"
                " and a store does not take the advance); `failed` (by the last run); `silent` (a"
                " range has never reported); `no_worker` (a range that counts has no current lease while"
                " its run continues, or its last run was stopped); `stalled` (reports continue, a"
                " promise stands still, and old work ages); `waiting` (the stage has followed its "
                "inputs,"
                " and one of them has one of these five causes); `ended` (the last run finished);"
                " `idle`; `ok`. null: unknown while the live store is away. It changes without a new"
                " ETag"
            ),
        ]
        | UnsetType
    ) = UNSET
    input_ended: Annotated[
        bool | UnsetType,
        Meta(
            description="true: the stage is sound, has come up to its input, and waits for an input"
            " whose last run has finished, or for such a stage. Absent: not so, or unknown. It changes"
            " with the health"
        ),
    ] = UNSET
    processing_watermark: (
        Annotated[
            int | None,
            Meta(
                description="Milliseconds since the Unix epoch, on the wall clock: all work that arrived"
                " before is finished, here and upstream; null: a range has never reported"
            ),
        ]
        | UnsetType
    ) = UNSET
    system_lag_ms: (
        Annotated[
            int | None,
            Meta(description="Now minus the processing watermark: the wait of the oldest work"),
        ]
        | UnsetType
    ) = UNSET
    data_lag_ms: (
        Annotated[
            int | None,
            Meta(
                description="Now minus the output watermark: its lag in event time; 0 at"
                " the end of time, negative for data of the future"
            ),
        ]
        | UnsetType
    ) = UNSET
    records: (
        Annotated[
            Annotated[int, Meta(ge=0)] | None,
            Meta(
                description="Number of reported records; from 0 after a loss of the live store; null:"
                " unknown while the live store is away"
            ),
        ]
        | UnsetType
    ) = UNSET
    late: (
        Annotated[
            Annotated[int, Meta(ge=0)] | None,
            Meta(description="Number of records behind the watermark, by reports and commits"),
        ]
        | UnsetType
    ) = UNSET
    late_ranges: Annotated[
        Count | UnsetType,
        Meta(
            description="Ranges that report although the stage is final, as after a retirement that made"
            " it final: all their rows are late; absent: 0"
        ),
    ] = UNSET
    corrections: (
        Annotated[
            Annotated[int, Meta(ge=0)] | None,
            Meta(
                description="Number of values of windows that had been emitted before, which correct"
                " them, by commits"
            ),
        ]
        | UnsetType
    ) = UNSET
    percentiles: (
        Annotated[
            dict[str, int | None],
            Meta(
                description="By percentage, if the stage declares any: the largest time such that this"
                " percentage of the records in flight is not before it; null: a range has never reported"
                " its records in flight, or the live store is away"
            ),
        ]
        | UnsetType
    ) = UNSET


class CommittedBody(Struct, frozen=True):
    """The result of a commit: ranges applied by stage, and the stages' watermarks."""

    applied: dict[str, Count]
    watermarks: dict[str, WatermarkBody]


class SnapshotBody(Struct, frozen=True):
    """The watermarks of all stages, at one instant."""

    job: str
    generation: Count
    watermarks: dict[str, WatermarkBody]


def watermark_body(state: StageState) -> WatermarkBody:
    """Return the watermarks of a stage."""
    view, census = state.view, state.census
    return WatermarkBody(
        job=state.job.name,
        stage=state.name,
        generation=state.job.generation,
        version=view.version,
        status=view.watermark.status,
        input_watermark=to_wire(view.watermark.input),
        output_watermark=to_wire(view.watermark.output),
        ranges=RangeCounts(
            census.total,
            census.reported,
            census.idle,
            census.final,
            census.leased,
            census.retired or UNSET,
        ),
        updated_at=iso(view.updated_at_ms),
    )


def read_body(state: StageState, percentile: int | None = None) -> WatermarkBody:
    """Return the watermarks of a stage, with values that are computed at requests.

    `percentile`: that percentile watermark stands in place of the output watermark.
    """
    body = watermark_body(state)
    soft, output = state.soft, state.view.watermark.output
    processing_ms = None if soft is None else soft.processing_ms
    declared = state.job.pipeline.stages[state.name].policy.percentiles
    late_ranges = 0 if soft is None else soft.late_ranges
    return msgspec.structs.replace(
        body,
        late_ranges=late_ranges or UNSET,
        output_watermark=body.output_watermark
        if percentile is None
        else to_wire(state.percentile(percentile)),
        health=None if soft is None else soft.health,
        input_ended=(soft is not None and soft.input_ended) or UNSET,
        processing_watermark=processing_ms,
        system_lag_ms=None if processing_ms is None else max(0, state.now_ms - processing_ms),
        data_lag_ms=data_lag_ms(output, state.now_ms),
        records=None if soft is None else soft.counts.records,
        late=None if soft is None else soft.counts.late,
        corrections=None if soft is None else soft.counts.corrections,
        percentiles={str(p): to_wire(state.percentile(p)) for p in declared} or UNSET,
    )

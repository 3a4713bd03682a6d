"""The metrics of stages: never of ranges, and of no more stages than the operator has set."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.frontier.facts import Counts
from service.frontier.health import Health
from service.frontier.timestamps import MAX, MIN
from service.model.jobs import Census, StageView
from service.telemetry.families import Family, Labels, text

ByStage = Tally[tuple[str, str]]
"""Counts by job and stage."""

_Labelled = tuple["SurveyedStage", Labels]
"""A stage with its labels, which all of its series share."""


@dataclass(frozen=True, slots=True)
class Work:
    """Sum of the facts about a stage's ranges."""

    processing_ms: int | None
    """The processing watermark; None: some range has never reported."""
    counts: Counts


@dataclass(frozen=True, slots=True)
class SurveyedStage:
    """A stage at the time of the scrape."""

    job: str
    stage: str
    view: StageView
    census: Census | None = None
    """None: the live store does not answer."""
    conditions: Mapping[str, int] | None = None
    """Ranges by condition, which add up to all. None: the live store does not answer, or the census of a
    job with too many ranges is not enough."""
    work: Work | None = None
    """None: it does not answer, or the job has too many ranges to look at them all for a scrape."""
    health: Health | None = None
    """None likewise."""
    late_ranges: int | None = None
    """Ranges that report although the stage is final; None likewise."""
    throttled: int | None = None
    """Shards that the throttle pauses or slows down; None: its job has no throttle, or likewise."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The stages whose metrics are shown."""

    stages: Sequence[SurveyedStage] = ()
    left_out: int = 0
    """Stages that are not shown at all, because there are too many."""

    @property
    def without_work(self) -> int:
        """Stages that are shown without system lag, records and late rows."""
        return sum(each.work is None for each in self.stages)


def stage_metrics(survey: Survey, now_ms: int, arrivals: ByStage, expired: ByStage) -> bytes:
    """Return the metrics of a survey, and of what this process has counted by stage, as text."""
    stages = [(each, Labels({"job": each.job, "stage": each.stage})) for each in survey.stages]
    return text(
        (
            *_watermarks(stages, now_ms),
            *_ranges(stages),
            *_work(stages, now_ms),
            *_counted(stages, arrivals, expired),
            _left_out(survey),
        )
    )


def _left_out(survey: Survey) -> Family:
    left_out = _gauge(
        "tidegauge_left_out_stages",
        "Stages without metrics: without any (there are more stages than TIDEGAUGE_METRICS_STAGES),"
        " or without those of work and health (the live store does not answer, or the job has too"
        " many ranges)",
    )
    left_out.add(Labels({"metrics": "all"}), survey.left_out)
    left_out.add(Labels({"metrics": "work"}), survey.without_work)
    return left_out


def _watermarks(stages: Sequence[_Labelled], now_ms: int) -> tuple[Family, ...]:
    watermark = _gauge(
        "tidegauge_watermark_timestamp_seconds",
        "Watermark of a stage in seconds since the epoch; absent while there is none, +Inf at the"
        " end of time",
        "kind",
    )
    old_watermark = _gauge(
        "tidegauge_watermark_seconds",
        "Deprecated: the former name of tidegauge_watermark_timestamp_seconds",
        "kind",
    )
    lag = _gauge(
        "tidegauge_lag_seconds",
        "Distance of a stage's output watermark behind the wall clock; 0 at the end of time",
    )
    version = _gauge(
        "tidegauge_watermark_version",
        "Version of a stage's watermark: a flat line is a watermark that stands still",
    )
    status = _gauge("tidegauge_stage_status", "1 for the status that a stage has", "status")
    health = _gauge(
        "tidegauge_stage_health",
        "1 for the health that a stage has, and 0 for every other; absent while it is not known",
        "health",
    )
    throttled = _gauge(
        "tidegauge_throttled_shards",
        "Shards of a source that the throttle pauses or slows down; absent without a throttle",
    )
    for each, names in stages:
        mark = each.view.watermark
        for side, value in (("input", mark.input), ("output", mark.output)):
            if value != MIN:
                for family in (watermark, old_watermark):
                    family.add(names, _seconds(value), side)
        if mark.output != MIN:
            behind = 0 if mark.output == MAX else now_ms - mark.output
            lag.add(names, behind / 1_000)
        version.add(names, each.view.version)
        status.add(names, 1, mark.status.value)
        # Each of them, so that one that has passed is seen to be over at once.
        for kind in Health if each.health is not None else ():
            health.add(names, kind is each.health, kind.value)
        if each.throttled is not None:
            throttled.add(names, each.throttled)
    return watermark, old_watermark, lag, version, status, health, throttled


def _ranges(stages: Sequence[_Labelled]) -> tuple[Family, ...]:
    ranges = _gauge(
        "tidegauge_ranges",
        "Ranges of a stage by condition, the first that applies: final, retired, idle,"
        " never_reported, unleased, active. They add up to all ranges",
        "condition",
    )
    leased = _gauge("tidegauge_leased_ranges", "Ranges of a stage that a worker holds a lease on")
    states = _gauge(
        "tidegauge_stage_ranges",
        "Deprecated: use tidegauge_ranges and tidegauge_leased_ranges. These states overlap: total,"
        " reported, never_reported, leased, unleased (neither leased, final nor retired), idle,"
        " final",
        "state",
    )
    late = _gauge(
        "tidegauge_late_ranges",
        "Ranges that report although their stage is final: all their rows are late",
    )
    retired = _gauge(
        "tidegauge_retired_ranges",
        "Ranges of a stage that it does not wait for, by an operator's declaration",
    )
    for each, names in stages:
        for condition, count in (each.conditions or {}).items():
            ranges.add(names, count, condition)
        if each.census is not None:
            for state, count in _states(each.census).items():
                states.add(names, count, state)
            leased.add(names, each.census.leased)
            retired.add(names, each.census.retired)
        if each.late_ranges is not None:
            late.add(names, each.late_ranges)
    return ranges, leased, states, retired, late


def _work(stages: Sequence[_Labelled], now_ms: int) -> tuple[Family, ...]:
    system_lag = _gauge(
        "tidegauge_system_lag_seconds",
        "For how long the oldest unfinished work of a stage, or of a stage above it, may have been"
        " waiting",
    )
    records = _counter("tidegauge_stage_records", "Records that a stage's ranges have reported")
    late = _counter("tidegauge_stage_late", "Late records that a stage's ranges have reported")
    corrections = _counter(
        "tidegauge_stage_corrections", "Emitted values of a stage that correct earlier ones"
    )
    for each, names in stages:
        if each.work is None:
            continue
        processing_ms = each.work.processing_ms
        if processing_ms is not None:
            system_lag.add(names, max(0, now_ms - processing_ms) / 1_000)
        records.add(names, each.work.counts.records)
        late.add(names, each.work.counts.late)
        corrections.add(names, each.work.counts.corrections)
    return system_lag, records, late, corrections


def _counted(
    stages: Sequence[_Labelled], arrivals: ByStage, expired: ByStage
) -> tuple[Family, ...]:
    arrived = _counter(
        "tidegauge_stage_arrivals",
        "Reports for a stage that this process took, those left out which say that nothing came",
    )
    ran_out = _counter(
        "tidegauge_stage_leases_expired",
        "Leases of a stage that ran out, as far as this process has noticed first",
    )
    for each, names in stages:
        # From 0 on: Prometheus sees no increase in a series that begins at 1.
        counted = (each.job, each.stage)
        arrived.add(names, arrivals[counted])
        ran_out.add(names, expired[counted])
    return arrived, ran_out


def _states(census: Census) -> dict[str, int]:
    return {
        "total": census.total,
        "reported": census.reported,
        "never_reported": census.total - census.reported,
        "leased": census.leased,
        "unleased": max(0, census.total - census.leased - census.final - census.retired),
        "idle": census.idle,
        "final": census.final,
    }


def _gauge(name: str, about: str, label: str | None = None) -> Family:
    return Family(name, "gauge", about, label)


def _counter(name: str, about: str) -> Family:
    return Family(f"{name}_total", "counter", about)


def _seconds(value: int) -> float:
    return float("inf") if value == MAX else value / 1_000

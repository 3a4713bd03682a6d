"""The views of a job in memory."""

from __future__ import annotations

from dataclasses import replace

from service.live.memory.range_table import RangeTable
from service.live.memory.state import LiveJob, LiveStage
from service.model.checkpoints import CheckpointChunk, Columns, chunk_numbers, joined_columns
from service.model.jobs import Census, JobView
from service.model.observations import StageObservation, without
from service.model.positions import LivePosition
from service.model.reports import RangeView


def job_view(job: LiveJob) -> JobView:
    """Return the view of a job."""
    return JobView(
        job.name,
        job.pipeline,
        job.incarnation,
        job.generation,
        job.layout_version,
        job.revision,
        job.views,
        job.changes,
    )


def head(job: LiveJob) -> LivePosition:
    """Return the position of a job."""
    return LivePosition(
        job.incarnation,
        job.generation,
        job.layout_version,
        job.revision,
        job.last_run,
        job.changes,
    )


def observation(job: LiveJob, state: LiveStage, table: RangeTable) -> StageObservation:
    """Return the observation of a stage's ranges."""
    return StageObservation(
        table.layout,
        table.promises,
        table.idle_ranges,
        table.reported_at_ms,
        table.raised_at_ms,
        without(table.facts, table.retired),
        table.counts,
        table.owner,
        table.held_since_ms,
        table.idle_by_policy,
        table.retired,
        state.commits,
        state.kept,
        state.end,
        census(table),
        dict(state.marks),
        job.generation,
        list(state.departed),
    )


def columns(table: RangeTable | None) -> Columns:
    """Return the checkpoint's columns of every range; None: the stage has no ranges."""
    if table is None:
        return joined_columns(0, ())
    chunks = ((number, table.chunk(number)) for number in chunk_numbers(len(table.layout)))
    return joined_columns(len(table.layout), chunks)


def unsaved(job: LiveJob) -> list[CheckpointChunk]:
    """Return the promises that changed since they were saved."""
    return [
        CheckpointChunk(
            job=job.name,
            stage=name,
            incarnation=job.incarnation,
            generation=job.generation,
            layout_since=state.layout_since,
            chunk=number,
            stamp=stamp,
            columns=state.table.chunk(number),
            returned=state.table.returned_from_retirement(number),
        )
        for name, state in job.stages.items()
        if state.table is not None
        for number, stamp in sorted(state.table.changed.unsaved())
    ]


def census(table: RangeTable | None) -> Census:
    """Count the ranges of a stage."""
    if table is None:
        return Census(0, 0, 0, 0, 0)
    return Census(
        len(table), table.promised, table.idle, table.final, table.leased, len(table.retired)
    )


def range_view(
    job: LiveJob, state: LiveStage, table: RangeTable, index: int, now_ms: int
) -> RangeView:
    """Return the view of a range, with its lease and what its stage keeps back."""
    lease = job.by_fence.get(table.owned_by(index))
    if lease is None or lease.lost(now_ms) is not None:
        view = replace(table.view(index, None, None), fence=None)
    else:
        view = table.view(index, lease.holder, lease.left_ms(now_ms))
    kept = state.kept
    return view if kept is None else replace(view, note=kept.note(view.note, view.promise))

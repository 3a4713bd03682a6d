"""Conversions between rows of the ledger's tables and the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Row

from service.frontier.graph import Pipeline, StageWatermark
from service.frontier.health import Outcome
from service.frontier.ranges import Layout
from service.ledger.port import JobRecord, NewLayout
from service.ledger.tables import COUNTS, WATERMARK
from service.model.checkpoints import (
    COLUMNS,
    CheckpointChunk,
    Columns,
    chunk_numbers,
    joined_columns,
    packed_columns,
)
from service.model.history import HistoryPoint, RowCounts
from service.model.jobs import InstalledStage, StageProgress, StageView
from service.model.runs import Fencing, NewRun, RunEnd, RunRecord


def packed_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """Pack any number of rows into a single parameter of a statement."""
    return msgspec.json.encode(list(rows)).decode()


def chunk_row(chunk: CheckpointChunk) -> dict[str, Any]:
    """Return the row of a chunk."""
    return {
        "job": chunk.job,
        "stage": chunk.stage,
        "incarnation": chunk.incarnation,
        "generation": chunk.generation,
        "layout_since": chunk.layout_since,
        "chunk": chunk.chunk,
        "stamp": chunk.stamp,
        **{name: chunk.columns.get(name) for name in COLUMNS},
    }


def watermark_row(watermark: StageWatermark) -> dict[str, Any]:
    """Return the columns of a watermark."""
    return {name: getattr(watermark, name) for name in WATERMARK}


def watermark_of(row: Row[Any]) -> StageWatermark:
    """Return the watermark in a row of a stage, or of its history."""
    return StageWatermark(**{name: getattr(row, name) for name in WATERMARK})


def advance_row(stage: str, watermark: StageWatermark) -> dict[str, Any]:
    """Return the parameters of `ADVANCE_STAGE`."""
    return {
        "b_stage": stage,
        **{f"b_{name}": value for name, value in watermark_row(watermark).items()},
    }


def new_job_row(layout: NewLayout, incarnation: int, at_ms: int) -> dict[str, Any]:
    """Return the row of a new job."""
    return {
        "name": layout.job,
        "incarnation": incarnation,
        "generation": 1,
        "layout_version": 1,
        "revision": 0,
        "last_run": 0,
        "spec": layout.spec,
        "deleted": False,
        "created_at_ms": at_ms,
        "updated_at_ms": at_ms,
    }


def record_row(record: JobRecord) -> dict[str, Any]:
    """Return a record, without its advances, as a row for `RECORD_IN_ONE_STATEMENT`."""
    return {
        "job": record.job,
        "incarnation": record.incarnation,
        "generation": record.generation,
        "layout_version": record.layout_version,
        "seen": record.seen,
    }


def advance_rows(record: JobRecord) -> list[dict[str, Any]]:
    """Return the advances of a record as rows for `RECORD_IN_ONE_STATEMENT`."""
    return [
        {"job": record.job, "stage": stage, **watermark_row(watermark), **counts_row(record, stage)}
        for stage, watermark in record.advances.items()
    ]


def counts_row(record: JobRecord, stage: str) -> dict[str, int | None]:
    """Return the rows of a stage as columns of the history."""
    counts = record.counts.get(stage)
    return {name: None if counts is None else getattr(counts, name) for name in COUNTS}


def chunks_of(
    layout: NewLayout, incarnation: int, generation: int, layout_version: int
) -> list[CheckpointChunk]:
    """Return the inherited columns of a new layout's ranges, in chunks."""
    return [
        CheckpointChunk(
            job=layout.job,
            stage=stage,
            incarnation=incarnation,
            generation=generation,
            layout_since=layout_version,
            chunk=number,
            # Less than any stamp of the live store, which saves newer ones.
            stamp=0,
            columns=packed_columns(columns, number),
        )
        for stage, columns in layout.inherited.items()
        for number in chunk_numbers(len(columns["promises"]))
    ]


def view_of(row: Row[Any]) -> StageView:
    """Return the published view of a stage."""
    return StageView(
        watermark=watermark_of(row),
        version=row.version,
        revision=row.revision,
        updated_at_ms=row.updated_at_ms,
        advanced_at_ms=row.updated_at_ms if row.advanced_at_ms is None else row.advanced_at_ms,
    )


def history_points(
    rows: Iterable[Row[Any]], job: str, stage: str, generation: int
) -> list[HistoryPoint]:
    """Return the rows of `FIND_HISTORY` or `FIND_LAST_HISTORY` that are of this generation."""
    return [
        HistoryPoint(row.after_ms, row.at_ms, watermark_of(row), row.version, _counts_of(row))
        for row in rows
        if (row.job, row.stage, row.generation) == (job, stage, generation)
        and row.at_ms > row.after_ms
    ]


def _counts_of(row: Row[Any]) -> RowCounts | None:
    return None if row.records is None else RowCounts(row.records, row.late)


def end_of(row: Row[Any]) -> RunEnd | None:
    """Return the end of the run in a row of a run, or of a stage with its run."""
    if row.outcome is None:
        return None
    return RunEnd(row.run, Outcome(row.outcome), row.ended_at_ms, row.because or "", row.holder)


def run_row(job: str, number: int, run: NewRun, at_ms: int, epoch: int | None) -> dict[str, Any]:
    """Return the row of a new run; `epoch` is the last one of its stages before it."""
    return {
        "job": job,
        "run": number,
        "stages": msgspec.json.encode(sorted(set(run.stages))).decode(),
        "holder": run.holder,
        "program": run.program,
        "links": msgspec.json.encode(run.links).decode(),
        "started_at_ms": at_ms,
        "epoch_before": epoch,
    }


def run_of(row: Row[Any]) -> RunRecord:
    """Return the run in a row of `FIND_RUN` or `FIND_RUNS`."""
    stages = msgspec.json.decode(row.stages, type=list[str])
    links = msgspec.json.decode(row.links, type=dict[str, str])
    return RunRecord(
        row.run,
        NewRun(stages, row.holder, row.program, links),
        row.started_at_ms,
        end_of(row),
        row.last_epoch,
        is_fenced=row.outcome is None and not row.has_stage,
        fencing=_fencing_of(row),
    )


def _fencing_of(row: Row[Any]) -> Fencing | None:
    if row.outcome is not None or row.ended_at_ms is None:
        return None
    return Fencing(row.ended_at_ms, row.because or "")


def installed_of(row: Row[Any], pipeline: Pipeline, chunks: Sequence[Row[Any]]) -> InstalledStage:
    """Return a stage with its progress and checkpoint."""
    layout = pipeline.stages[row.stage].layout
    return InstalledStage(
        view=view_of(row),
        progress=StageProgress(row.run, row.epoch),
        layout_since=row.layout_since,
        columns=None if layout is None else columns_of(row, layout, chunks),
        end=end_of(row),
    )


def columns_of(row: Row[Any], layout: Layout, chunks: Sequence[Row[Any]]) -> Columns | None:
    """Return the saved columns of a stage's ranges; None: none are saved."""
    if not chunks:
        return None
    saved = [
        (chunk.chunk, {name: getattr(chunk, name) for name in COLUMNS})
        for chunk in chunks
        if chunk.layout_since == row.layout_since
    ]
    return joined_columns(len(layout), saved)

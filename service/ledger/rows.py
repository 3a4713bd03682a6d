"""Rows of the ledger's tables, read and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import Row

from service.frontier.graph import Pipeline, StageWatermark
from service.frontier.ranges import Layout
from service.frontier.timestamps import MIN
from service.model.checkpoints import CHUNK, PromiseChunk
from service.model.jobs import InstalledStage, StageProgress, StageView


def packed_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """Pack rows as a statement takes them: one parameter, whatever their number."""
    return msgspec.json.encode(list(rows)).decode()


def chunk_row(chunk: PromiseChunk) -> dict[str, Any]:
    """Write a chunk as a row."""
    return {
        "job": chunk.job,
        "stage": chunk.stage,
        "incarnation": chunk.incarnation,
        "generation": chunk.generation,
        "layout_since": chunk.layout_since,
        "chunk": chunk.chunk,
        "stamp": chunk.stamp,
        "promises": chunk.promises,
    }


def advance_row(stage: str, watermark: StageWatermark) -> dict[str, Any]:
    """Write where a stage is as the parameters of its advance."""
    return {
        "b_stage": stage,
        "b_input": watermark.input,
        "b_output": watermark.output,
        "b_idle": watermark.idle,
    }


def view_of(row: Row[Any]) -> StageView:
    """Read what readers are shown of a stage."""
    return StageView(
        watermark=StageWatermark(row.input, row.output, row.idle),
        version=row.version,
        revision=row.revision,
        updated_at_ms=row.updated_at_ms,
    )


def installed_of(row: Row[Any], pipeline: Pipeline, chunks: Sequence[Row[Any]]) -> InstalledStage:
    """Read what is known of a stage."""
    layout = pipeline.stages[row.stage].layout
    return InstalledStage(
        view=view_of(row),
        progress=StageProgress(row.run, row.epoch),
        layout_since=row.layout_since,
        promises=None if layout is None else _promises(row, layout, chunks),
    )


def _promises(row: Row[Any], layout: Layout, chunks: Sequence[Row[Any]]) -> Sequence[int] | None:
    if not chunks:
        return None
    promises = np.full(len(layout), MIN, dtype=np.int64)
    for chunk in chunks:
        if chunk.layout_since == row.layout_since:
            start = chunk.chunk * CHUNK
            packed = np.frombuffer(chunk.promises, dtype="<i8")
            promises[start : start + len(packed)] = packed
    return promises.tolist()

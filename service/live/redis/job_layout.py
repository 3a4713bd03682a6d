"""A job's layout in Redis: the pipeline as it is stored, runs and spans of ranges, and the layout that a
replica remembers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from service.frontier.graph import Pipeline, Stage
from service.frontier.policies import NO_POLICY, NO_THROTTLE, StagePolicy, ThrottlePolicy
from service.frontier.ranges import KeyLayout, Layout, RangeNames, ShardLayout
from service.live.redis.packing import Key
from service.live.redis.schema import BLOCK, SPAN, job_keys, stage_keys


class _Stage(msgspec.Struct, array_like=True):
    inputs: tuple[str, ...]
    ranges: int | None = None
    """Size of a key space tiled evenly, as most are: one number instead of up to a million bounds."""
    bounds: tuple[int, ...] | None = None
    shards: tuple[str, ...] | None = None
    policy: StagePolicy = NO_POLICY


class _Pipeline(msgspec.Struct, array_like=True):
    stages: dict[str, _Stage]
    throttle: ThrottlePolicy = NO_THROTTLE


_pipeline = msgspec.msgpack.Decoder(_Pipeline)


def pack_pipeline(pipeline: Pipeline) -> bytes:
    """Pack a pipeline, for the other replicas."""
    stages = {name: _stage(stage) for name, stage in pipeline.stages.items()}
    return msgspec.msgpack.encode(_Pipeline(stages, pipeline.throttle))


def _stage(stage: Stage) -> _Stage:
    packed = _Stage(stage.inputs, policy=stage.policy)
    match stage.layout:
        case ShardLayout(shards):
            packed.shards = shards
        case KeyLayout(bounds) as layout:
            if layout == KeyLayout.tile(len(layout)):
                packed.ranges = len(layout)
            else:
                packed.bounds = tuple(bounds.tolist())
        case None:
            pass
    return packed


def read_pipeline(packed: bytes) -> Pipeline:
    """Read a pipeline back."""
    stages: dict[str, Stage] = {}
    found = _pipeline.decode(packed)
    for name, stage in found.stages.items():
        layout: Layout | None = None
        if stage.shards is not None:
            layout = ShardLayout(stage.shards)
        elif stage.bounds is not None:
            layout = KeyLayout.at(stage.bounds)
        elif stage.ranges is not None:
            layout = KeyLayout.tile(stage.ranges)
        stages[name] = Stage(stage.inputs, layout, stage.policy)
    return Pipeline(stages, found.throttle)


def layout_id(generation: int, layout_version: int) -> str:
    """Identify a layout of a job. Each step passes it, and is refused if the job has another one."""
    return f"{generation}-{layout_version}"


Runs = Sequence[int]
"""Indices of ranges, compressed: start, count, start, count …"""


def runs_of(indices: npt.NDArray[np.int64]) -> list[int]:
    """Compress sorted indices to runs."""
    if not len(indices):
        return []
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(indices)]))
    return np.stack((indices[starts], ends - starts), axis=1).ravel().tolist()


def indices_of(runs: Runs) -> npt.NDArray[np.int64]:
    """Return the indices in runs."""
    starts, counts = runs[::2], runs[1::2]
    parts = [np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def spans_of(indices: npt.NDArray[np.int64]) -> list[list[Any]]:
    """Split sorted indices into spans of adjacent blocks, as `report.lua` reads them."""
    if len(indices) == 1:
        block, place = divmod(int(indices[0]), BLOCK)
        return [[block, 1, place + 1, place + 1]]
    blocks = indices // BLOCK
    spans: list[list[Any]] = []
    start = 0
    # A new span begins where a block is skipped, and after SPAN blocks.
    breaks = [*(np.flatnonzero(np.diff(blocks) > 1) + 1).tolist(), len(indices)]
    for end in breaks:
        while start < end:
            first = int(blocks[start])
            stop = min(end, int(np.searchsorted(blocks, first + SPAN)))
            low, high = int(indices[start]), int(indices[stop - 1])
            size = high // BLOCK - first + 1
            at = low - BLOCK * first + 1
            if high - low == stop - start - 1:
                spans.append([first, size, at, at + high - low])
            else:
                spans.append([first, size, (indices[start:stop] - BLOCK * first + 1).tolist()])
            start = stop
    return spans


@dataclass(frozen=True)
class JobLayout:
    """A job's layout as a replica remembers it: one version in one generation, so it never changes."""

    job: str
    id: str
    """See `layout_id`."""
    generation: int
    layout_version: int
    pipeline: Pipeline
    lookups: LRUCache[tuple[str, ...], Any] = field(repr=False, compare=False)
    """The ranges of the last report under each lease, and the promises that it has left: see `spans`.
    All jobs share them."""

    @cached_property
    def job_keys(self) -> list[Key]:
        """The keys of the job without those of its stages."""
        return job_keys(self.job)

    @cached_property
    def _stage_keys(self) -> dict[str, list[Key]]:
        return {}

    def keys(self, stages: Iterable[str] = ()) -> list[Key]:
        """Return the keys of a step on these stages."""
        keys = list(self.job_keys)
        for stage in stages:
            found = self._stage_keys.get(stage)
            if found is None:
                found = self._stage_keys[stage] = stage_keys(self.job, stage)
            keys += found
        return keys

    def index(self, stage: str) -> Mapping[str, int]:
        """Return the index of each of the stage's ranges, by name."""
        layout = self.pipeline.stages[stage].layout
        return {} if layout is None else layout.index

    def name(self, stage: str, index: int) -> str:
        """Return the name of the range at `index`."""
        layout = self.pipeline.stages[stage].layout
        if layout is None:
            raise IndexError(f"stage {stage!r} has no ranges")
        return layout.name(index)

    def names(self, stage: str, runs: Runs) -> Sequence[str]:
        """Return the names of the ranges in runs."""
        layout = self.pipeline.stages[stage].layout
        return () if layout is None else RangeNames(layout, indices_of(runs))

"""A job and its stages: as readers see them, and as they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.frontier.graph import Pipeline, StageWatermark


@dataclass(frozen=True, slots=True)
class StageView:
    """A stage as readers see it: published, so in the ledger already."""

    watermark: StageWatermark
    version: int
    """Rises with each change of input, output or status within a generation."""
    revision: int
    """Of the job, when this stage changed last: orders the changes of all its stages."""
    updated_at_ms: int


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far the executing program has come with a stage."""

    run: int = 0
    """0: no run was ever opened for it."""
    epoch: int | None = None
    """The last committed one."""


@dataclass(frozen=True, slots=True)
class InstalledStage:
    """What the ledger knows of a stage."""

    view: StageView
    progress: StageProgress
    layout_since: int
    """The layout version with which this stage's own ranges last changed."""
    promises: Sequence[int] | None = None
    """A promise per range, from the last checkpoint; None: take over those of the live store."""


@dataclass(frozen=True, slots=True)
class InstalledJob:
    """A job as the ledger has it: what the live store starts from, or is brought up to date with."""

    name: str
    pipeline: Pipeline
    incarnation: int
    """Of the job's state in the live store; the upper bits of its fences."""
    generation: int
    layout_version: int
    revision: int
    last_run: int
    stages: Mapping[str, InstalledStage]


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job with the specification as its author wrote it."""

    spec: bytes
    """JSON."""
    installed: InstalledJob


@dataclass(frozen=True, slots=True)
class Census:
    """How many of a stage's ranges are what."""

    total: int
    reported: int
    """Those that have ever promised."""
    idle: int
    final: int
    leased: int


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as readers see it: one consistent snapshot."""

    name: str
    pipeline: Pipeline
    incarnation: int
    generation: int
    layout_version: int
    revision: int
    """The newest of the ledger's revisions that readers are shown."""
    stages: Mapping[str, StageView]
    """Only to be read: it may be the store's own."""

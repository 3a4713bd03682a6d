"""A job and its stages: as published, and as stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

from service.frontier.graph import Pipeline, StageWatermark
from service.model.checkpoints import Columns
from service.model.positions import NOT_LIVE
from service.model.runs import RunEnd


@dataclass(frozen=True, slots=True)
class StageView:
    """A stage as published, and so already in the ledger."""

    watermark: StageWatermark
    version: int
    """Rises with each change of input, output or status within a generation."""
    revision: int
    """The job's revision of the last change of this stage: orders the changes of all stages."""
    updated_at_ms: int
    """Instant of the last change."""
    advanced_at_ms: int
    """Instant of the last rise of the output watermark; without one, the begin of the generation."""


@dataclass(frozen=True, slots=True)
class StageProgress:
    """The run and the epoch of a stage."""

    run: int = 0
    """0: the stage never had a run."""
    epoch: int | None = None
    """The last committed epoch."""


@dataclass(frozen=True, slots=True)
class InstalledStage:
    """A stage in the ledger."""

    view: StageView
    progress: StageProgress
    layout_since: int
    """The layout version with which this stage's own ranges last changed."""
    columns: Columns | None = None
    """Columns of its ranges, from the last checkpoint; None: keep those of the live store."""
    end: RunEnd | None = None
    """The end of its run; None: the run continues, or the stage has none."""


@dataclass(frozen=True, slots=True)
class InstalledJob:
    """A job in the ledger, from which the live store starts, or is brought up to date."""

    name: str
    pipeline: Pipeline
    incarnation: int
    """Incarnation of the job's state in the live store; the upper bits of its fences."""
    generation: int
    layout_version: int
    revision: int
    last_run: int
    stages: Mapping[str, InstalledStage]


@dataclass(frozen=True, slots=True)
class Specification:
    """A job's specification in its author's form, with its version."""

    job: str
    generation: int
    layout_version: int
    spec: bytes
    """JSON, not decoded: with many named shards, decoding takes a tenth of a second."""

    @property
    def etag(self) -> str:
        """Entity tag, which changes with the specification.

        A ledger that was lost, or restored from a backup, counts up to the same numbers again.
        """
        return f"{self.generation}-{self.layout_version}-{crc32(self.spec):08x}"


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job with the specification in its author's form."""

    spec: bytes
    """JSON."""
    installed: InstalledJob

    @property
    def specification(self) -> Specification:
        """The specification alone."""
        job = self.installed
        return Specification(job.name, job.generation, job.layout_version, self.spec)


@dataclass(frozen=True, slots=True)
class StoreSize:
    """Size of a live store."""

    jobs: int
    ranges: int


@dataclass(frozen=True, slots=True)
class Census:
    """Counts of a stage's ranges, by condition."""

    total: int
    reported: int
    """Ranges that have promised, or are retired."""
    idle: int
    final: int
    leased: int
    retired: int = 0
    """Ranges that are waited for no longer; none of them is idle or final as well."""


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as published: one consistent snapshot."""

    name: str
    pipeline: Pipeline
    incarnation: int
    generation: int
    layout_version: int
    revision: int
    """The newest visible revision of the ledger."""
    stages: Mapping[str, StageView]
    """Read-only: it may be the store's own."""
    changes: int
    """See `LivePosition`."""

    def is_as(self, other: JobView) -> bool:
        """Return whether both views show the same: nothing that readers can see has changed in between.

        A view that is `NOT_LIVE` is as none: other replicas may have changed the job since.
        """
        return self.changes != NOT_LIVE and (self.incarnation, self.changes) == (
            other.incarnation,
            other.changes,
        )

"""The state of a job in memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial

from service.frontier.agreement import awaits_revision
from service.frontier.columns import Int64s
from service.frontier.epochs import Waiting
from service.frontier.graph import Pipeline
from service.frontier.idleness import Commits
from service.frontier.leases import Rank, is_current
from service.live import refusals
from service.live.memory.range_table import EVERY, RangeLookup, RangeTable
from service.live.memory.rows import Rows, as_list
from service.live.port import MAX_DEPARTED
from service.model.jobs import StageView
from service.model.leases import LostReason
from service.model.reports import CommittedHolds
from service.model.runs import RunEnd


@dataclass(slots=True, eq=False)
class Lease:
    """A lease, or the record of one that has ended."""

    token: str
    fence: int
    stage: str
    holder: str
    rank: Rank
    ttl_ms: int
    deadline_ms: int
    members: Int64s
    """The ranges it was granted. Some may have been taken over: the table has the owners."""
    held: int
    watched: bool
    ended: LostReason | None = None
    last_lookup: RangeLookup | None = None

    def lost(self, now_ms: int) -> LostReason | None:
        """Return why it is no longer current, or None."""
        if self.ended is None and not is_current(self.deadline_ms, now_ms):
            return "expired"
        return self.ended

    def left_ms(self, now_ms: int) -> int:
        """Time for which the lease remains current."""
        return max(0, self.deadline_ms - now_ms)


@dataclass(slots=True, eq=False)
class LiveStage:
    """A stage: its ranges, the reports that wait for its epochs, and its published view."""

    table: RangeTable | None
    """None: a passthrough."""
    is_source: bool
    view: StageView
    run: int
    epoch: int | None
    recorded: int | None
    """The last epoch that is committed in the ledger."""
    layout_since: int
    end: RunEnd | None = None
    """The end of its run; None: that goes on, or there is none."""
    waiting: dict[int, dict[int, Waiting]] = field(default_factory=dict[int, dict[int, Waiting]])
    commits: Commits | None = None
    """Kept only if the stage has a policy for idleness."""
    kept: CommittedHolds | None = None
    """The holds that the last commit brought."""
    marks: dict[str, int] = field(default_factory=dict[str, int])
    """See `LiveStore.raise_marks`."""
    returned_at: int | None = None
    """The job's revision when ranges last returned (see `awaits_revision`); None: none has."""
    returned: set[int] = field(default_factory=set[int])
    """Those ranges, by index, or `EVERY`."""
    departed: deque[tuple[int, str]] = field(
        default_factory=partial(deque[tuple[int, str]], maxlen=MAX_DEPARTED)
    )
    """See `StageObservation.departed`."""


@dataclass(slots=True, eq=False)
class LiveJob:
    """A job, its stages and its leases."""

    name: str
    pipeline: Pipeline
    incarnation: int
    generation: int
    layout_version: int
    revision: int
    last_run: int
    fence: int
    """The last one that was granted."""
    stages: dict[str, LiveStage]
    views: dict[str, StageView]
    leases: dict[str, Lease] = field(default_factory=dict[str, Lease])
    """By token, including those that ended recently."""
    by_fence: dict[int, Lease] = field(default_factory=dict[int, Lease])
    ended: deque[str] = field(default_factory=deque[str])
    changes: int = 0
    """See `LivePosition`."""

    def stage(self, name: str) -> LiveStage:
        """Find a stage. Raises `UnknownStageError`."""
        found = self.stages.get(name)
        if found is None:
            raise refusals.unknown_stage(self.name, name)
        return found

    def note_returns(self, name: str) -> None:
        """Note which ranges of a stage have returned in this step, and the revision of the job."""
        stage, table = self.table(name)
        if table.returned:
            # Those of an earlier revision wait no longer.
            is_later = stage.returned_at != self.revision
            stage.returned = table.returned if is_later else stage.returned | table.returned
            stage.returned_at, table.returned = self.revision, set()

    def has_returned(self, name: str) -> bool:
        """Return whether a range of a stage has returned since the last revision."""
        return awaits_revision(self.stages[name].returned_at, self.revision)

    def awaits_revision(self, name: str, rows: Rows) -> bool:
        """Return whether an answer to these ranges of a stage must wait for the next revision."""
        self.note_returns(name)
        if not self.has_returned(name):
            return False
        returned = self.stages[name].returned
        return EVERY in returned or not returned.isdisjoint(as_list(rows))

    def table(self, name: str) -> tuple[LiveStage, RangeTable]:
        """Find a stage that has ranges. Raises `InvalidRequestError` for a passthrough."""
        stage = self.stage(name)
        if stage.table is None:
            raise refusals.no_ranges(name)
        return stage, stage.table

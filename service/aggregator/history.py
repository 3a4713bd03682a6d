"""Past watermarks by wall time, and estimates of their arrival: both from the ledger's history.

The ledger may be ahead of the visible state. So a stage is first read like in any read, and then its
history, up to this state: no value here is later than a value that a later read returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.aggregator.reader import Reader
from service.aggregator.states import StageState
from service.clock import Clock
from service.frontier.estimate import (
    INTERVALS,
    NEWEST,
    WINDOWS_MS,
    Estimate,
    Observation,
    Trace,
    better,
    estimate,
    settled,
)
from service.frontier.graph import StageWatermark
from service.frontier.timestamps import MIN
from service.ledger.port import Ledger
from service.model.history import HistoryPoint, RowCounts

_AT_ONCE = 500
"""Number of intervals in one transaction: some ten ms, for which SQLite does nothing else."""


@dataclass(frozen=True, slots=True)
class PastWatermark:
    """A stage's watermarks from an instant of the wall clock on."""

    at_ms: int
    watermark: StageWatermark
    counts: RowCounts | None = None
    """The rows up to the advance at this instant; None: unknown, or without an advance then."""


class History:
    """Reads the history of stages."""

    def __init__(self, reader: Reader, ledger: Ledger, clock: Clock) -> None:
        self._reader = reader
        self._ledger = ledger
        self._clock = clock

    async def points(
        self, job: str, stage: str, *, from_ms: int, until_ms: int, points: int
    ) -> Sequence[PastWatermark]:
        """Return at most `points` watermarks of a stage in this generation, by wall time.

        The first is the state at `from_ms`, or at the creation of the job, if that was later. The first
        is left out if the ledger no longer has it. The others are the last of each interval in which
        there was a change.
        """
        state = await self._reader.stage(job, stage, soft=False)
        changes: list[HistoryPoint] = []
        for begin in range(0, max(points - 1, 1), _AT_ONCE):
            end = min(begin + _AT_ONCE, points - 1)
            changes += await self._ledger.history(
                job,
                stage,
                generation=state.job.generation,
                newest=state.view.version,
                from_ms=_part(from_ms, until_ms, begin, points - 1),
                until_ms=_part(from_ms, until_ms, end, points - 1),
                intervals=end - begin,
            )
        changes = _in_order(changes, state, until_ms)
        if changes and changes[0].at_ms <= from_ms:
            held = [PastWatermark(from_ms, changes.pop(0).watermark)]
        elif not state.view.version or await self._ledger.began_after(
            job, stage, generation=state.job.generation, at_ms=from_ms
        ):
            held = await self._nothing(job, from_ms, changes[0].at_ms if changes else until_ms)
        else:
            held = []
        found = [
            *held,
            *(PastWatermark(each.at_ms, each.watermark, each.counts) for each in changes),
        ]
        return found[:points]

    async def _nothing(self, job: str, from_ms: int, until_ms: int) -> list[PastWatermark]:
        """Return the state before the first advance; empty: the job did not exist yet."""
        # By the clocks of several replicas, an advance may come before the creation.
        begin_ms = max(from_ms, await self._ledger.created_at_ms(job))
        return [PastWatermark(begin_ms, StageWatermark())] if begin_ms <= until_ms else []

    async def estimate(
        self, job: str, stage: str, target: int
    ) -> tuple[StageState, Estimate | None]:
        """Estimate when the output watermark of a stage reaches `target`; None: it has reached it."""
        state = await self._reader.stage(job, stage, soft=False)
        if state.view.watermark.output >= target:
            return state, None
        of = {"generation": state.job.generation, "newest": state.view.version}
        newest = await self._ledger.last_advances(job, stage, limit=NEWEST, **of)
        now_ms = self._clock.wall_ms()
        found = estimate(_trace(newest, state, now_ms), now_ms, target)
        if len(newest) < NEWEST:
            # The history does not go back further.
            return state, found
        for window_ms in WINDOWS_MS:
            from_ms = now_ms - window_ms
            if settled(found):
                break
            if from_ms >= newest[0].at_ms:
                continue
            older = await self._ledger.history(
                job, stage, from_ms=from_ms, until_ms=now_ms, intervals=INTERVALS, **of
            )
            found = better(found, estimate(_trace(older, state, now_ms), now_ms, target))
            if older and older[0].after_ms != MIN:
                # The history begins in this window.
                break
        return state, found


def _part(from_ms: int, until_ms: int, number: int, intervals: int) -> int:
    return from_ms + (until_ms - from_ms) * number // max(intervals, 1)


def _in_order(
    changes: Sequence[HistoryPoint], state: StageState, until_ms: int
) -> list[HistoryPoint]:
    """Leave out points that are out of order: replicas' clocks differ, and a watermark never goes back.

    The newest change comes last, even if it is dated earlier than another, or no longer in the history.
    """
    view = state.view
    rising: list[HistoryPoint] = []
    for change in changes:
        if not rising or change.version > rising[-1].version:
            rising.append(change)
    newest = rising[-1].version if rising else 0
    if view.version > newest and view.updated_at_ms <= until_ms:
        at_ms = max(view.updated_at_ms, rising[-1].at_ms if rising else MIN)
        rising.append(HistoryPoint(MIN, at_ms, view.watermark, view.version))
    return rising


def _trace(changes: Sequence[HistoryPoint], state: StageState, now_ms: int) -> Trace:
    return Trace(
        [
            Observation(each.after_ms, each.at_ms, each.watermark.output, each.version)
            for each in _in_order(changes, state, now_ms)
        ]
    )

"""Retirement of ranges that are gone for good, and its effects, in advance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from service.clock import Clock
from service.consistency.publisher import Publisher
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import UnavailableError, UnknownStageError
from service.frontier.agreement import Agreement
from service.frontier.columns import column_agreement, counted
from service.frontier.differences import may_end_range
from service.frontier.graph import StageWatermark
from service.frontier.retirement import counted_promise
from service.frontier.timestamps import MAX
from service.ledger.port import Ledger
from service.live import refusals
from service.model.audit import Action, Actor, AuditRecord, Deed, detail_of, differences_of
from service.model.jobs import JobView
from service.model.observations import StageObservation
from service.model.reports import RangeView
from service.tasks import run_to_completion

_RECORDS = 1_000
"""Number of records of the audit, the newest first, that are searched for the reason of a retirement."""
_BEGINS: Final = frozenset({Action.CREATE_JOB, Action.DELETE_JOB, Action.RESET_JOB})
"""A retirement does not outlast these."""


@dataclass(frozen=True, slots=True)
class Move:
    """A watermark that moves."""

    stage: str
    before: StageWatermark
    after: StageWatermark


@dataclass(frozen=True, slots=True)
class Retiring:
    """A range that is to be retired, as it was before, with the watermarks that move by it at once.

    Stages below move further as their ranges report.
    """

    view: RangeView
    moves: Sequence[Move]
    held_by: str | None
    """The range of the stage that is the lowest then; None: not one is left that the stage waits for, as
    in a final stage."""


@dataclass(frozen=True, slots=True)
class Retirement:
    """A retired range."""

    stage: str
    range: str
    record: AuditRecord | None
    """Its record in the audit; None: not available, or older than what the audit keeps."""

    @property
    def because(self) -> str | None:
        """The reason that the operator has given."""
        if self.record is None:
            return None
        return self.record.detail.removeprefix(detail_of(self.stage, self.range, ""))


class Retirements:
    """The retired ranges."""

    def __init__(
        self, live: RecoveringLiveStore, ledger: Ledger, publisher: Publisher, clock: Clock
    ) -> None:
        self._live = live
        self._ledger = ledger
        self._publisher = publisher
        self._clock = clock

    async def preview(self, job: str, stage: str, range_name: str) -> Retiring:
        """Return the effects of retiring a range, without retiring it.

        Raises `UnknownStageError`, `UnknownRangeError`, and `InvalidRequestError` for a passthrough.
        """
        view, _ = await self._live.snapshot(job)
        if stage not in view.pipeline.stages:
            raise UnknownStageError(f"job {job!r} has no stage {stage!r}")
        if view.pipeline.stages[stage].layout is None:
            raise refusals.no_ranges(stage)
        reach = view.pipeline.reach((stage,))
        _, observed = await self._live.observe(job, sorted(reach))
        if stage not in observed:
            # It has become a passthrough since the snapshot.
            raise _changing(stage)
        index = observed[stage].layout.index.get(range_name)
        if index is None:
            raise refusals.unknown_range(stage, range_name)
        found = await self._live.range_views(job, stage, [index])
        if not found or found[0].name != range_name:
            raise _changing(stage)
        left = _without(observed[stage], index)
        is_final = view.stages[stage].watermark.output == MAX
        return Retiring(
            found[0],
            _moves(view, observed, stage, left),
            None if is_final else _lowest(left, is_keyed=not view.pipeline.stages[stage].is_source),
        )

    @run_to_completion
    async def retire(
        self, job: str, stage: str, range_name: str, because: str, by: Actor
    ) -> Retiring:
        """Retire a range until its next report; return its effects. It is durable once this returns.

        A range that is retired or final already stays unchanged. Raises as `preview`, and
        `UnavailableError` if the ledger does not record it in time: then it may be retried.
        """
        found = await self.preview(job, stage, range_name)
        if found.view.promise != MAX and not found.view.retired:
            # The end of an earlier retirement comes first: the newest record is the one in effect.
            await self._save(job, stage)
            # Before the step: no watermark advances by a retirement that is not in the audit.
            deed = Deed(Action.RETIRE_RANGE, by, self._clock.wall_ms())
            await self._ledger.note_deed(deed, job, detail_of(stage, range_name, because))
            await self._live.retire(job, stage, range_name)
        # Also if it was retired before: the earlier request may have failed before this point.
        await self._save(job, stage)
        return found

    async def _save(self, job: str, stage: str) -> None:
        self._publisher.touch(job, (stage,), saves=True)
        await self._live.flush(job)

    async def among(self, job: str, observed: Mapping[str, StageObservation]) -> list[Retirement]:
        """Return the retired ranges of these stages, with their records in the audit."""
        retired = [
            (stage, seen.layout.name(index))
            for stage, seen in observed.items()
            for index in sorted(seen.retired)
        ]
        return await self.records(job, retired)

    async def ended(self, job: str, ranges: Sequence[tuple[str, str]]) -> Sequence[str | None]:
        """Return the reasons of the retirements of these ranges (stage, range), which have ended; None:
        it is not known.

        Only the retirement of the present range counts: not one before a reset or another job of this
        name, or of a shard that has left the specification since.
        """
        if not ranges:
            return ()
        try:
            records = await self._ledger.read_audit(_RECORDS, None, job)
        except UnavailableError:
            # For display alone.
            records = ()
        return [_reason(records, *each) for each in ranges]

    async def records(self, job: str, retired: Iterable[tuple[str, str]]) -> list[Retirement]:
        """Return these retired ranges (stage, range), with their records in the audit."""
        wanted = list(retired)
        if not wanted:
            return []
        try:
            records = await self._ledger.read_audit(_RECORDS, None, job, Action.RETIRE_RANGE)
        except UnavailableError:
            # The reason is for display alone.
            records = ()
        return [
            Retirement(
                stage,
                name,
                next((r for r in records if r.detail.startswith(detail_of(stage, name, ""))), None),
            )
            for stage, name in wanted
        ]


def _reason(records: Sequence[AuditRecord], stage: str, range_name: str) -> str | None:
    """Return the reason of a range's last retirement among the records of its job, newest first."""
    detail = detail_of(stage, range_name, "")
    for each in records:
        action = each.deed.action
        if action is Action.RETIRE_RANGE and each.detail.startswith(detail):
            return each.detail.removeprefix(detail)
        words = differences_of(each.detail).get(stage, "") if action is Action.CHANGE_JOB else ""
        if action in _BEGINS or may_end_range(words, range_name):
            return None
    return None


def _changing(stage: str) -> UnavailableError:
    return UnavailableError(f"the ranges of stage {stage!r} are changing: retry")


def _moves(
    view: JobView, observed: Mapping[str, StageObservation], stage: str, left: StageObservation
) -> Sequence[Move]:
    published = {name: each.watermark for name, each in view.stages.items()}
    seen_then = {**observed, stage: left}
    agreements = {name: _agreement(view, name, seen) for name, seen in seen_then.items()}
    after = view.pipeline.propagate(published, agreements, (stage,))
    return [Move(name, published[name], mark) for name, mark in after.items()]


def _without(seen: StageObservation, index: int) -> StageObservation:
    """Return a stage as it is once this range is retired."""
    promises, idle = seen.promises.copy(), seen.idle.copy()
    promises[index] = counted_promise(int(promises[index]), retired=True)
    idle[index] = False
    return replace(seen, promises=promises, idle=idle)


def _lowest(seen: StageObservation, *, is_keyed: bool) -> str | None:
    values = counted(seen.promises, seen.idle, is_keyed=is_keyed)
    index = int(values.argmin())
    return None if values[index] == MAX else seen.layout.name(index)


def _agreement(view: JobView, stage: str, seen: StageObservation) -> Agreement:
    is_keyed = not view.pipeline.stages[stage].is_source
    return column_agreement(seen.promises, seen.idle, is_keyed=is_keyed)

"""The causes by which a stage holds itself back, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.aggregator.remedies import REMEDIES, remedy
from service.consistency.failures import PublishFailure
from service.frontier.columns import Int64s, lowest
from service.frontier.durations import moment_text
from service.frontier.health import Health, Outcome, counted_ranges, past, silent_ranges
from service.frontier.ranges import KeyLayout
from service.frontier.timestamps import MAX, MIN
from service.model.jobs import StageView
from service.model.observations import Instant, StageObservation
from service.model.runs import RunEnd

_CLOCKS_DIFFER_MS = 1_000

EXAMPLES = 5
"""Number of ranges that a problem names."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Reasons for which a stage holds itself back."""

    health: Health
    since_ms: int | None
    ranges: int
    examples: Sequence[str]
    because: str
    lowest: int
    """The least promise of these ranges; without any, of the stage's."""
    remedy: str
    """The next thing to do."""

    @property
    def cause(self) -> str:
        """Its sentence, with the name of a single range."""
        return with_range(self.because, self.ranges, self.examples)


def with_range(because: str, ranges: int, examples: Sequence[str]) -> str:
    """Write the name of a single range behind the sentence of its problem.

    >>> with_range("the last run of taps failed", 1, ["b1"]), with_range("two failed", 2, ["a", "b"])
    ('the last run of taps failed (range b1)', 'two failed')
    """
    return f"{because} (range {examples[0]})" if ranges == 1 and examples else because


class TroubledRanges:
    """The ranges of a stage, for the text of a problem."""

    def __init__(self, stage: str, seen: StageObservation, now: Instant) -> None:
        self.stage = stage
        self.seen = seen
        self.now = now

    def counted(self) -> Int64s:
        """Return the indices of the ranges that have reported and count."""
        seen = self.seen
        return np.flatnonzero(counted_ranges(seen.promises, seen.idle, seen.reported_at_ms))

    def silent(self) -> Int64s:
        """Return the indices of the ranges that have never reported."""
        seen = self.seen
        return np.flatnonzero(silent_ranges(seen.promises, seen.idle, seen.reported_at_ms))

    def free_since_ms(self, indices: Int64s) -> int | None:
        """Return since when the first of some of them is without a lease; None: unknown."""
        moments = self.seen.held_since_ms[indices]
        known = moments[(moments > 0) & (self.seen.owners[indices] == 0)]
        if not len(known):
            return None
        # Leases run by a clock of their own.
        return self.now.wall_ms - (self.now.lease_ms - int(known.min()))

    def begin(self, indices: Int64s) -> str:
        """Write the begin of ranges that have not had a lease since.

        A range that has promised by itself was under a lease before its state was lost. Any other one
        has its promise from ranges before it, by a change of the layout.
        """
        if bool(self.seen.raised_at_ms[indices].any()):
            return "the live state was restored from the ledger"
        return "it began" if len(indices) == 1 else "they began"

    def departed(self, indices: Int64s) -> Sequence[str]:
        """Return the last holders of some of them, whose leases have run out: those that are kept."""
        freed_ms = self.seen.held_since_ms[indices]
        holders = (who for at_ms, who in self.seen.departed if bool((freed_ms == at_ms).any()))
        return list(dict.fromkeys(holders))

    def trouble(
        self,
        health: Health,
        indices: Int64s,
        since_ms: int | None,
        because: str,
        departed: Sequence[str] = (),
        run_holder: str = "",
    ) -> Trouble:
        """Return the trouble of some of them.

        `departed`: their last holders; `run_holder`: the holder of the last run.
        """
        chosen = indices[lowest(self.seen.promises[indices], EXAMPLES)]
        names = [self.seen.layout.name(index) for index in chosen.tolist()]
        least = int(self.seen.promises[indices].min(initial=MAX))
        is_keyed = isinstance(self.seen.layout, KeyLayout)
        cure = remedy(health, is_keyed=is_keyed, departed=departed, run_holder=run_holder)
        return Trouble(health, since_ms, len(indices), names, because, least, cure)

    def some(self, indices: Int64s) -> str:
        """Write the number of these ranges."""
        return f"{len(indices):,} of {len(self.seen.promises):,} ranges of {self.stage}"

    def moment(self, at_ms: int) -> str:
        """Write a moment of the wall clock."""
        return moment_text(at_ms, self.now.wall_ms)


def unpublished_trouble(of: TroubledRanges, failure: PublishFailure) -> Trouble:
    """Return the trouble of a stage whose advance cannot be published. Not a range has a part in it."""
    health = Health.UNPUBLISHED
    least = int(of.seen.promises.min(initial=MAX))
    because = (
        f"the ranges of {of.stage} have moved on, and the advance cannot be published since"
        f" {of.moment(failure.since_ms)}: {failure.detail}"
    )
    return Trouble(health, failure.since_ms, 0, (), because, least, REMEDIES[health])


def ended_text(end: RunEnd, now_ms: int) -> str:
    """Write the end of the last run of a stage. The reason of the program is in quotes: more may follow.

    >>> ended_text(RunEnd(1, Outcome.FAILED, 60_000, "out of memory"), 120_000)
    'failed at 00:01Z: "out of memory"'
    """
    because = _because(end)
    quoted = f': "{because}"' if because else ""
    return f"{past(end.outcome)} at {moment_text(end.at_ms, now_ms)}{quoted}"


def _because(end: RunEnd) -> str:
    """Write the reason of a program, which may be a traceback, in one line."""
    return " ".join(end.because.split())


def end_trouble(of: TroubledRanges, end: RunEnd) -> Trouble:
    """Return the trouble of a stage whose last run has failed, or was stopped."""
    left = np.flatnonzero(of.seen.promises != MAX)
    if end.outcome is Outcome.FAILED:
        because = f"the last run of {of.stage} {ended_text(end, of.now.wall_ms)}"
        return of.trouble(Health.FAILED, left, end.at_ms, because)
    since_ms = of.free_since_ms(left)
    # By two clocks, the end of the run and that of its leases differ a little.
    if since_ms is None or since_ms > end.at_ms - _CLOCKS_DIFFER_MS:
        since_ms = end.at_ms
    why = f": {found}" if (found := _because(end)) else ""
    because = (
        f"{of.some(left)} {_have(left)} no worker since {of.moment(since_ms)}"
        f" ({_their(left)} last run was stopped{why})"
    )
    departed = of.departed(left)
    return of.trouble(Health.NO_WORKER, left, since_ms, because, departed, end.holder)


def no_worker_trouble(of: TroubledRanges) -> Trouble:
    """Return the trouble of ranges without a lease."""
    counted = of.counted()
    free = counted[of.seen.owners[counted] == 0]
    since_ms, departed = of.free_since_ms(free), of.departed(free)
    if since_ms is None:
        because = (
            f"{of.some(free)} {_have(free)} no worker (not held by a lease since {of.begin(free)})"
        )
        return of.trouble(Health.NO_WORKER, free, None, because)
    leases = "its lease" if len(free) == 1 else "their leases"
    have = "has" if len(free) == 1 else "have"
    # An end of a lease by its worker, or with a run, is not kept.
    over = f"{leases} {have} run out" if departed else f"{leases} {have} been given back"
    because = f"{of.some(free)} {_have(free)} no worker since {of.moment(since_ms)} ({over})"
    return of.trouble(Health.NO_WORKER, free, since_ms, because, departed)


def silent_trouble(of: TroubledRanges, since_ms: int | None) -> Trouble:
    """Return the trouble of ranges that have never reported."""
    silent = of.silent()
    without_owner = not bool(of.seen.owners[silent].any())
    who = f", and {_are(silent)} not held by a lease" if without_owner else ""
    because = f"{of.some(silent)} {_have(silent)} never reported{who}"
    return of.trouble(Health.SILENT, silent, since_ms, because)


def silent_since_ms(stage: StageView) -> int | None:
    """Return the moment since which a stage has been without an output watermark; None: it has one."""
    return stage.advanced_at_ms if stage.watermark.output == MIN else None


def stalled_trouble(of: TroubledRanges, stalled: Sequence[int]) -> Trouble:
    """Return the trouble of ranges whose oldest work ages."""
    indices = np.array(stalled, dtype=np.int64)
    oldest = min(
        each.oldest_work_ms
        for index in stalled
        if (each := of.seen.facts[index]).oldest_work_ms is not None
    )
    since_ms = int(of.seen.raised_at_ms[indices].min()) or None
    keeps, their = ("keeps", "its") if len(stalled) == 1 else ("keep", "their")
    because = (
        f"{of.some(indices)} {keeps} reporting, while {their} oldest work has been waiting since"
        f" {of.moment(oldest)}"
    )
    return of.trouble(Health.STALLED, indices, since_ms, because)


def _have(of: Int64s) -> str:
    return "has" if len(of) == 1 else "have"


def _their(of: Int64s) -> str:
    return "its" if len(of) == 1 else "their"


def _are(of: Int64s) -> str:
    return "is" if len(of) == 1 else "are"

"""Idleness of a quiet shard of a source, by the policy of its author.

A shard without records holds back everything downstream. Only a worker that watches the shard has
evidence that it is quiet: a silent worker proves nothing. So a shard is idle only if it was quiet *and
watched* for the policy's time (Flink's `withIdleness` requires only silence).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from service.frontier.clock_readings import EVEN, ClockReadings
from service.frontier.facts import Facts
from service.frontier.timestamps import MAX, MIN

MIN_COMMITS = 2
"""Number of commits of a run without a report for a shard that prove that the shard was quiet."""


@dataclass(frozen=True, slots=True)
class Commits:
    """An unbroken series of a stage's commits. Instants are on the clock of leases.

    A commit is evidence of the time before its batch was planned: the batch has found nothing in quiet
    shards until then. Its sender measures the age of the evidence. The time in flight, from this
    measurement to the step of the live store, still makes the evidence look newer than it is.
    """

    since_ms: int
    """Instant at which the first commit arrived."""
    last_ms: int
    """Instant of the last commit's evidence."""
    count: int
    before_ms: int
    """Instant of the evidence before the last; of the first commit, its own. The last committed batch
    was planned after it, so records may have arrived since."""
    arrived_ms: int
    """Instant at which the last commit arrived."""


def next_commit(series: Commits | None, now_ms: int, *, after_ms: int, age_ms: int) -> Commits:
    """Return the series after a commit, whose evidence is `age_ms` old.

    A gap between arrivals as long as the policy's time begins a new series, and so does a clock that was
    set back behind the last commit. A series begins with an arrival, so that an age which is too long
    proves nothing. A batch is planned after the evidence before it: if its own looks older, the commit
    before was in flight for long, and its evidence looked too new.

    >>> series = next_commit(None, 10, after_ms=100, age_ms=4)
    >>> series
    Commits(since_ms=10, last_ms=6, count=1, before_ms=6, arrived_ms=10)
    >>> next_commit(series, 60, after_ms=100, age_ms=30)
    Commits(since_ms=10, last_ms=30, count=2, before_ms=6, arrived_ms=60)
    >>> next_commit(series, 60, after_ms=100, age_ms=55)
    Commits(since_ms=10, last_ms=5, count=2, before_ms=5, arrived_ms=60)
    >>> next_commit(series, 110, after_ms=100, age_ms=0)
    Commits(since_ms=110, last_ms=110, count=1, before_ms=110, arrived_ms=110)
    >>> next_commit(series, 9, after_ms=100, age_ms=0)
    Commits(since_ms=9, last_ms=9, count=1, before_ms=9, arrived_ms=9)
    """
    at_ms = now_ms - age_ms
    if series is None or not 0 <= now_ms - series.arrived_ms < after_ms:
        return Commits(now_ms, at_ms, 1, at_ms, now_ms)
    return Commits(series.since_ms, at_ms, series.count + 1, min(series.last_ms, at_ms), now_ms)


def repeat_commit(series: Commits, now_ms: int, *, age_ms: int) -> Commits:
    """Return the series after a retry of its last commit. Of two dates of one evidence the earlier one
    counts, since the time in flight makes each too late.

    >>> series = Commits(since_ms=10, last_ms=60, count=3, before_ms=30, arrived_ms=70)
    >>> repeat_commit(series, 80, age_ms=35)
    Commits(since_ms=10, last_ms=45, count=3, before_ms=30, arrived_ms=70)
    >>> repeat_commit(series, 80, age_ms=75)
    Commits(since_ms=10, last_ms=5, count=3, before_ms=5, arrived_ms=70)
    >>> repeat_commit(series, 80, age_ms=0) == series
    True
    """
    last_ms = min(series.last_ms, now_ms - age_ms)
    return replace(series, last_ms=last_ms, before_ms=min(series.before_ms, last_ms))


def is_void(series: Commits | None, now_ms: int) -> bool:
    """Return whether a series is ahead of the clock, so of before the clock was set back.

    Such a series is removed from the store (`LiveStore.follow_set_back`). Else it would count again once
    the clock reaches it.

    >>> series = Commits(0, last_ms=90, count=2, before_ms=0, arrived_ms=100)
    >>> is_void(series, 99), is_void(series, 100), is_void(None, 0)
    (True, False, False)
    """
    return series is not None and now_ms < series.arrived_ms


def after_set_back(given_ms: int, now_ms: int, *, quiet_ms: int) -> int:
    """Return a moment of a shard as it counts from now on. A moment ahead of the clock is from before a
    set-back, and counts as now, less the time for which the shard is known to be quiet.

    >>> after_set_back(70, 70, quiet_ms=30), after_set_back(71, 70, quiet_ms=30)
    (70, 40)
    """
    return given_ms if given_ms <= now_ms else now_ms - quiet_ms


def committed_throughout(series: Commits | None, now_ms: int, *, after_ms: int) -> bool:
    """Return whether the stage's run has committed epochs throughout the policy's time, until now.

    Only the time before the last evidence is proved: the batch after it may have read records. A commit
    ahead of the clock is from before the clock was set back, and proves nothing about the time since.

    >>> series = Commits(0, last_ms=100, count=2, before_ms=0, arrived_ms=120)
    >>> committed_throughout(series, 150, after_ms=100)
    True
    >>> committed_throughout(replace(series, last_ms=90), 150, after_ms=100)
    False
    >>> committed_throughout(series, 219, after_ms=100), committed_throughout(series, 220, after_ms=100)
    (True, False)
    >>> committed_throughout(series, 119, after_ms=100)
    False
    """
    return (
        series is not None
        and series.count >= MIN_COMMITS
        and series.since_ms <= series.last_ms - after_ms
        and 0 <= now_ms - series.arrived_ms < after_ms
    )


MAX_GAP_MS: Final = 1_000
"""The largest gap in a series of samples, unless half of the policy's time is longer. A larger gap, or
one longer than the policy's time, breaks the series: a pause may have begun and ended in it."""


@dataclass(frozen=True, slots=True)
class PauseSamples:
    """An unbroken series of samples of the paused shards of a stage.

    Instants are on the clock of leases.
    """

    since_ms: int = MIN
    """Instant of the first sample; `MIN`: no shard can have been paused before."""
    last_ms: int = MIN
    unpaused_since_ms: Mapping[str, int] = field(default_factory=dict[str, int])
    """By shard: the first sample after its pause; `MAX`: paused now. Only shards that were paused
    recently."""

    def unpaused_since(self, shard: str) -> int:
        """Return the instant from which a shard was not paused."""
        return self.unpaused_since_ms.get(shard, self.since_ms)

    def is_paused(self, shard: str) -> bool:
        """Return whether a shard is paused now."""
        return self.unpaused_since_ms.get(shard) == MAX


NEVER_PAUSED: Final = PauseSamples()
"""Samples of a stage whose shards are never throttled."""


def next_sample(
    series: PauseSamples | None, now_ms: int, paused: Collection[str], *, after_ms: int
) -> PauseSamples:
    """Return the series after a sample with these shards paused.

    >>> series = next_sample(None, 10, {"a"}, after_ms=4_000)
    >>> series.is_paused("a"), series.is_paused("b"), series.unpaused_since("b")
    (True, False, 10)
    >>> series = next_sample(series, 110, (), after_ms=4_000)
    >>> series.is_paused("a"), series.unpaused_since("a"), series.unpaused_since("b")
    (False, 110, 10)
    >>> next_sample(series, 2_110, (), after_ms=4_000).unpaused_since("b")
    10
    >>> next_sample(series, 2_111, (), after_ms=4_000).unpaused_since("b")
    2111
    """
    allowed_ms = min(max(MAX_GAP_MS, after_ms // 2), after_ms)
    is_broken = series is None or not 0 <= now_ms - series.last_ms <= allowed_ms
    if series is None or is_broken:
        return PauseSamples(now_ms, now_ms, dict.fromkeys(paused, MAX))
    since = {
        shard: now_ms if unpaused == MAX else unpaused
        for shard, unpaused in series.unpaused_since_ms.items()
        # Commits from before the policy's time no longer count.
        if unpaused > now_ms - 2 * after_ms
    }
    return PauseSamples(series.since_ms, now_ms, since | dict.fromkeys(paused, MAX))


def quiet_through(
    facts: Facts | None,
    *,
    watched_since_ms: int | None,
    commits: Commits | None,
    unpaused_since_ms: int,
    now_ms: int,
    after_ms: int,
    clock: ClockReadings = EVEN,
) -> int | None:
    """Return the instant through which a shard has been quiet, on the clock of leases. None: it has not
    been quiet for `after_ms`.

    Quiet means without backlog, not paused, and watched throughout, and its last report left nothing
    unfinished (`Facts.is_unfinished`). `keeps_back` is the rest.

    Watched means that its lease was current throughout (`watched_since_ms`: the begin of the leases
    without a gap whose workers polled it), or that its stage's run committed throughout (`commits`),
    without a report for the shard. Commits prove nothing about the time since the last one: a long
    batch may be reading the shard just now. The record that it reads may have arrived since the last
    committed batch was planned, which was after the evidence before the last.

    The worker of a paused shard keeps the lease and does not read. So the shard counts as watched only
    from `unpaused_since_ms` on (`MAX`: it is paused), regardless of lease and commits.

    Time is measured by `clock` from its last step on.

    >>> quiet = Facts(0, None, None, None, backlog=0, quiet_since_ms=0)
    >>> at = {"commits": None, "unpaused_since_ms": 0, "now_ms": 100, "after_ms": 100}
    >>> quiet_through(quiet, watched_since_ms=0, **at)
    100
    >>> quiet_through(quiet, watched_since_ms=None, **at)
    >>> quiet_through(None, watched_since_ms=0, **at)
    100
    >>> quiet_through(None, watched_since_ms=1, **at)
    >>> quiet_through(quiet, watched_since_ms=0, **at | {"unpaused_since_ms": 1})
    >>> quiet_through(quiet, watched_since_ms=0, **at, clock=ClockReadings(1, 100, 0, 0, steps=1))
    >>> series = Commits(-90, 90, count=9, before_ms=70, arrived_ms=95)
    >>> at |= {"commits": series, "watched_since_ms": None}
    >>> quiet_through(quiet, **at)
    >>> quiet_through(quiet, **at | {"after_ms": 90})
    70
    >>> quiet_through(Facts(0, None, 7, None, 0, quiet_since_ms=0), **at | {"after_ms": 90})
    """
    if facts is not None and facts.is_unfinished:
        return None
    since_ms = MIN if facts is None else clock.moment(facts.quiet_since_ms)
    if watched_since_ms is not None and clock.moment(watched_since_ms) <= now_ms - after_ms:
        proved_until_ms = through_ms = now_ms
    elif commits is not None and committed_throughout(commits, now_ms, after_ms=after_ms):
        proved_until_ms, through_ms = commits.last_ms, commits.before_ms
    else:
        return None
    begin_ms = max(since_ms, unpaused_since_ms, clock.even_since_ms)
    is_long_enough = begin_ms <= proved_until_ms - after_ms
    return through_ms if is_long_enough else None


def keeps_back(holds: Collection[str], waiting_promise: int | None) -> bool:
    """Return whether output of a quiet shard may still come that its facts do not show: it has a hold,
    or a report for an epoch that is not committed yet. If the shard left the minimum, the watermark
    would pass this output.

    >>> keeps_back((), None), keeps_back(("buffer",), None), keeps_back((), 5)
    (False, True, True)
    """
    return bool(holds) or waiting_promise is not None


def wait_for_last(quiet_since_ms: Iterable[int | None]) -> int | None:
    """Return the instant since which the last of several quiet shards are quiet.

    These shards leave the minimum after the others, once the others' departure is published. If all left
    at once, no shard would be active, and the watermark would stand at the least promise of all: that of
    the shard that has been quiet for longest. None: they may leave together.

    >>> wait_for_last([70, None, 90, 90]), wait_for_last([90, 90]), wait_for_last([])
    (90, None, None)
    """
    instants = {MIN if since is None else since for since in quiet_since_ms}
    return max(instants) if len(instants) > 1 else None


def stays_idle(*, was_idle_by_policy: bool, reported_nothing: bool) -> bool:
    """Return whether a shard that is idle by policy remains so after a report: as long as no record
    comes, and nothing is unfinished.

    >>> stays_idle(was_idle_by_policy=True, reported_nothing=True)
    True
    >>> stays_idle(was_idle_by_policy=True, reported_nothing=False)
    False
    """
    return was_idle_by_policy and reported_nothing

"""When a quiet shard of a source is no longer waited for, by the policy of its author.

A shard that brings nothing holds back everything downstream. Whether more will come, only somebody
who watches it can know: a worker that is merely silent proves nothing. So a shard is idle only if
it was quiet *and known to be watched* for all that time (Flink calls this `withIdleness`, and asks
only for silence).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from service.frontier.facts import Facts
from service.frontier.timestamps import MIN

MIN_COMMITS = 2
"""So many commits of a run, none with a report for a shard, show that the run found nothing in it."""


@dataclass(frozen=True, slots=True)
class Commits:
    """An unbroken series of a stage's commits. Instants are of the clock that leases run by."""

    since_ms: int
    """Of the first."""
    last_ms: int
    count: int


def next_commit(series: Commits | None, now_ms: int, *, after_ms: int) -> Commits:
    """Return the series after a commit. A gap as long as the policy's time begins a new one.

    >>> series = next_commit(None, 10, after_ms=100)
    >>> next_commit(series, 60, after_ms=100)
    Commits(since_ms=10, last_ms=60, count=2)
    >>> next_commit(series, 110, after_ms=100)
    Commits(since_ms=110, last_ms=110, count=1)
    """
    if series is None or now_ms - series.last_ms >= after_ms:
        return Commits(now_ms, now_ms, 1)
    return Commits(series.since_ms, now_ms, series.count + 1)


def committed_throughout(series: Commits | None, now_ms: int, *, after_ms: int) -> bool:
    """Whether the stage's run committed epochs for all of the policy's time, and is still at it.

    Only what is before the last commit is proved: the batch after it may have read something.

    >>> committed_throughout(Commits(since_ms=0, last_ms=100, count=2), 150, after_ms=100)
    True
    >>> committed_throughout(Commits(since_ms=0, last_ms=90, count=2), 100, after_ms=100)
    False
    >>> committed_throughout(Commits(since_ms=0, last_ms=100, count=2), 200, after_ms=100)
    False
    """
    return (
        series is not None
        and series.count >= MIN_COMMITS
        and series.since_ms <= series.last_ms - after_ms
        and now_ms - series.last_ms < after_ms
    )


def is_quiet(
    facts: Facts | None,
    *,
    leased_since_ms: int | None,
    commits: Commits | None,
    is_paused: bool,
    now_ms: int,
    after_ms: int,
) -> bool:
    """Whether a shard has been quiet for `after_ms`, without backlog, not paused, and watched
    throughout.

    Watched means that its lease was current all the time (`leased_since_ms`: since when, without a gap),
    or that its stage's run committed all the time (`commits`), with nothing reported for it. Commits
    prove nothing of the time since the last one: a long batch may be reading the shard just now.

    >>> quiet = Facts(0, None, None, None, backlog=0, quiet_since_ms=0)
    >>> at = {"commits": None, "is_paused": False, "now_ms": 100, "after_ms": 100}
    >>> is_quiet(quiet, leased_since_ms=0, **at), is_quiet(quiet, leased_since_ms=None, **at)
    (True, False)
    >>> is_quiet(None, leased_since_ms=0, **at), is_quiet(None, leased_since_ms=1, **at)
    (True, False)
    >>> at = at | {"commits": Commits(since_ms=-90, last_ms=90, count=9), "leased_since_ms": None}
    >>> is_quiet(quiet, **at), is_quiet(quiet, **at | {"after_ms": 90})
    (False, True)
    """
    if is_paused or (facts is not None and facts.backlog):
        return False
    quiet_since_ms = None if facts is None else facts.quiet_since_ms
    if leased_since_ms is not None and leased_since_ms <= now_ms - after_ms:
        proved_until_ms = now_ms
    elif commits is not None and committed_throughout(commits, now_ms, after_ms=after_ms):
        proved_until_ms = commits.last_ms
    else:
        return False
    return quiet_since_ms is None or quiet_since_ms <= proved_until_ms - after_ms


def wait_for_last(quiet_since_ms: Iterable[int | None]) -> int | None:
    """Of several shards that are quiet enough at once, return since when the last ones are.

    Those leave the minimum after the others, and after the others' leaving is published. If all left at
    once, nobody would be active, and the watermark would stand at the least promise of all: at that of
    the shard that has been quiet for longest. None: they may leave together.

    >>> wait_for_last([70, None, 90, 90]), wait_for_last([90, 90]), wait_for_last([])
    (90, None, None)
    """
    instants = {MIN if since is None else since for since in quiet_since_ms}
    return max(instants) if len(instants) > 1 else None


def stays_idle(*, was_idle_by_policy: bool, reported_quiet: bool) -> bool:
    """Whether a shard that is idle by policy remains so after a report: as long as nothing comes.

    >>> stays_idle(was_idle_by_policy=True, reported_quiet=True)
    True
    >>> stays_idle(was_idle_by_policy=True, reported_quiet=False)
    False
    """
    return was_idle_by_policy and reported_quiet

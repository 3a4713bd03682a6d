"""Model of one job, in plain Python: everything is recomputed from scratch at every step.

The model knows nothing of HTTP, stores, heaps or versions. A stage is a dictionary of ranges, each
with its largest promise, whether it said idle, and its lease; the published values are the joins
(maxima) of what the ranges allow at the end of every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.api import MAX

Time = int | None
Rank = tuple[int, int, int]


def smallest(times: Iterable[Time]) -> Time:
    """The minimum, where null is below everything."""
    found = list(times)
    return None if None in found else min(t for t in found if t is not None)


def largest(*times: Time) -> Time:
    """The maximum, where null is below everything."""
    return max((t for t in times if t is not None), default=None)


@dataclass
class Lease:
    """One grant. It is current for a range while the range points to it and its time is not up."""

    token: str
    holder: str
    rank: Rank
    run: int | None
    ttl: int
    deadline: int


@dataclass
class Range:
    """One range that has to report."""

    promise: Time = None
    idle: bool = False
    lease: Lease | None = None
    retired: bool = False

    @property
    def counted(self) -> Time:
        """The promise as its stage counts it."""
        return MAX if self.retired else self.promise

    @property
    def final(self) -> bool:
        return self.counted == MAX

    @property
    def waits_for_nothing(self) -> bool:
        """Idle and not final."""
        return self.idle and not self.final


@dataclass
class Word:
    """One report for one range."""

    token: str
    watermark: Time = None
    """Watermark of a source; the promise without holds."""
    observed: Time | str = "absent"
    """Input that the report of a keyed range named, if any."""
    holds: dict[str, int] = field(default_factory=dict)
    idle: bool = False
    final: bool = False

    def promise(self, source: bool, cap: Time | str = "absent") -> Time:
        """The promise it amounts to; `cap` is the input watermark of the commit."""
        if self.final:
            return MAX
        if source:
            bound = self.watermark
        else:
            bounds = [b for b in (self.observed, cap) if not isinstance(b, str)]
            bound = smallest(bounds)
        return smallest([bound, *self.holds.values()])


@dataclass
class Stage:
    """A source (no inputs), a keyed stage (inputs and ranges) or a passthrough (inputs only)."""

    inputs: tuple[str, ...]
    ranges: dict[str, Range]
    run: int | None = None
    committed: int | None = None
    waiting: dict[int, dict[str, list[Word]]] = field(default_factory=dict)
    input: Time = None
    output: Time = None
    status: str = "unknown"

    @property
    def kind(self) -> str:
        if not self.inputs:
            return "source"
        return "keyed" if self.ranges else "passthrough"


Layout = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]
"""Per stage, in topological order: its inputs and its ranges."""


class Model:
    """One job. Times of leases come from outside, as in the service."""

    def __init__(self, layout: Layout) -> None:
        self.stages: dict[str, Stage] = {}
        self.relayout(layout, now=0)

    # -- the aggregation ---------------------------------------------------------------------

    def settle(self, now: int) -> None:
        """Compute which ranges are leased, which are idle, and what each stage may publish."""
        for name in self.order():
            stage = self.stages[name]
            for item in stage.ranges.values():
                if item.lease is not None and item.lease.deadline <= now:
                    item.lease = None
                if item.lease is None:
                    item.idle = False
            upstreams = [self.stages[u] for u in stage.inputs]
            if upstreams:
                stage.input = largest(
                    stage.input,
                    self._meet([(u.status == "idle", u.output) for u in upstreams]),
                )
            if stage.kind == "passthrough":
                stage.output = largest(stage.output, stage.input)
            else:
                # An idle key range holds nothing, so its promise is all that there is to say.
                source = stage.kind == "source"
                pairs = [(source and r.idle, r.counted) for r in stage.ranges.values()]
                stage.output = largest(stage.output, self._meet(pairs))
            stage.status = self._status(stage, upstreams)

    @staticmethod
    def _meet(parts: list[tuple[bool, Time]]) -> Time:
        """The minimum over the parts that are not idle; over all of them, if none of those is active."""
        active = [time for idle, time in parts if not idle]
        if all(time == MAX for time in active):
            return smallest(time for _, time in parts)
        return smallest(active)

    @staticmethod
    def _status(stage: Stage, upstreams: list[Stage]) -> str:
        if stage.output == MAX:
            return "final"
        quiet_above = any(u.status == "idle" for u in upstreams) and all(
            u.status == "idle" or u.output == MAX for u in upstreams
        )
        ranges = stage.ranges.values()
        quiet_here = any(r.waits_for_nothing for r in ranges) and all(
            r.idle or r.final for r in ranges
        )
        if stage.kind == "source":
            resting = quiet_here
        elif stage.kind == "passthrough":
            resting = quiet_above
        else:
            least = smallest(r.counted for r in ranges)
            caught_up = largest(least, stage.input) == least
            resting = quiet_above and quiet_here and caught_up
        if resting:
            return "idle"
        return "unknown" if stage.output is None else "active"

    def order(self) -> list[str]:
        """The stages, upstreams first."""
        done: list[str] = []
        while len(done) < len(self.stages):
            done += [
                name
                for name, stage in self.stages.items()
                if name not in done and all(u in done for u in stage.inputs)
            ]
        return done

    # -- leases ------------------------------------------------------------------------------

    def grantable(self, stage: str, wanted: Iterable[str], holder: str, rank: Rank) -> set[str]:
        """Return the ranges that a claim gets."""
        granted: set[str] = set()
        for name in wanted:
            lease = self.stages[stage].ranges[name].lease
            if lease is None or lease.holder == holder or rank > lease.rank:
                granted.add(name)
        return granted

    def grant(self, stage: str, granted: Iterable[str], lease: Lease) -> None:
        """Grant them: older leases lose them at once, and their idle reports end."""
        for name in granted:
            item = self.stages[stage].ranges[name]
            item.lease, item.idle = lease, False

    def held(self, token: str) -> dict[tuple[str, str], Lease]:
        """Return the ranges that a token covers now, as (stage, range)."""
        return {
            (name, key): item.lease
            for name, stage in self.stages.items()
            for key, item in stage.ranges.items()
            if item.lease is not None and item.lease.token == token
        }

    def renew(self, token: str, now: int) -> None:
        for lease in self.held(token).values():
            lease.deadline = now + lease.ttl

    def release(self, token: str) -> None:
        for stage, key in self.held(token):
            self.stages[stage].ranges[key].lease = None

    def open_run(self, number: int, stages: Iterable[str]) -> None:
        for name in stages:
            stage = self.stages[name]
            stage.run = number
            stage.waiting.clear()
            for item in stage.ranges.values():
                item.lease = None

    # -- reports -----------------------------------------------------------------------------

    def apply(self, stage: str, key: str, promise: Time, *, idle: bool) -> None:
        item = self.stages[stage].ranges[key]
        item.promise = largest(item.promise, promise)
        item.idle, item.retired = idle, False

    def report(self, stage: str, words: Mapping[str, Word], epoch: int | None) -> None:
        """Reports for ranges that their lease covers."""
        this = self.stages[stage]
        for key, word in words.items():
            if epoch is not None:
                this.ranges[key].retired = False
                this.waiting.setdefault(epoch, {}).setdefault(key, []).append(word)
            else:
                promise = word.promise(this.kind == "source")
                self.apply(stage, key, promise, idle=word.idle)

    def commit(self, stage: str, epoch: int, cap: Time | str) -> int:
        """Apply what waits in the epoch; return how many ranges that were."""
        this = self.stages[stage]
        if this.committed == epoch:
            return 0
        waiting = this.waiting.get(epoch, {})
        for key, words in waiting.items():
            promise = smallest(word.promise(this.kind == "source", cap) for word in words)
            lease = this.ranges[key].lease
            idle = lease is not None and lease.token == words[-1].token and self._idle(this, words)
            self.apply(stage, key, promise, idle=idle)
        this.committed = epoch
        this.waiting = {e: w for e, w in this.waiting.items() if e > epoch}
        return len(waiting)

    @staticmethod
    def _idle(stage: Stage, words: Sequence[Word]) -> bool:
        """Return whether attempts at an epoch are idle: beside another one's promise, nobody is."""
        promises = [word.promise(stage.kind == "source", MAX) for word in words]
        for k in range(1, len(words)):
            is_repeated = words[k].token == words[k - 1].token
            if not is_repeated and (smallest(promises[:k]), promises[k]) != (None, None):
                return False
        return all(word.idle for word in words)

    def retire(self, stage: str, key: str) -> None:
        """An operator's declaration: the range counts as final until its next report."""
        item = self.stages[stage].ranges[key]
        if not item.final:
            item.idle, item.retired = False, True

    # -- upheavals ---------------------------------------------------------------------------

    def relayout(self, layout: Layout, now: int) -> None:
        """Children of a split inherit, merged ranges take the minimum, new ones are unknown."""
        for name, (inputs, keys) in layout.items():
            old = self.stages.get(name)
            if old is None:
                self.stages[name] = Stage(inputs, {key: Range() for key in keys})
                continue
            source = not inputs
            ranges: dict[str, Range] = {}
            for key in keys:
                if key in old.ranges:
                    ranges[key] = old.ranges[key]
                elif source:
                    ranges[key] = Range()
                else:
                    parents = [r for k, r in old.ranges.items() if overlaps(k, key)]
                    ranges[key] = Range(promise=smallest(r.promise for r in parents))
            old.inputs, old.ranges = inputs, ranges
            for waiting in old.waiting.values():
                for key in set(waiting) - set(keys):
                    del waiting[key]
        self.settle(now)

    def reset(self) -> None:
        for stage in self.stages.values():
            stage.ranges = {key: Range() for key in stage.ranges}
            stage.run = stage.committed = stage.input = stage.output = None
            stage.waiting.clear()
            stage.status = "unknown"

    def restart(self) -> None:
        """Leases and waiting reports are gone; promises, runs and epochs are not."""
        for stage in self.stages.values():
            stage.waiting.clear()
            for item in stage.ranges.values():
                item.lease = None


def bounds(key: str) -> tuple[int, int]:
    start, end = key.split("-")
    return int(start, 16), int(end, 16)


def overlaps(one: str, other: str) -> bool:
    (a, b), (c, d) = bounds(one), bounds(other)
    return a < d and c < b

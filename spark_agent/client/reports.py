"""Leases, reports and the progress of epochs, in the JSON forms that the agent sends."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

Json = dict[str, Any]

_RANGES_PER_REPORT: Final = 10_000
_NULL: Final = -(2**63)
"""Stands for null in a column of times."""


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """Decides between two claims to a range: the greater rank takes over. Run 0: a stage without a run.

    >>> Rank(7, 12, 0).body(), Rank(0, 0, 1).body()
    ({'run': 7, 'epoch': 12, 'attempt': 0}, {'epoch': 0, 'attempt': 1})
    """

    run: int
    epoch: int
    attempt: int

    def body(self) -> Json:
        """Return its JSON form."""
        of_run = {"run": self.run} if self.run else {}
        return {**of_run, "epoch": self.epoch, "attempt": self.attempt}


def claim_body(holder: str, ttl_ms: int, rank: Rank, *, watched: bool) -> Json:
    """Return the JSON form of a claim, but for its ranges. An older service rejects `watched`.

    >>> claim_body("w", 10_000, Rank(0, 0, 1), watched=True)
    {'holder': 'w', 'ttl_ms': 10000, 'epoch': 0, 'attempt': 1}
    >>> claim_body("w", 10_000, Rank(0, 0, 1), watched=False)["watched"]
    False
    """
    unwatched = {} if watched else {"watched": False}
    return {"holder": holder, "ttl_ms": ttl_ms, **rank.body(), **unwatched}


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to report for `granted`, until it runs out or is outranked."""

    token: str
    granted: tuple[str, ...]
    denied: tuple[str, ...]
    free_in_ms: int | None = None
    """Time until the first lease on a denied range expires; None: not one is denied for a lease."""


@dataclass(frozen=True, slots=True)
class ClaimedReport:
    """Result of a report that has claimed its ranges."""

    accepted: int
    granted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Input watermark and holds of an epoch of a keyed stage, common to all its ranges."""

    input_ms: int | None
    """Its input watermark; None: there was none."""
    holds: Mapping[str, int] = field(default_factory=dict[str, int])
    """Holds of the ranges, by component."""

    def body(self) -> Json:
        """Return its JSON form."""
        body: Json = {"input_watermark": self.input_ms}
        return body | {"holds": dict(self.holds)} if self.holds else body


@dataclass(frozen=True, slots=True)
class InFlight:
    """The event times (ms) of a range's rows in flight, as a DataSketches KLL doubles sketch."""

    count: int
    """0: nothing is in flight."""
    event_times: bytes = b""

    def body(self) -> Json | None:
        """Return its JSON form."""
        if not self.count:
            return None
        return {"count": self.count, "event_times": base64.b64encode(self.event_times).decode()}


NOTHING_IN_FLIGHT: Final = InFlight(0)


@dataclass(frozen=True, slots=True)
class RangeReport:
    """The report for one range. `watermark_ms` and `final` are for sources only.

    `records` and `late` count the rows since the range's last report.
    `backlog` is the number of rows left to read, `pending` the rows in flight. None: not reported.
    `oldest_work_ms` is the arrival of the oldest unfinished work on the wall clock; None: all is done.
    `position` shows where the reader of a shard is; empty: not reported.
    """

    watermark_ms: int | None = None
    final: bool = False
    idle: bool = False
    holds: Mapping[str, int] = field(default_factory=dict[str, int])
    records: int | None = None
    late: int | None = None
    backlog: int | None = None
    pending: InFlight | None = None
    oldest_work_ms: int | None = None
    position: str = ""

    @property
    def has_news(self) -> bool:
        """True if records were read, or nothing more comes. The rest is facts, or a promise by them.

        >>> RangeReport(5, records=1).has_news, RangeReport(records=0, backlog=1).has_news
        (True, False)
        """
        return bool(self.records) or self.final

    def __add__(self, later: RangeReport) -> RangeReport:
        """Merge two reports of a source's shard, the second of which is the later one.

        >>> RangeReport(5, records=2) + RangeReport(3, records=1, late=1)
        RangeReport(watermark_ms=5, final=False, idle=False, holds={}, records=3, late=1, backlog=None, \
pending=None, oldest_work_ms=None, position='')
        """
        watermarks = [w for w in (self.watermark_ms, later.watermark_ms) if w is not None]
        return RangeReport(
            max(watermarks, default=None),
            self.final or later.final,
            later.idle,
            later.holds,
            _sum(self.records, later.records),
            _sum(self.late, later.late),
            later.backlog,
            later.pending or self.pending,
            later.oldest_work_ms,
            later.position,
        )

    def body(self) -> Json:
        """Return its JSON form."""
        body: Json = {
            name: count
            for name, count in (
                ("records", self.records),
                ("late", self.late),
                ("backlog", self.backlog),
                ("oldest_work", self.oldest_work_ms),
            )
            if count is not None
        }
        if self.pending is not None:
            body["pending"] = self.pending.body()
        if _is_of_a_shard(self):
            body["watermark"] = self.watermark_ms
        if self.final:
            body["final"] = True
        if self.idle:
            body["idle"] = True
        if self.holds:
            body["holds"] = dict(self.holds)
        if self.position:
            body["position"] = self.position
        return body


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one + (other or 0)


def report_bodies(lease: Lease, ranges: Mapping[str, RangeReport]) -> Iterator[Json]:
    """Yield the bodies of the requests that report these ranges."""
    names = list(ranges)
    # Reports of key ranges have no `watermark`, so there is nothing to pack.
    if len(names) <= _RANGES_PER_REPORT and set(ranges) == set(lease.granted):
        reports = [ranges[name] for name in lease.granted]
        columns = _columns(reports)
        if columns is not None and any(_is_of_a_shard(each) for each in reports):
            yield {"columns": columns}
            return
    yield from named_bodies(ranges)


def named_bodies(ranges: Mapping[str, RangeReport]) -> Iterator[Json]:
    """Yield the bodies of the requests that report these ranges by name."""
    names = list(ranges)
    for first in range(0, len(names), _RANGES_PER_REPORT):
        some = names[first : first + _RANGES_PER_REPORT]
        yield {"ranges": {name: ranges[name].body() for name in some}}


def halves(body: Json, ranges: Mapping[str, RangeReport]) -> Sequence[Json]:
    """Return a body that reports some of these ranges as two smaller ones; empty: it has one range.

    >>> halves({"ranges": {"b": {}, "c": {}}}, {each: RangeReport() for each in "abc"})
    [{'ranges': {'b': {}}}, {'ranges': {'c': {}}}]
    >>> halves({"columns": {}}, {each: RangeReport() for each in "ab"})
    [{'ranges': {'a': {}}}, {'ranges': {'b': {}}}]
    >>> halves({"ranges": {"b": {}}}, {"b": RangeReport()})
    []
    """
    # Packed columns are of all ranges, and without their names.
    names = list(body.get("ranges", ranges))
    middle = len(names) // 2
    return [
        {"ranges": {name: ranges[name].body() for name in some}}
        for some in (names[:middle], names[middle:])
        if middle
    ]


def _is_of_a_shard(report: RangeReport) -> bool:
    members = (report.watermark_ms, report.records, report.backlog, report.pending)
    return report.final or any(each is not None for each in members)


def _columns(reports: Sequence[RangeReport]) -> Json | None:
    """Return shards' reports in packed form: one column for each member, in the order of the lease.

    None: the packed form cannot express them, since some have members that others leave out.
    """
    columns: Json = {"watermark": _times([each.watermark_ms for each in reports])}
    for name in ("records", "late", "backlog"):
        counts = [getattr(each, name) for each in reports]
        if None not in counts:
            columns[name] = counts
        elif any(count is not None for count in counts):
            return None
    for name in ("idle", "final"):
        flags = [getattr(each, name) for each in reports]
        if any(flags):
            columns[name] = base64.b64encode(bytes(flags)).decode()
    oldest = [each.oldest_work_ms for each in reports]
    if any(ms is not None for ms in oldest):
        columns["oldest_work"] = _times(oldest)
    is_plain = not any(each.holds or each.pending or each.position for each in reports)
    return columns if is_plain else None


def _times(times: Sequence[int | None]) -> str | Sequence[int | None]:
    """Return a column of times as bytes, which the service decodes faster than an array.

    >>> _times([7, None])
    'BwAAAAAAAAAAAAAAAAAAgA=='
    """
    try:
        # "<": little-endian, on every machine.
        packed = struct.pack(f"<{len(times)}q", *(_NULL if t is None else t for t in times))
    except struct.error:
        # A strategy has returned an invalid time. The service rejects it, with its range and its value.
        return times
    return base64.b64encode(packed).decode()

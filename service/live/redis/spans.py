"""Reports as arguments of the script, and its results: names become indices, and indices names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from service.frontier.facts import ReportedFacts
from service.frontier.ranges import RangeNames
from service.live import refusals
from service.live.port import UnknownShardsError
from service.live.redis import schema
from service.live.redis.grants import claim_args, read_denied, read_grant
from service.live.redis.job_layout import JobLayout, Runs, indices_of, runs_of, spans_of
from service.live.redis.joined import Promises, join, left_by
from service.live.redis.packing import blob
from service.model.leases import Grant, LostReason
from service.model.reports import RangeNote, Report, Reported, column

T = TypeVar("T")


_BULK = 64
"""From this many ranges on, a lookup is worth keeping for the next report."""

_NAMED_BYTES = 120
_NUMBERED_BYTES = 32
"""Approximate size of a kept range: a promise in two forms, and a name or an index."""


@dataclass(slots=True)
class RangeLookup:
    """The ranges of a report, looked up by name."""

    names: Sequence[str]
    order: npt.NDArray[np.int64] | None
    """The permutation that sorts them; None: they were sorted."""
    count: int
    """Number of them in the layout."""
    spans: Sequence[Sequence[Any]]
    runs: Runs
    unknown: Sequence[str]
    """Names that the layout does not have."""
    left: Promises | None = None
    """The promises that the last report has left, if they are known. Of few ranges they are not kept."""

    @property
    def size_bytes(self) -> int:
        """Approximate size, for the cache.

        >>> RangeLookup(["a", "b"], None, 2, [], (0, 2), []).size_bytes
        240
        >>> from service.frontier.ranges import ShardLayout
        >>> kept = RangeNames(ShardLayout.of(("a", "b")), np.array([0, 1]))
        >>> RangeLookup(kept, None, 2, [], (0, 2), []).size_bytes
        64
        """
        each = _NUMBERED_BYTES if isinstance(self.names, RangeNames) else _NAMED_BYTES
        return each * len(self.names)


@dataclass(frozen=True, slots=True)
class ResolvedReport:
    """A report whose ranges have been looked up."""

    stage: str
    report: Report
    lookup: RangeLookup
    said: Promises
    """The promises that it reports."""


def resolve(job_layout: JobLayout, stage: str, report: Report) -> ResolvedReport:
    """Look up the ranges of a report.

    A worker mostly reports for the same ranges in the same order, and to compare the names with those of
    its last report is cheaper than to look them up again.
    """
    names = report.ranges
    if names is None:
        raise AssertionError("a packed report is resolved by `resolve_all`")
    # The token of a claim is new, so its lookup would not be found again.
    if len(names) < _BULK or report.claim is not None:
        return _resolved(stage, report, _look_up(job_layout, stage, names))
    key = _key(job_layout, stage, report.token, "named")
    last: RangeLookup | None = job_layout.lookups.get(key)
    if last is None or last.names != names:
        last = _look_up(job_layout, stage, names)
        job_layout.lookups[key] = last
    return _resolved(stage, report, last)


def resolve_all(stage: str, report: Report, lookup: RangeLookup) -> ResolvedReport:
    """Give a packed report the ranges of its lease. Raises `InvalidReportError`."""
    return _resolved(stage, refusals.spoken_for_all(report, lookup.count), lookup)


def _resolved(stage: str, report: Report, lookup: RangeLookup) -> ResolvedReport:
    promises = np.asarray(column(report), dtype=np.int64)
    in_order = promises if lookup.order is None else promises[lookup.order]
    return ResolvedReport(stage, report, lookup, Promises.of(schema.as_column(in_order)))


def _key(job_layout: JobLayout, stage: str, token: str, what: str) -> tuple[str, ...]:
    return job_layout.job, job_layout.id, stage, token, what


def members_lookup(job_layout: JobLayout, stage: str, token: str, runs: Runs) -> RangeLookup:
    """Keep which ranges a lease was granted, for its next packed report."""
    indices = indices_of(runs)
    names = job_layout.names(stage, runs)
    lookup = RangeLookup(names, None, len(indices), spans_of(indices), runs, ())
    job_layout.lookups[_key(job_layout, stage, token, "members")] = lookup
    return lookup


def known_members(job_layout: JobLayout, stage: str, token: str) -> RangeLookup | None:
    """Return which ranges a lease was granted, if that is kept. They do not change within a layout."""
    return job_layout.lookups.get(_key(job_layout, stage, token, "members"))


def _look_up(job_layout: JobLayout, stage: str, names: Sequence[str]) -> RangeLookup:
    index = job_layout.index(stage)
    places = [index.get(name, -1) for name in names]
    at = np.array(places, dtype=np.int64)
    if len(at) == 1 and places[0] >= 0:
        return RangeLookup(names, None, 1, spans_of(at), (places[0], 1), ())
    unknown = [name for name, i in zip(names, places, strict=True) if i < 0]
    order: npt.NDArray[np.int64] | None = None
    if unknown or bool((np.diff(at) <= 0).any()):
        order = np.argsort(at, kind="stable")
        order = order[at[order] >= 0]
        at = at[order]
    spans = spans_of(at) if len(at) else []
    return RangeLookup(names, order, len(at), spans, runs_of(at), unknown)


def _must_join(job_layout: JobLayout, resolved: ResolvedReport) -> bool:
    """Return whether a report claims shards that have to join its dynamic source first."""
    policy = job_layout.pipeline.stages[resolved.stage].policy
    claims = resolved.report.claim is not None
    return claims and policy.is_dynamic and bool(resolved.lookup.unknown)


def report_args(job_layout: JobLayout, stage: int, resolved: ResolvedReport) -> list[Any]:
    """Return a report as `report.lua` reads it."""
    report, order, spans = resolved.report, resolved.lookup.order, resolved.lookup.spans
    holds = report.hold_columns
    return [
        stage,
        report.token,
        False if report.epoch is None else schema.epoch_text(report.epoch),
        False if report.observed_input is None else float(report.observed_input),
        report.capped_at_commit,
        spans,
        blob(resolved.said.packed),
        False if report.idle is None else _picked(report.idle, order),
        False if report.notes is None else [_note(note) for note in _picked(report.notes, order)],
        False if report.facts is None else [_facts(each) for each in _picked(report.facts, order)],
        False if holds is None else schema.pack_holds(holds, report.promises),
        _joined(resolved) or False,
        False if report.claim is None else claim_args(report.claim, resolved.lookup.runs),
        report.releases,
        _must_join(job_layout, resolved),
    ]


def _joined(resolved: ResolvedReport) -> list[Any] | None:
    """Join a report here, if the promises that are there are known; None: the script has to do it."""
    report = resolved.report
    left = resolved.lookup.left
    if left is None or report.epoch is not None:
        return None
    if report.idle is not None and any(report.idle):
        return None
    return join(left, resolved.said, resolved.lookup.runs)


def note_left(resolved: ResolvedReport, reported: Reported) -> None:
    """Keep what a report has left, if it is known, for the next one of the same ranges."""
    if resolved.lookup.count >= _BULK:
        resolved.lookup.left = left_by(resolved.report, reported, resolved.said)


def _picked(values: Sequence[T], order: npt.NDArray[np.int64] | None) -> list[T]:
    return list(values) if order is None else [values[i] for i in order.tolist()]


def _note(note: RangeNote | None) -> msgspec.Raw | bool:
    return blob(msgspec.json.encode(note)) if note else False


def _facts(facts: ReportedFacts | None) -> msgspec.Raw | bool:
    return schema.pack_reported_facts(facts) if facts else False


def read_result(
    job_layout: JobLayout, resolved: ResolvedReport, result: Sequence[Any], *, ahead: bool
) -> Reported | Exception:
    """Read the result of a report. `ahead`: the agreement of its stage is ahead of what is published."""
    match result:
        case ["ok", accepted, behind, rejected, ttl_ms, view, counts, granted, ends, returned]:
            return Reported(
                accepted=int(accepted),
                behind=[job_layout.name(resolved.stage, index) for index in behind or ()],
                rejected=_rejected(job_layout, resolved, rejected or ()),
                expires_in_ms=int(ttl_ms),
                view=schema.read_view(view),
                advances=ahead and bool(counts),
                ranges=resolved.lookup.names,
                grant=_grant(job_layout, resolved, granted),
                ends_retirement=bool(ends),
                returned=bool(returned),
            )
        case _:
            return _refusal(job_layout, resolved, result)


def _grant(job_layout: JobLayout, resolved: ResolvedReport, granted: Sequence[Any]) -> Grant | None:
    claim, token = resolved.report.claim, resolved.report.token
    if claim is None:
        return None
    unknown = resolved.lookup.unknown
    return read_grant(job_layout, resolved.stage, claim, token, unknown, granted)


def _refusal(job_layout: JobLayout, resolved: ResolvedReport, result: Sequence[Any]) -> Exception:
    stage, report = resolved.stage, resolved.report
    refusal: Exception
    match result:
        case ["joining"]:
            refusal = UnknownShardsError(resolved.lookup.unknown)
        case ["conflict", denied]:
            unknown = resolved.lookup.unknown
            refusal = refusals.none_granted(stage, *read_denied(job_layout, stage, unknown, denied))
        case ["none", rejected]:
            refusal = refusals.none_covered(stage, _rejected(job_layout, resolved, rejected or ()))
        case ["lease-lost", "unknown"]:
            refusal = refusals.unknown_lease(stage)
        case ["lease-lost", reason]:
            refusal = refusals.lost_lease(reason)
        case ["stale-run", ours, theirs]:
            refusal = refusals.stale_run(stage, int(ours), int(theirs))
        case ["stale-epoch", last]:
            refusal = refusals.stale_epoch(stage, report.epoch or 0, int(last))
        case ["input-ahead", view]:
            published = schema.read_view(view).watermark.input
            refusal = refusals.input_ahead(stage, report.observed_input or 0, published)
        case ["epochs-waiting", count]:
            refusal = refusals.epochs_waiting(stage, int(count))
        case _:
            raise AssertionError(result)
    return refusal


def _rejected(
    job_layout: JobLayout, resolved: ResolvedReport, rejected: Iterable[Sequence[Any]]
) -> list[tuple[str, LostReason]]:
    """Return the rejected ranges in the order of the report."""
    if resolved.report.claim is not None:
        # Claimed ranges that were not granted are denied, and not rejected as well.
        return []
    reasons: dict[str, LostReason] = dict.fromkeys(resolved.lookup.unknown, "unknown")
    for index, reason in rejected:
        reasons[job_layout.name(resolved.stage, index)] = reason
    if not reasons:
        return []
    return [(name, reasons[name]) for name in resolved.lookup.names if name in reasons]

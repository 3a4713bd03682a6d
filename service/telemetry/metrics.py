"""Metrics for Prometheus: counters, and the watermarks at the time of the scrape."""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Mapping
from platform import python_version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import generate_latest

from service import __version__
from service.model.leases import Grant
from service.model.reports import Report, Reported
from service.telemetry.durations import Durations
from service.telemetry.stage_metrics import ByStage, Survey, stage_metrics

_STAGES_COUNTED = 100_000
"""For so many stages this process keeps counts. Beyond, as after many jobs were deleted that nobody has
scraped, it starts over: to Prometheus, a counter that starts over is nothing special.
"""

# They would add a second series for each counter, which nobody needs.
disable_created_metrics()


class Metrics:
    """The counters of one service process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tidegauge_requests",
            "Requests answered, by route and status",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.answered: Tally[tuple[str, str, int]] = Tally()
        """Requests answered since the last scrape, by method, route and status."""
        self.durations = Durations()
        self.refused_requests = Counter(
            "tidegauge_refused_requests",
            "Requests and connections that were refused or ended at a limit, by reason",
            ["reason"],
            registry=self.registry,
        )
        self.reports = Counter(
            "tidegauge_reports",
            "Reports by result: accepted, waiting (for their epoch), or the slug of the problem with"
            " which they were refused",
            ["result"],
            registry=self.registry,
        )
        self.reported_ranges = Counter(
            "tidegauge_reported_ranges",
            "Ranges in reports: accepted, of those behind their earlier promise, and rejected",
            ["result"],
            registry=self.registry,
        )
        self.leases_granted = Counter(
            "tidegauge_leases_granted", "Leases granted", registry=self.registry
        )
        self.denied_ranges = Counter(
            "tidegauge_denied_ranges", "Ranges denied to claims", registry=self.registry
        )
        self.leases_expired = Counter(
            "tidegauge_leases_expired", "Leases that ran out", registry=self.registry
        )
        self.advances = Counter(
            "tidegauge_advances", "Watermarks of stages that were published", registry=self.registry
        )
        self.publish_seconds = Histogram(
            "tidegauge_publish_seconds",
            "Time from the first report of a round until its advances are durable and visible",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
            registry=self.registry,
        )
        self.publish_failures = Counter(
            "tidegauge_publish_failures",
            "Rounds of publishing that failed; they are retried",
            registry=self.registry,
        )

        self.incarnations = Counter(
            "tidegauge_incarnations",
            "Times that a job's live state was lost, and started afresh from the ledger",
            registry=self.registry,
        )

        Info("tidegauge_build", "Versions of this process", registry=self.registry).info(
            {"version": __version__, "python": python_version()}
        )
        self._arrivals: ByStage = Tally()
        self._expired: ByStage = Tally()
        ProcessCollector(registry=self.registry)

        # Looked up once: to find a labelled counter takes a lock and a hash of strings.
        self._accepted = self.reports.labels("accepted")
        self._waiting = self.reports.labels("waiting")
        # Added to the counters when those are read: each addition to one costs a microsecond, and a
        # report for one range costs eighty.
        self._new_accepted = 0
        self._new_ranges = 0
        self._ranges_accepted = self.reported_ranges.labels("accepted")
        self._ranges_behind = self.reported_ranges.labels("behind")
        self._ranges_rejected = self.reported_ranges.labels("rejected")

    def count_grant(self, grant: Grant) -> None:
        """Count a lease that was granted, and the ranges that were denied to its claim."""
        self.leases_granted.inc()
        if grant.denied_total:
            self.denied_ranges.inc(grant.denied_total)

    def count_report(
        self, job: str, stage: str, report: Report, reported: Reported, *, waiting: bool
    ) -> None:
        """Count a report that was accepted, and its ranges."""
        self._new_ranges += reported.accepted
        if waiting:
            self._waiting.inc()
        else:
            self._new_accepted += 1
        if reported.behind:
            self._ranges_behind.inc(len(reported.behind))
        if reported.rejected:
            self._ranges_rejected.inc(len(reported.rejected))
        if not _is_quiet(report):
            _count(self._arrivals, (job, stage), 1)

    def count_expired(self, job: str, stages: Mapping[str, int]) -> None:
        """Count leases that have run out, by stage."""
        self.leases_expired.inc(sum(stages.values()))
        for stage, count in stages.items():
            _count(self._expired, (job, stage), count)

    def count_refused_report(self, slug: str) -> None:
        """Count a report that was refused."""
        self.reports.labels(slug).inc()

    async def render(self, survey: Survey | None, now_ms: int) -> bytes:
        """Return all metrics in Prometheus's text format; without a survey, those of the process.

        The text of thousands of stages takes a fraction of a second, in which others are served: it is
        written in a thread, from copies of what this one counts on.
        """
        for (method, path, status), count in self.answered.items():
            self.requests.labels(method, path, str(status)).inc(count)
        self.answered.clear()
        self._accepted.inc(self._new_accepted)
        self._ranges_accepted.inc(self._new_ranges)
        self._new_accepted = self._new_ranges = 0
        registries = [self.registry, CollectorRegistry()]
        registries[1].register(self.durations.copy())
        texts = [await asyncio.to_thread(generate_latest, each) for each in registries]
        if survey is not None:
            counts = self._counts_by_stage(survey)
            texts.append(await asyncio.to_thread(stage_metrics, survey, now_ms, *counts))
        return b"".join(texts)

    def _counts_by_stage(self, survey: Survey) -> tuple[ByStage, ByStage]:
        """Return copies of what this process has counted by stage, without the stages that are gone."""
        if not survey.left_out:
            # All stages are in the survey: what else was counted is of stages that are gone.
            there = {(each.job, each.stage) for each in survey.stages}
            for counts in (self._arrivals, self._expired):
                for gone in counts.keys() - there:
                    del counts[gone]
        return self._arrivals.copy(), self._expired.copy()


def _count(counts: ByStage, stage: tuple[str, str], count: int) -> None:
    if len(counts) >= _STAGES_COUNTED and stage not in counts:
        counts.clear()
    counts[stage] += count


def _is_quiet(report: Report) -> bool:
    """Return whether nothing came in any of its ranges, and nothing is left to read."""
    facts = report.facts
    return bool(facts) and all(each is not None and each.is_quiet for each in facts)

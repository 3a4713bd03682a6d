"""Metrics for Prometheus: counters, and the watermarks at the time of the scrape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from service.frontier.timestamps import MAX, MIN
from service.model.jobs import JobView
from service.model.reports import Reported

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

        # Looked up once: to find a labelled counter takes a lock and a hash of strings.
        self._accepted = self.reports.labels("accepted")
        self._waiting = self.reports.labels("waiting")
        self._ranges_accepted = self.reported_ranges.labels("accepted")
        self._ranges_behind = self.reported_ranges.labels("behind")
        self._ranges_rejected = self.reported_ranges.labels("rejected")

    def count_report(self, reported: Reported, *, waiting: bool) -> None:
        """Count a report that was accepted, and its ranges."""
        (self._waiting if waiting else self._accepted).inc()
        self._ranges_accepted.inc(reported.accepted)
        if reported.behind:
            self._ranges_behind.inc(len(reported.behind))
        if reported.rejected:
            self._ranges_rejected.inc(len(reported.rejected))

    def count_refused_report(self, slug: str) -> None:
        """Count a report that was refused."""
        self.reports.labels(slug).inc()

    def render(self, jobs: Sequence[JobView], now_ms: int) -> bytes:
        """Return all metrics in Prometheus's text format."""
        registry = CollectorRegistry()
        registry.register(_Watermarks(jobs, now_ms))
        return generate_latest(self.registry) + generate_latest(registry)


class _Watermarks:
    def __init__(self, jobs: Sequence[JobView], now_ms: int) -> None:
        self._jobs = jobs
        self._now_ms = now_ms

    def collect(self) -> Iterator[Metric]:
        names = ["job", "stage"]
        watermark = GaugeMetricFamily(
            "tidegauge_watermark_seconds",
            "Watermark of a stage in seconds since the epoch; absent while there is none, +Inf at the"
            " end of time",
            labels=[*names, "kind"],
        )
        lag = GaugeMetricFamily(
            "tidegauge_lag_seconds",
            "How far a stage's output watermark is behind the wall clock; 0 at the end of time",
            labels=names,
        )
        version = GaugeMetricFamily(
            "tidegauge_watermark_version",
            "Version of a stage's watermark: a flat line is a watermark that stands still",
            labels=names,
        )
        status = GaugeMetricFamily(
            "tidegauge_stage_status", "1 for the status that a stage has", labels=[*names, "status"]
        )
        for job in self._jobs:
            for name, view in job.stages.items():
                for side, value in (
                    ("input", view.watermark.input),
                    ("output", view.watermark.output),
                ):
                    if value != MIN:
                        watermark.add_metric([job.name, name, side], _seconds(value))
                output = view.watermark.output
                if output != MIN:
                    behind = 0 if output == MAX else self._now_ms - output
                    lag.add_metric([job.name, name], behind / 1_000)
                version.add_metric([job.name, name], view.version)
                status.add_metric([job.name, name, view.watermark.status.value], 1)
        yield from (watermark, lag, version, status)


def _seconds(value: int) -> float:
    return float("inf") if value == MAX else value / 1_000

"""The alerts, as code: writes `alerts.yml` for Prometheus.

    python deploy/prometheus/alerts.py > deploy/prometheus/alerts.yml
    python deploy/prometheus/alerts.py --jobs 'scores-.*' --lag 3600 > /etc/prometheus/tidegauge.yml

The file beside this one is what it writes without options. Replicas show the same stages, so everything
of a stage is the maximum over them, and what each process counts by itself is the sum.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

RUNBOOK: Final = "docs/runbook.md"
"""The runbook, within the project."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds of the alerts, in seconds."""

    jobs: str = ".+"
    """A regular expression for the jobs that are watched. A job that runs at night is late all day."""
    window_s: int = 600
    """Window that counts as now: nothing has moved throughout, or something has happened within."""
    lag_s: int = 900
    system_lag_s: int = 1_800
    scrape_job: str = "tidegauge"
    """The `job_name` under which Prometheus scrapes the replicas."""
    soon_s: int = 60
    """Shortest duration that is not a hiccup, where each minute counts."""
    while_s: int = 300
    """Likewise, where workers may be about to come back."""
    long_s: int = 900
    """Likewise, where a pipeline may be about to start."""
    runbook: str = ""
    """The address at which your people can open the runbook. Without one, alerts have only its path: a
    link must lead somewhere.
    """


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. `section` is its heading in the runbook, as an anchor."""

    name: str
    expression: str
    for_s: int
    severity: str
    section: str
    summary: str
    description: str

    def rule(self, runbook: str) -> dict[str, Any]:
        """Return it as Prometheus reads it. `runbook`: an address, or empty."""
        link = {"runbook_url": f"{runbook}#{self.section}"} if runbook else {}
        return {
            "alert": self.name,
            "expr": LiteralScalarString(self.expression),
            "for": f"{self.for_s}s",
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook": f"{RUNBOOK}#{self.section}",
                **link,
            },
        }


def alerts(at: Thresholds) -> Iterator[Alert]:
    """Return every alert."""
    yield from _of_watermarks(at)
    yield from _of_workers(at)
    yield from _of_the_service(at)


def _of_watermarks(at: Thresholds) -> Iterator[Alert]:
    window = f"[{at.window_s}s]"
    output = _series(at, "tidegauge_watermark_timestamp_seconds", kind="output")
    inputs = _series(at, "tidegauge_watermark_timestamp_seconds", kind="input")
    arrivals = _series(at, "tidegauge_stage_arrivals_total")
    lag = _series(at, "tidegauge_lag_seconds")
    system_lag = _series(at, "tidegauge_system_lag_seconds")
    idle = _highest(_series(at, "tidegauge_stage_status", status="idle"))
    yield Alert(
        "TidegaugeWatermarkStandsStill",
        # A source has no input watermark: there, what arrives is reported.
        f"{_highest(f'changes({output}{window})')} == 0\n"
        "and on (job, stage) (\n"
        f"  {_highest(f'changes({inputs}{window})')} > 0\n"
        f"  or ({_summed(f'increase({arrivals}{window})')} > 0"
        f" unless on (job, stage) {_highest(inputs)})\n"
        ")\n"
        f"unless on (job, stage) {_highest(output)} == +Inf\n"
        f"unless on (job, stage) {idle} == 1\n",
        at.while_s,
        "warning",
        "watermark-stands-still",
        "{{ $labels.stage }} of {{ $labels.job }} stands still while input arrives",
        "Its output watermark has not moved for"
        f" {_words(at.window_s)}, although its input has. Ask why: tidegauge explain"
        " {{ $labels.job }} {{ $labels.stage }}",
    )
    yield Alert(
        "TidegaugeLagRises",
        f"{_highest(lag)} > {at.lag_s}\n"
        f"and on (job, stage) {_highest(f'deriv({lag}{window})')} > 0.05\n"
        f"unless on (job, stage) {idle} == 1\n",
        at.while_s,
        "warning",
        "lag-rises",
        "{{ $labels.stage }} of {{ $labels.job }} is {{ humanizeDuration $value }} behind, and falls"
        " back",
        f"Its output watermark is more than {_words(at.lag_s)} behind the clock, and the gap grows."
        " Ask why: tidegauge explain {{ $labels.job }} {{ $labels.stage }}",
    )
    yield Alert(
        "TidegaugeSystemLag",
        f"{_highest(system_lag)} > {at.system_lag_s}\n"
        f"unless on (job, stage) {_highest(output)} == +Inf\n"
        f"unless on (job, stage) {idle} == 1\n",
        at.while_s,
        "warning",
        "system-lag",
        "Work of {{ $labels.stage }} of {{ $labels.job }} has been waiting for"
        " {{ humanizeDuration $value }}",
        "The oldest work of the stage, or of one above it, is not finished, or its worker says nothing"
        " any more. See who: tidegauge ranges {{ $labels.job }} {{ $labels.stage }}",
    )


def _of_workers(at: Thresholds) -> Iterator[Alert]:
    window = f"[{at.window_s}s]"

    leased = _highest(_series(at, "tidegauge_leased_ranges"))
    # An operator may retire a range before the start.
    others = f'job=~{json.dumps(at.jobs)}, condition!~"never_reported|retired"'
    reported = f"max by (job, stage, condition) (tidegauge_ranges{{{others}}})"

    def ranges(condition: str) -> str:
        return _highest(_series(at, "tidegauge_ranges", condition=condition))

    def health(kind: str) -> str:
        return _highest(_series(at, "tidegauge_stage_health", health=kind))

    late = _series(at, "tidegauge_stage_late_total")
    agents_late = _series(at, "tidegauge_agent_events_total", kind="late_rows")
    yield Alert(
        "TidegaugeRangeNeverReported",
        # Only while somebody works on the job: before its start nobody has reported.
        f"{ranges('never_reported')} > 0\nand on (job) sum by (job) ({leased}) > 0\n",
        at.long_s,
        "warning",
        "range-never-reported",
        "{{ $value }} ranges of {{ $labels.stage }} of {{ $labels.job }} have never reported",
        "The stage has no watermark until each of its ranges has reported. See which:"
        " tidegauge explain {{ $labels.job }} {{ $labels.stage }}",
    )
    yield Alert(
        "TidegaugeNeverStarted",
        f"sum by (job) ({ranges('never_reported')}) > 0\n"
        f"unless on (job) sum by (job) ({reported}) > 0\n"
        f"unless on (job) sum by (job) ({leased}) > 0\n",
        at.long_s,
        "warning",
        "never-started",
        "{{ $labels.job }} has never started",
        "It was declared with {{ $value }} ranges. None has ever reported, and none is held by a lease."
        " Its stages have no watermark. See: tidegauge show {{ $labels.job }}",
    )
    yield Alert(
        "TidegaugeRunFailed",
        f"{health('failed')} == 1\n",
        at.soon_s,
        "critical",
        "run-failed",
        "The last run of {{ $labels.stage }} of {{ $labels.job }} has failed",
        "Its program said so, and no other has begun: the watermark stands until one does. Ask why:"
        " tidegauge explain {{ $labels.job }} {{ $labels.stage }}",
    )
    yield Alert(
        "TidegaugeNoWorker",
        f"{health('no_worker')} == 1\n"
        # One range that never reported must not hide that the others have lost their workers.
        f"or on (job, stage) ({health('silent')} == 1 and on (job, stage)"
        f" {ranges('unleased')} > 0)\n",
        at.while_s,
        "critical",
        "no-worker",
        "Ranges of {{ $labels.stage }} of {{ $labels.job }} have no worker",
        "Their leases have run out and nobody has taken over, or the last run was stopped. They keep"
        " their promises, and so hold the watermark. See which: tidegauge explain {{ $labels.job }}"
        " {{ $labels.stage }}",
    )
    yield Alert(
        "TidegaugeStalled",
        f"{health('stalled')} == 1\n",
        at.while_s,
        "warning",
        "stalled",
        "{{ $labels.stage }} of {{ $labels.job }} is stalled",
        "Its workers keep reporting, a promise stands still, and its oldest work ages. See which:"
        " tidegauge explain {{ $labels.job }} {{ $labels.stage }}",
    )
    yield Alert(
        "TidegaugeLateRows",
        f"{_highest(f'increase({late}{window})')} > 0\n"
        f"or {_summed(f'increase({agents_late}{window})')} > 0\n",
        0,
        "warning",
        "late-rows",
        "About {{ $value | humanize }} rows of {{ $labels.stage }} of {{ $labels.job }} came late",
        "They are older than what had been promised for their source. Windows that had closed lack"
        " them.",
    )


def _of_the_service(at: Thresholds) -> Iterator[Alert]:
    window = f"[{at.window_s}s]"
    yield Alert(
        "TidegaugeLiveStoreLost",
        f"sum by (job) (increase(tidegauge_incarnations_total{window})) > 0\n",
        0,
        "warning",
        "live-store-lost",
        "The live state of about {{ $value | humanize }} jobs was lost, and restored from the ledger",
        "All leases are void; workers claim again, and report again what they had promised since the"
        " last checkpoint. Once is a restart of the store; more is a store that forgets.",
    )
    yield Alert(
        "TidegaugePublishingFails",
        # It must last for longer than one failed round, or a burst of them, is seen in the increase.
        f"sum by (job) (increase(tidegauge_publish_failures_total[{2 * at.soon_s}s])) > 0\n",
        3 * at.soon_s,
        "critical",
        "publishing-fails",
        "Watermarks cannot be recorded",
        f"Rounds of publishing have failed again and again for {_words(3 * at.soon_s)}, and are retried."
        " Until one succeeds, no watermark advances.",
    )
    yield Alert(
        "TidegaugeReplicaDown",
        # Targets that Prometheus scrapes under this name; the next alert is for a target without answer.
        f"up{{job={json.dumps(at.scrape_job)}}} == 0\nand on () tidegauge_publish_failures_total\n",
        at.soon_s,
        "warning",
        "replica-down",
        "The replica {{ $labels.instance }} does not answer Prometheus",
        "It is down, or may not be scraped with this key. The other replicas serve its clients: that"
        " costs nothing but what is in reserve.",
    )
    yield Alert(
        "TidegaugeDown",
        "absent(tidegauge_publish_failures_total)\n",
        at.soon_s,
        "critical",
        "down",
        "No tidegauge answers Prometheus",
        "There are no metrics of any replica: all are down, or may not be scraped with this key.",
    )
    yield Alert(
        "TidegaugeStagesLeftOut",
        'max by (instance) (tidegauge_left_out_stages{metrics="all"}) > 0\n',
        at.while_s,
        "warning",
        "stages-left-out",
        "{{ $value }} stages have no metrics, and so no alerts",
        "There are more stages than TIDEGAUGE_METRICS_STAGES.",
    )
    yield Alert(
        "TidegaugeLabelsRenamed",
        # Else all stages of a name would be one to the alerts above, whatever their job.
        'count(tidegauge_watermark_version{exported_job!=""}) > 0\n',
        at.soon_s,
        "warning",
        "labels-renamed",
        "Prometheus has renamed the label job of tidegauge's metrics",
        "No other alert tells jobs apart like this. Set honor_labels: true in the scrape configuration.",
    )


def _series(at: Thresholds, name: str, **labels: str) -> str:
    # As JSON: PromQL's strings escape as Go's do.
    chosen = [f"job=~{json.dumps(at.jobs)}", *(f'{key}="{value}"' for key, value in labels.items())]
    return f"{name}{{{', '.join(chosen)}}}"


def _highest(expression: str) -> str:
    return f"max by (job, stage) ({expression})"


def _summed(expression: str) -> str:
    return f"sum by (job, stage) ({expression})"


def _words(seconds: int) -> str:
    """Write a duration.

    >>> _words(90), _words(600)
    ('90 s', '10 min')
    """
    return f"{seconds} s" if seconds % 60 else f"{seconds // 60} min"


def rules(at: Thresholds, *, operator: bool = False) -> str:
    """Return the file with all alerts; with `operator` as the Prometheus operator has them."""
    group = {"name": "tidegauge", "rules": [alert.rule(at.runbook) for alert in alerts(at)]}
    yaml: Any = YAML()
    yaml.width = 1_000
    text = StringIO()
    text.write("# Written by deploy/prometheus/alerts.py: change it there.\n")
    content: dict[str, Any] = {"groups": [group]}
    if operator:
        content = {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "tidegauge"},
            "spec": content,
        }
    yaml.dump(content, text)
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file, with other thresholds if they are given."""
    parser = argparse.ArgumentParser(description="Write the alerts for Prometheus.")
    for name, default in asdict(Thresholds()).items():
        option = "--" + name.removesuffix("_s").replace("_", "-")
        unit = ", in seconds" if name.endswith("_s") else ""
        parser.add_argument(
            option,
            dest=name,
            type=int if isinstance(default, int) else str,
            default=default,
            help=f"{default}{unit}" if default else "address of the runbook; none by default",
        )
    parser.add_argument(
        "--operator", action="store_true", help="as a PrometheusRule of the Prometheus operator"
    )
    given = vars(parser.parse_args(arguments))
    operator = given.pop("operator")
    if given["runbook"] and not given["runbook"].startswith(("https://", "http://")):
        parser.error(f"--runbook is {given['runbook']!r}: it must be an address, as https://…")
    sys.stdout.write(rules(Thresholds(**given), operator=operator))


if __name__ == "__main__":
    main()

"""The dashboards, as code: writes `dashboards/*.json` for Grafana.

    python deploy/grafana/dashboards.py

Replicas show the same stages, so everything of a stage is the maximum over them, and what each process
counts by itself is the sum.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models import prometheus as prometheus_models

FOLDER: Final = Path(__file__).parent / "dashboards"
TAG: Final = "tidegauge"
_SOURCE: Final = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
_SMALL, _HALF, _WHOLE = 3, 12, 24
"""Widths, of 24."""

SECONDS, MOMENT, PER_SECOND, COUNT, BYTES = "s", "dateTimeAsIso", "cps", "short", "bytes"
"""Units, by Grafana's names."""

_DASHED: Final = common_builders.GraphThresholdsStyleConfig().mode(
    common.GraphTresholdsStyleMode.DASHED
)


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel: what it shows, as queries with their legends."""

    title: str
    about: str
    unit: str
    queries: Sequence[tuple[str, str]]
    kind: Literal["lines", "number", "table"] = "lines"
    width: int = _HALF
    to_job: bool = False
    """True if a series links to the dashboard of its job."""
    to_stage: bool = False
    limit: float | None = None
    """From this value on, the panel shows a fault. None: each value is as good as another."""
    none: str = ""
    """Text in place of data, where the lack of data is good news."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard: its panels, and the variables that their queries use."""

    name: str
    title: str
    about: str
    panels: Sequence[Panel]
    variables: Sequence[tuple[str, str]] = ()
    """Names, each with the query for its values."""

    @property
    def uid(self) -> str:
        """Last part of its address."""
        return f"{TAG}-{self.name}"


def _at(kind: str, labels: str) -> str:
    """Return a watermark as Grafana's moments are, in ms. The end of time is no moment."""
    series = f'tidegauge_watermark_timestamp_seconds{{{labels}, kind="{kind}"}}'
    return f"1000 * (max by (stage) ({series}) < +Inf)"


def _rate(metric: str, by: str, labels: str = "") -> str:
    chosen = f"{{{labels}}}" if labels else ""
    return f"sum by ({by}) (rate({metric}{chosen}[$__rate_interval]))"


def _shared_rate(metric: str, labels: str, by: str = "stage") -> str:
    """Return the rate of a count that is in the live store, and so is the same on each replica."""
    return f"sum by ({by}) (max by (job, stage) (rate({metric}{{{labels}}}[$__rate_interval])))"


_LAG: Final = "tidegauge_lag_seconds"
_SYSTEM_LAG: Final = "tidegauge_system_lag_seconds"
_RANGES: Final = "tidegauge_ranges"
LAG_S, SYSTEM_LAG_S = 900, 1_800
"""Limits: the thresholds of the alerts."""
_ROOT_CAUSES: Final = "unpublished|failed|no_worker|silent|stalled"
_TROUBLED: Final = (
    f'max by (job, stage, health) (tidegauge_stage_health{{health=~"{_ROOT_CAUSES}"}}) == 1'
)
_UNKNOWN: Final = 'max by (job, stage) (tidegauge_stage_status{status="unknown"})'
_RANGES_IN: Final = f'sum(max by (job, stage) ({_RANGES}{{{{condition="{{}}"}}}}))'

OVERVIEW: Final = Dashboard(
    "overview",
    "tidegauge: overview",
    "All jobs: which are behind, and what is odd.",
    (
        Panel(
            "Jobs",
            "Jobs with metrics.",
            COUNT,
            [("count(count by (job) (tidegauge_watermark_version))", "jobs")],
            "number",
            _SMALL,
        ),
        Panel(
            "Stages",
            "Stages with metrics.",
            COUNT,
            [("count(count by (job, stage) (tidegauge_watermark_version))", "stages")],
            "number",
            _SMALL,
        ),
        Panel(
            "Furthest behind",
            "The largest lag of all stages.",
            SECONDS,
            [(f"max({_LAG})", "lag")],
            "number",
            _SMALL,
            limit=LAG_S,
        ),
        Panel(
            "Never reported",
            "Ranges that have never reported: their stages have no watermark.",
            COUNT,
            [(_RANGES_IN.format("never_reported"), "ranges")],
            "number",
            _SMALL,
            limit=1,
        ),
        Panel(
            "Without a worker",
            "Ranges that have reported, and are not held by a lease.",
            COUNT,
            [(_RANGES_IN.format("unleased"), "ranges")],
            "number",
            _SMALL,
            limit=1,
        ),
        Panel(
            "Without a watermark",
            "Stages that have no output watermark, and so no lag.",
            COUNT,
            [(f"count({_UNKNOWN}) or vector(0)", "stages")],
            "number",
            _SMALL,
            limit=1,
        ),
        Panel(
            "Problems",
            "Stages that hold themselves back.",
            COUNT,
            [(f"count({_TROUBLED}) or vector(0)", "stages")],
            "number",
            _SMALL,
            limit=1,
        ),
        Panel(
            "Alerts",
            "Alerts of tidegauge that are firing.",
            COUNT,
            [
                (
                    'count(ALERTS{alertname=~"Tidegauge.+", alertstate="firing"}) or vector(0)',
                    "alerts",
                )
            ],
            "number",
            _SMALL,
            limit=1,
        ),
        Panel(
            "Problems by stage",
            "Stages that hold themselves back, with the cause. Click for the job.",
            COUNT,
            [(_TROUBLED, "{{job}} {{stage}} {{health}}")],
            "table",
            to_job=True,
            none="No problems",
        ),
        Panel(
            "Stages without a watermark",
            "They have no lag, and so are not in the panels below. Click for the job.",
            COUNT,
            [(f"{_UNKNOWN} == 1", "{{job}} {{stage}}")],
            "table",
            to_job=True,
            none="Each stage has a watermark",
        ),
        Panel(
            "Slowest stage of each job",
            "The stage with the largest lag. Click for its job.",
            SECONDS,
            [(f"topk by (job) (1, max by (job, stage) ({_LAG}))", "{{job}} {{stage}}")],
            "table",
            _WHOLE,
            to_job=True,
            limit=LAG_S,
        ),
        Panel(
            "Lag by job",
            "How far the slowest stage is behind the clock; the twenty largest.",
            SECONDS,
            [(f"topk(20, max by (job) ({_LAG}))", "{{job}}")],
            to_job=True,
            limit=LAG_S,
        ),
        Panel(
            "System lag by job",
            "For how long the oldest work has been waiting; the twenty largest.",
            SECONDS,
            [(f"topk(20, max by (job) ({_SYSTEM_LAG}))", "{{job}}")],
            to_job=True,
            limit=SYSTEM_LAG_S,
        ),
        Panel(
            "Late rows by job",
            "Rows that came late, as reported.",
            PER_SECOND,
            [(_shared_rate("tidegauge_stage_late_total", 'job=~".+"', "job"), "{{job}}")],
            to_job=True,
        ),
        Panel(
            "Arrivals by job",
            "Reports that did not say that nothing came.",
            PER_SECOND,
            [(_rate("tidegauge_stage_arrivals_total", "job"), "{{job}}")],
            to_job=True,
        ),
    ),
)

_JOB: Final = 'job="$job"'
JOB: Final = Dashboard(
    "job",
    "tidegauge: job",
    "One job: where each of its stages is, and which holds the others back.",
    (
        Panel(
            "Output watermarks",
            "Where each stage is in event time. Not shown at the end of time.",
            MOMENT,
            [(_at("output", _JOB), "{{stage}}")],
            width=_WHOLE,
            to_stage=True,
        ),
        Panel(
            "Lag",
            "How far each output watermark is behind the clock.",
            SECONDS,
            [(f"max by (stage) ({_LAG}{{{_JOB}}})", "{{stage}}")],
            to_stage=True,
            limit=LAG_S,
        ),
        Panel(
            "System lag",
            "For how long the oldest work of a stage, or above it, has been waiting.",
            SECONDS,
            [(f"max by (stage) ({_SYSTEM_LAG}{{{_JOB}}})", "{{stage}}")],
            to_stage=True,
            limit=SYSTEM_LAG_S,
        ),
        Panel(
            "Lag of each stage itself",
            "How far its output watermark is behind its input watermark.",
            SECONDS,
            [(f"({_at('input', _JOB)} - {_at('output', _JOB)}) / 1000", "{{stage}}")],
            to_stage=True,
        ),
        Panel(
            "Advances",
            "Changes of watermark or status, per second. A flat 0 stands still.",
            PER_SECOND,
            [
                (
                    f"max by (stage) (rate(tidegauge_watermark_version{{{_JOB}}}[$__rate_interval]))",
                    "{{stage}}",
                )
            ],
            to_stage=True,
        ),
        Panel(
            "Health",
            "The health of each stage.",
            COUNT,
            [
                (
                    f"max by (stage, health) (tidegauge_stage_health{{{_JOB}}}) == 1",
                    "{{stage}} {{health}}",
                )
            ],
            "table",
            to_stage=True,
        ),
        Panel(
            "Status",
            "The status of each stage.",
            COUNT,
            [
                (
                    f"max by (stage, status) (tidegauge_stage_status{{{_JOB}}})",
                    "{{stage}} {{status}}",
                )
            ],
            "table",
            to_stage=True,
        ),
        Panel(
            "Ranges",
            "Ranges of each stage, by condition.",
            COUNT,
            [(f"max by (stage, condition) ({_RANGES}{{{_JOB}}})", "{{stage}} {{condition}}")],
            "table",
            to_stage=True,
        ),
        Panel(
            "Records",
            "As reported; the Spark agent reports none.",
            PER_SECOND,
            [(_shared_rate("tidegauge_stage_records_total", _JOB), "{{stage}}")],
            to_stage=True,
        ),
        Panel(
            "Late rows",
            "As reported; the Spark agent counts them in its driver's metrics.",
            PER_SECOND,
            [(_shared_rate("tidegauge_stage_late_total", _JOB), "{{stage}}")],
            to_stage=True,
        ),
        Panel(
            "Arrivals",
            "Reports that did not say that nothing came.",
            PER_SECOND,
            [(_rate("tidegauge_stage_arrivals_total", "stage", _JOB), "{{stage}}")],
            to_stage=True,
        ),
        Panel(
            "Expired leases",
            "Leases that ran out.",
            PER_SECOND,
            [(_rate("tidegauge_stage_leases_expired_total", "stage", _JOB), "{{stage}}")],
            to_stage=True,
        ),
    ),
    (("job", "label_values(tidegauge_watermark_version, job)"),),
)

_STAGE: Final = 'job="$job", stage="$stage"'
STAGE: Final = Dashboard(
    "stage",
    "tidegauge: stage",
    "One stage: its input and output, and its ranges.",
    (
        Panel(
            "Watermarks",
            "Input and output in event time. Not shown at the end of time.",
            MOMENT,
            [
                (
                    f"1000 * (max by (kind) (tidegauge_watermark_timestamp_seconds{{{_STAGE}}}) < +Inf)",
                    "{{kind}}",
                )
            ],
            width=_WHOLE,
        ),
        Panel(
            "Lag",
            "How far it is behind the clock: by event time, and by the oldest work.",
            SECONDS,
            [
                (f"max({_LAG}{{{_STAGE}}})", "lag"),
                (f"max({_SYSTEM_LAG}{{{_STAGE}}})", "system lag"),
            ],
            limit=LAG_S,
        ),
        Panel(
            "Ranges",
            "By condition. The stage waits for those never reported, unleased and active.",
            COUNT,
            [(f"max by (condition) ({_RANGES}{{{_STAGE}}})", "{{condition}}")],
        ),
        Panel(
            "Rows",
            "As reported: all, and the late ones. As committed: corrections of emitted values.",
            PER_SECOND,
            [
                (
                    f"max(rate(tidegauge_stage_records_total{{{_STAGE}}}[$__rate_interval]))",
                    "records",
                ),
                (f"max(rate(tidegauge_stage_late_total{{{_STAGE}}}[$__rate_interval]))", "late"),
                (
                    f"max(rate(tidegauge_stage_corrections_total{{{_STAGE}}}[$__rate_interval]))",
                    "corrections",
                ),
            ],
        ),
        Panel(
            "Workers",
            "Reports that did not say that nothing came, and leases that ran out.",
            PER_SECOND,
            [
                (
                    f"sum(rate(tidegauge_stage_arrivals_total{{{_STAGE}}}[$__rate_interval]))",
                    "arrivals",
                ),
                (
                    f"sum(rate(tidegauge_stage_leases_expired_total{{{_STAGE}}}[$__rate_interval]))",
                    "expired leases",
                ),
            ],
        ),
        Panel(
            "Status",
            "1 for the status that it has.",
            COUNT,
            [(f"max by (status) (tidegauge_stage_status{{{_STAGE}}})", "{{status}}")],
        ),
        Panel(
            "Advances",
            "Changes of watermark or status, per second.",
            PER_SECOND,
            [(f"max(rate(tidegauge_watermark_version{{{_STAGE}}}[$__rate_interval]))", "advances")],
        ),
    ),
    (
        ("job", "label_values(tidegauge_watermark_version, job)"),
        ("stage", 'label_values(tidegauge_watermark_version{job="$job"}, stage)'),
    ),
)

_DURATIONS: Final = "tidegauge_request_duration_seconds_bucket"
_THIS: Final = 'instance=~"$instance"'
_BY_ROUTE: Final = _rate(_DURATIONS, "le, method, route", _THIS)
SERVICE: Final = Dashboard(
    "service",
    "tidegauge: service",
    "The service itself: requests, publishing, stores, processes.",
    (
        Panel(
            "Requests",
            "Answered, by status.",
            PER_SECOND,
            [(_rate("tidegauge_requests_total", "status", _THIS), "{{status}}")],
        ),
        Panel(
            "Requests by route",
            "The ten that are asked most.",
            PER_SECOND,
            [
                (
                    f"topk(10, {_rate('tidegauge_requests_total', 'method, route', _THIS)})",
                    "{{method}} {{route}}",
                )
            ],
        ),
        Panel(
            "Duration of requests by route",
            "The 99th percentile; the ten longest. Without long polls and streams of events.",
            SECONDS,
            [
                (
                    # Without a request in the window the quantile is NaN, which is not above 0.
                    f"topk(10, histogram_quantile(0.99, {_BY_ROUTE}) > 0)",
                    "{{method}} {{route}}",
                )
            ],
        ),
        Panel(
            "Duration of all requests",
            "Without long polls and streams of events.",
            SECONDS,
            [
                (f"histogram_quantile({q}, {_rate(_DURATIONS, 'le', _THIS)})", f"p{q * 100:g}")
                for q in (0.5, 0.9, 0.99)
            ],
        ),
        Panel(
            "Reports",
            "By result: accepted, waiting for their epoch, or the reason for the refusal.",
            PER_SECOND,
            [(_rate("tidegauge_reports_total", "result", _THIS), "{{result}}")],
        ),
        Panel(
            "Reported ranges",
            "Accepted, of those behind their earlier promise, and rejected.",
            PER_SECOND,
            [(_rate("tidegauge_reported_ranges_total", "result", _THIS), "{{result}}")],
        ),
        Panel(
            "Publishing",
            "From the first report of a round until its advances are durable and visible.",
            SECONDS,
            [
                (
                    f"histogram_quantile({q}, {_rate('tidegauge_publish_seconds_bucket', 'le', _THIS)})",
                    f"p{q * 100:g}",
                )
                for q in (0.5, 0.9, 0.99)
            ],
        ),
        Panel(
            "Advances",
            "Watermarks that were published, and rounds that failed.",
            PER_SECOND,
            [
                (f"sum(rate(tidegauge_advances_total{{{_THIS}}}[$__rate_interval]))", "advances"),
                (
                    f"sum(rate(tidegauge_publish_failures_total{{{_THIS}}}[$__rate_interval]))",
                    "failed rounds",
                ),
            ],
        ),
        Panel(
            "Leases",
            "Granted, expired; and ranges that were denied to claims.",
            PER_SECOND,
            [
                (
                    f"sum(rate(tidegauge_leases_granted_total{{{_THIS}}}[$__rate_interval]))",
                    "granted",
                ),
                (
                    f"sum(rate(tidegauge_leases_expired_total{{{_THIS}}}[$__rate_interval]))",
                    "expired",
                ),
                (
                    f"sum(rate(tidegauge_denied_ranges_total{{{_THIS}}}[$__rate_interval]))",
                    "denied",
                ),
            ],
        ),
        Panel(
            "Live stores lost",
            "Jobs that were restored from the ledger, in the last hour.",
            COUNT,
            [
                (
                    f"sum by (instance) (increase(tidegauge_incarnations_total{{{_THIS}}}[1h]))",
                    "{{instance}}",
                )
            ],
        ),
        Panel(
            "Refused requests",
            "Requests and connections refused at a limit, by reason.",
            PER_SECOND,
            [(_rate("tidegauge_refused_requests_total", "reason", _THIS), "{{reason}}")],
        ),
        Panel(
            "Left out",
            "Stages without metrics: without any, or without those of their work.",
            COUNT,
            [(f"max by (metrics) (tidegauge_left_out_stages{{{_THIS}}})", "{{metrics}}")],
        ),
        Panel(
            "Memory",
            "Resident, by process.",
            BYTES,
            [(f"process_resident_memory_bytes{{{_THIS}}}", "{{instance}}")],
        ),
        Panel(
            "Processor",
            "Cores in use, by process.",
            COUNT,
            [(f"rate(process_cpu_seconds_total{{{_THIS}}}[$__rate_interval])", "{{instance}}")],
        ),
        Panel(
            "Open files",
            "Files and connections, by process.",
            COUNT,
            [(f"process_open_fds{{{_THIS}}}", "{{instance}}")],
        ),
        Panel(
            "Restarts",
            "Since when each process runs.",
            MOMENT,
            [(f"1000 * process_start_time_seconds{{{_THIS}}}", "{{instance}}")],
            "table",
        ),
    ),
    (("instance", "label_values(tidegauge_publish_failures_total, instance)"),),
)

DASHBOARDS: Final = (OVERVIEW, JOB, STAGE, SERVICE)


def build(wanted: Dashboard) -> str:
    """Return a dashboard's JSON."""
    made = (
        builders.Dashboard(wanted.title)
        .uid(wanted.uid)
        .description(wanted.about)
        .tags([TAG])
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .readonly()
        .link(
            builders.DashboardLink("tidegauge")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(
            builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
    )
    for name, query in wanted.variables:
        made.with_variable(_variable(name, query))
    for panel in wanted.panels:
        made.with_panel(_panel(panel))
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _variable(name: str, query: str) -> builders.QueryVariable:
    # By itself and not as text, which older versions take for a query of labels.
    asked: dict[str, object] = {
        "query": query,
        "refId": "PrometheusVariableQueryEditor-VariableQuery",
    }
    made = (
        builders.QueryVariable(name)
        .datasource(_SOURCE)
        .query(asked)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    )
    return made.multi(True).include_all(True) if name == "instance" else made


def _panel(panel: Panel) -> Any:  # noqa: ANN401  (the SDK's builders have no common type)
    match panel.kind:
        case "lines":
            made = _lines(timeseries.Panel(), panel)
        case "number":
            made = stat.Panel().height(4).thresholds(_thresholds(panel.limit))
        case "table":
            made = _table(table.Panel(), panel)
    made.title(panel.title).description(panel.about).datasource(_SOURCE).span(panel.width)
    made.unit(panel.unit).data_links(list(_links(panel)))
    for index, (expression, legend) in enumerate(panel.queries):
        made.with_target(_query(panel, expression, legend, chr(ord("A") + index)))
    return made


def _lines(made: timeseries.Panel, panel: Panel) -> timeseries.Panel:
    made.height(8).fill_opacity(5).span_nulls(False).show_points(common.VisibilityMode.NEVER)
    made.legend(
        common_builders.VizLegendOptions()
        .display_mode(common.LegendDisplayMode.TABLE)
        .placement(common.LegendPlacement.RIGHT)
        .calcs(["lastNotNull"])
        .show_legend(True)
    )
    made.tooltip(
        common_builders.VizTooltipOptions()
        .mode(common.TooltipDisplayMode.MULTI)
        .sort(common.SortOrder.DESCENDING)
    )
    if panel.limit is not None:
        made.thresholds(_thresholds(panel.limit)).thresholds_style(_DASHED)
    return made if panel.unit == MOMENT else made.min(0)


def _table(made: table.Panel, panel: Panel) -> table.Panel:
    made.height(8).transformations(list(_tidied(panel))).thresholds(_thresholds(panel.limit))
    if panel.none:
        made.no_value(panel.none)
    if panel.limit is not None:
        colored = dashboard.DynamicConfigValue("custom.cellOptions", {"type": "color-text"})
        made.override_by_name("Value", [colored])
    return made


def _thresholds(limit: float | None) -> builders.ThresholdsConfig:
    """Return steps of colors. Without a limit there is one: Grafana's own has a limit of 80."""
    steps = [dashboard.Threshold(value=None, color="text" if limit is None else "green")]
    if limit is not None:
        steps.append(dashboard.Threshold(value=limit, color="orange"))
    return builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def _tidied(panel: Panel) -> Iterable[dashboard.DataTransformerConfig]:
    column = _matrix_column(panel)
    if column is not None:
        matrix = {"columnField": column, "rowField": "stage", "valueField": "Value"}
        yield dashboard.DataTransformerConfig(id_val="groupingToMatrix", options=matrix)
    else:
        # The labels of a count have all there is to see: its values are 1.
        names = ("Time", "Value") if panel.unit == COUNT else ("Time",)
        hidden: dict[str, object] = {"excludeByName": dict.fromkeys(names, True)}
        yield dashboard.DataTransformerConfig(id_val="organize", options=hidden)


def _matrix_column(panel: Panel) -> str | None:
    """Return the label with a column for each of its values; None: each label is a column."""
    labels = ("condition", "status")
    return next((label for label in labels if f"{{{{{label}}}}}" in panel.queries[0][1]), None)


def _links(panel: Panel) -> Iterable[builders.DashboardLink]:
    if panel.to_job:
        yield builders.DashboardLink("Show the job").url(
            f"/d/{JOB.uid}?var-job={_label(panel, 'job')}&${{__url_time_range}}"
        )
    if panel.to_stage:
        yield builders.DashboardLink("Show the stage").url(
            f"/d/{STAGE.uid}?var-job=$job&var-stage={_label(panel, 'stage')}&${{__url_time_range}}"
        )


def _label(panel: Panel, name: str) -> str:
    """Return Grafana's variable for a label. In a table, labels are fields."""
    if panel.kind != "table":
        return f"${{__field.labels.{name}}}"
    # In a matrix, the first field has the names of the rows.
    return f"${{__data.fields.{name}}}" if _matrix_column(panel) is None else "${__data.fields[0]}"


def _query(panel: Panel, expression: str, legend: str, name: str) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(name)
    if panel.kind == "lines":
        return made.range()
    made = made.instant()
    return made.format(prometheus_models.PromQueryFormat.TABLE) if panel.kind == "table" else made


def main() -> None:
    """Write them all."""
    for each in DASHBOARDS:
        (FOLDER / f"{each.name}.json").write_text(build(each))


if __name__ == "__main__":
    main()

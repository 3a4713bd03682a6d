"""Charts and tables of `docs/service/scaling.md`, from the results that `python -m benchmarks.plan` has
saved.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from docs.charts import COLOURS, Axis, Chart, Series

SAVED: Final = Path(__file__).parents[1] / "benchmarks" / "scale.json"
_TITLES: Final = {
    "replica": "a replica restarts",
    "redis": "a Redis node fails over",
    "postgres": "Postgres' leader fails over",
}
QUIET: Final = 1.0
"""Cores of other programs up to which a measurement counts as undisturbed."""
_DECADES: Final = (10, 100, 1_000, 10_000)


@cache
def _saved() -> dict[str, Any]:
    return json.loads(SAVED.read_text())["simulated"]


def checks() -> str:
    """Draw measured rates against simulated ones."""
    found = _saved()["checks"]
    low, high = 20.0, 20_000.0
    fitted = [(each["measured"], each["predicted"]) for each in found if each["is_fitted"]]
    others = [(each["measured"], each["predicted"]) for each in found if not each["is_fitted"]]
    own = [(each["measured"], each["simulated"]) for each in found]
    return Chart(
        "Simulated rates against measured ones",
        Axis("measured, reports per second", low, high, (100, 1_000, 10_000)),
        Axis("simulated, reports per second", low, high, (100, 1_000, 10_000)),
        [
            Series("with the costs measured at each point", own, COLOURS[0], line=False),
            Series("with fitted costs, at points of the fit", fitted, COLOURS[2], False, True),
            Series("with fitted costs, at other points", others, COLOURS[1], False, True),
        ],
        guides=[
            [(low, factor * low), (high / 1.2, factor * high / 1.2)] for factor in (0.85, 1, 1.15)
        ],
    ).svg()


def capacity() -> str:
    """Draw the reports per second of a site, by its replicas and Redis nodes."""
    found = _saved()["capacities"]
    by_nodes: dict[int, list[tuple[float, float]]] = {}
    for each in found:
        by_nodes.setdefault(each["nodes"], []).append((each["replicas"], each["reports_s"]))
    series = [
        Series(f"{nodes} Redis node{'s' * (nodes > 1)}", points, colour)
        for (nodes, points), colour in zip(by_nodes.items(), COLOURS, strict=True)
    ]
    return Chart(
        "Reports per second, by replicas and Redis nodes",
        Axis("replicas", 1, 256, (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        Axis(
            "reports per second, each process at 60 % of its core",
            1_000,
            1_000_000,
            (1e3, 1e4, 1e5, 1e6),
        ),
        series[::-1],
    ).svg()


def cores() -> str:
    """Draw the processes of a site, by its ranges."""
    found = [each for each in _saved()["sizes"] if each["replicas"] is not None]
    small = [each for each in found if each["per_report"] == 1]
    large = [each for each in found if each["per_report"] > 1]

    def points(sizes: list[dict[str, Any]], part: str) -> list[tuple[float, float]]:
        return [(each["ranges"], each[part]) for each in sizes]

    return Chart(
        "Replicas and Redis nodes, by ranges",
        Axis("ranges, each reported every 10 s", 1_000, 10_000_000, (1e3, 1e4, 1e5, 1e6, 1e7)),
        Axis("processes", 1, 1_000, (1, 10, 100, 1_000)),
        [
            Series("replicas, a report for each range", points(small, "replicas"), COLOURS[1]),
            Series("Redis nodes, a report for each range", points(small, "nodes"), COLOURS[2]),
            Series("replicas, 1,000 ranges in a report", points(large, "replicas"), COLOURS[0]),
        ],
    ).svg()


def failures() -> str:
    """Draw the 99th percentile of latency through failures."""
    series = [
        Series(
            _TITLES[each["component"]],
            [(at, p99) for at, _, p99 in each["series"]],
            colour,
        )
        for each, colour in zip(_saved()["outages"], COLOURS, strict=False)
    ]
    return Chart(
        "Latency through failures, 99th percentile",
        Axis(
            "instant of the report, s; failures begin at 4 s",
            0,
            20,
            range(0, 21, 4),
            logarithmic=False,
        ),
        Axis("p99 of the latency, ms", 1, 100_000, _DECADES),
        series,
    ).svg()


def _kinds() -> dict[str, list[float]]:
    """Return the relative errors, by the costs of the simulation and the points."""
    saved = json.loads(SAVED.read_text())
    found: dict[str, list[float]] = {}
    for point, each in zip(saved["measured"]["points"], saved["simulated"]["checks"], strict=True):
        is_quiet = point["others"] < QUIET
        use = f"other programs had {'less' if is_quiet else 'more'} than one core"
        place = "of the fit" if each["is_fitted"] else "of checks alone"
        for costs, rate in (
            ("costs measured at each point", each["simulated"]),
            (f"fitted costs, points {place}", each["predicted"]),
        ):
            found.setdefault(f"{costs} | {use}", []).append(rate / each["measured"] - 1)
    return dict(sorted(found.items()))


def error_table() -> str:
    """Return the table of the simulation's errors."""
    lines = [
        "| simulated with | while | points | within 15 % | median error | largest |",
        "|---|---|---|---|---|---|",
    ]
    for name, signed in _kinds().items():
        errors = [abs(each) for each in signed]
        within = sum(each <= 0.15 for each in errors)
        lines.append(
            f"| {name} | {len(errors)} | {within} | {100 * statistics.median(errors):.0f} % |"
            f" {100 * max(errors):.0f} % |"
        )
    return "\n".join(lines)


def cost_table() -> str:
    """Return the table of the fitted costs, in microseconds of a core."""
    lines = [
        "| processor time, µs | replica | Redis | Postgres |",
        "|---|---|---|---|",
    ]
    for ranges, each in _saved()["costs"].items():
        size = f"{int(ranges):,} range{'s' if int(ranges) > 1 else ''}"
        alone, shared, advance = (
            " | ".join(f"{1e6 * seconds:.0f}" for seconds in each[kind])
            for kind in ("alone", "shared", "advance")
        )
        lines += [
            f"| a report of {size}, alone | {alone} | |",
            f"| the same, with many of its job in a turn and a call | {shared} | |",
            f"| an advance of its job | {advance} |",
        ]
    hint = json.loads(SAVED.read_text())["measured"]["hint_s"]
    lines.append(f"| an advance of another replica, for each replica | {1e6 * hint:.0f} | | |")
    return "\n".join(lines)


def size_table() -> str:
    """Return the table of the sites by their ranges."""
    columns = (
        "ranges",
        "in a report",
        "jobs",
        "reports/s",
        "advances/s",
        "replicas",
        "Redis nodes",
        "cores of Postgres",
        "core seconds per million reports",
        "p50, p99",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for each in _saved()["sizes"]:
        replicas, cost, latency = "**no number**", "", ""
        if each["replicas"] is not None:
            replicas, cost = f"{each['replicas']:,}", f"{each['core_s_per_million']:,.0f}"
            latency = f"{each['p50_ms']:.1f}, {each['p99_ms']:.1f} ms"
        lines.append(
            f"| {each['ranges']:,} | {each['per_report']:,} | {each['jobs']:,g} |"
            f" {each['reports_s']:,.0f} | {each['commits_s']:,g} | {replicas} | {each['nodes']:,} |"
            f" {each['postgres_cores']:.3f} | {cost} | {latency} |"
        )
    return "\n".join(lines)


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "errors": error_table,
    "costs": cost_table,
    "sizes": size_table,
}
PAGE: Final = "service/scaling.md"


def filled(text: str) -> str:
    """Return the page with its tables replaced by those of the saved results."""
    for name, table in TABLES.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        written = table()
        text, count = place.subn(lambda found, w=written: f"{found[1]}\n{w}\n\n{found[2]}", text)
        if count != 1:
            raise ValueError(f"the page has {count} places for the table of {name}")
    return text

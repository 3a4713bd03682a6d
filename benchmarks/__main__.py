"""`python -m benchmarks [--quick] [--json] [--only …]`: this machine's figures, against their targets.

Those of the agent and of many jobs take half an hour each, those beside Flink twenty minutes, those of
many replicas ten. These are measured only on request: `--only spark`, `jobs`, `flink`, `scale`.
Exit status 0 unless a measurement itself breaks: a busy machine is no failure.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import jobs, keys, production, scale
from benchmarks.figures import FULL, QUICK, Figure, Plan, embedded
from benchmarks.flink import figures as flink
from benchmarks.load import generator


def shown(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:.2f} {unit}"


def table(figures: list[Figure]) -> Table:
    made = Table(title=f"tidegauge, load by {generator()}")
    made.add_column("figure", no_wrap=True)
    for column in ("value", "target"):
        made.add_column(column, justify="right", no_wrap=True)
    made.add_column("ok")
    made.add_column("measured")
    for figure in figures:
        sign = "≥" if figure.at_least else "≤"
        target = "" if figure.target is None else f"{sign} {shown(figure.target, figure.unit)}"
        mark = {True: "[green]yes", False: "[red]no", None: ""}[figure.ok]
        made.add_row(figure.name, shown(figure.value, figure.unit), target, mark, figure.detail)
    return made


def spark(plan: Plan, folder: Path) -> Iterator[Figure]:
    """The agent's figures; whoever does not ask for them need not have Spark."""
    from benchmarks.spark.figures import measured  # noqa: PLC0415

    return measured(plan, folder)


PARTS = {
    "embedded": embedded,
    "keys": keys.figures,
    "production": production.figures,
    "spark": spark,
    "jobs": jobs.figures,
    "flink": flink.figures,
    "scale": scale.figures,
}
ALONE = {"spark", "jobs", "flink", "scale"}
"""Figures that are measured only on request."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short rounds and 100,000 ranges")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--only", choices=PARTS, help="the figures on these stores alone")
    options = parser.parse_args()
    console = Console(stderr=True)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="tidegauge-bench-") as folder:
        for part, measured in PARTS.items():
            if options.only != part and (options.only or part in ALONE):
                continue
            where = Path(folder) / part
            where.mkdir()
            for figure in measured(QUICK if options.quick else FULL, where):
                figures.append(figure)
                console.print(
                    f"{figure.name}: {shown(figure.value, figure.unit)} ({figure.detail})"
                )
    if options.json:
        print(json.dumps([figure.as_dict() for figure in figures], indent=2))
    else:
        Console(width=170).print(table(figures))


if __name__ == "__main__":
    main()

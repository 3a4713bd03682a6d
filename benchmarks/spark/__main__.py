"""`python -m benchmarks.spark [--quick] [--json] [--only PART]`: what the agent costs a query, and
its closing lag.

The long version takes over an hour; `--only "50 files"` half of one, `--only strategies` half of one,
`--only "late rows"`, `--only "output times"`, `--only "closing lag"` and `--only kafka` ten minutes
each, `--only partitions` half an hour, `--only idle` five minutes. `kafka` needs Maven, or the jars of
Kafka that were fetched before.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.__main__ import table
from benchmarks.figures import FULL, QUICK
from benchmarks.spark.figures import measured


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="600,000 rows, and two rounds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--only",
        metavar="PART",
        help='one case by its name, "strategies", "late rows", "output times", "partitions",'
        ' "idle", "closing lag" or "kafka"',
    )
    options = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(
        prefix="tidegauge-bench-", ignore_cleanup_errors=True
    ) as folder:
        plan = QUICK if options.quick else FULL
        figures = list(measured(plan, Path(folder), console.print, options.only))
    if options.json:
        print(json.dumps([figure.as_dict() for figure in figures], indent=2))
    else:
        Console(width=170).print(table(figures))


if __name__ == "__main__":
    main()

"""The agent's figures: what it costs a query, and how much later its windows close."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from benchmarks.figures import FULL, Figure, Plan
from benchmarks.servers import ROOT, service
from benchmarks.spark.data import Files
from benchmarks.spark.late_rows import FATES, PASS, LateBench
from benchmarks.spark.output_times import END, WINDOWS, OutputTimeBench
from benchmarks.spark.overhead import RANGES, Bench, Case, Variant, cases
from benchmarks.spark.strategies import BASELINE, STRATEGIES, StrategyBench
from benchmarks.spark.turns import middle, ratios
from tests.spark.cluster.chain import STAGES, Chain


@dataclass(frozen=True)
class Size:
    """Size of the measurements."""

    rows: int
    slices: int
    few: int
    rounds: int
    chains: int


BIG = Size(rows=5_000_000, slices=50, few=6, rounds=5, chains=3)
SMALL = Size(rows=600_000, slices=12, few=4, rounds=2, chains=1)


def ignore(line: str) -> None:
    """Say nothing."""


@contextmanager
def local_spark(folder: Path) -> Generator[SparkSession]:
    """Spark on two cores, in a JVM of its own; compiled by both of its compilers, as in production."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(ROOT)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "4g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", RANGES)
        .config("spark.sql.streaming.numRecentProgressUpdates", 1_000)
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


CLOSING_LAG: Final = "closing lag"
STRATEGY_COSTS: Final = "strategies"
LATE_ROWS: Final = "late rows"
OUTPUT_TIMES: Final = "output times"


def measured(
    plan: Plan, folder: Path, say: Callable[[str], None] = ignore, only: str | None = None
) -> Iterator[Figure]:
    """Every figure of the agent, in the order of the table; `only` is the name of one part."""
    size = BIG if plan is FULL else SMALL
    with service(folder / "service") as server, local_spark(folder) as spark:
        bench = Bench(spark, server.url, folder)
        for case in cases(folder, size.rows, size.slices, size.few):
            if only not in {None, case.name}:
                continue
            case.files.write()
            bench.measure(case, size.rounds, say)
            yield from _costs(case, enough=case.files.slices >= BIG.slices)
        if only in {None, STRATEGY_COSTS}:
            yield from _strategies(spark, server.url, folder, size, say)
        if only in {None, LATE_ROWS}:
            yield from _late_rows(spark, server.url, folder, size, say)
        if only in {None, OUTPUT_TIMES}:
            yield from _output_times(spark, server.url, folder, size, say)
        if only in {None, CLOSING_LAG}:
            yield from _lags(spark, server.url, folder, size.chains)


def _costs(case: Case, *, enough: bool) -> Iterator[Figure]:
    """Yield the cost of the whole and, where it was measured, of each part.

    The target in total is for fifty batches or more: with few, one batch more in the state is much.
    """
    equal = 1.15 if case.files.slices >= BIG.slices else None
    yield _cost(case, Variant.WHOLE, Variant.DELAYED, equal, "closing as late")
    yield _cost(case, Variant.WHOLE, Variant.PLAIN, 1.3 if enough else None, "in total")
    ratio, spread = case.batch_ratio(Variant.WHOLE, Variant.DELAYED)
    yield Figure(
        f"{case.name}: a batch, once it runs",
        ratio,
        "of plain",
        None,
        False,
        f"{case.batch_ms(Variant.WHOLE):.0f} ms to {case.batch_ms(Variant.DELAYED):.0f} ms, closing as"
        f" late, rounds {spread}",
    )
    parts = [Variant.DELAYED, Variant.SOURCE, Variant.CONTROL, Variant.WHOLE]
    if not set(parts) <= set(case.variants):
        return
    whole = case.seconds(Variant.DELAYED)
    for below, part, name in zip(
        parts, parts[1:], ("source()", "watermarked()", "report()"), strict=False
    ):
        more = case.seconds(part) - case.seconds(below)
        yield Figure(
            f"{case.name}: {name} adds",
            more / whole,
            "of plain",
            None,
            False,
            f"{more:+.2f} s; processor "
            f"{case.processor_seconds(part) - case.processor_seconds(below):+.2f} s",
        )


def _cost(case: Case, ours: Variant, theirs: Variant, target: float | None, name: str) -> Figure:
    ratio, spread = case.ratio(ours, theirs)
    return Figure(
        f"{case.name}: {name}",
        ratio,
        "of plain",
        target,
        False,
        f"{case.seconds(ours):.2f} s to {case.seconds(theirs):.2f} s, rounds {spread}; "
        f"processor {case.processor_seconds(ours):.2f} s to {case.processor_seconds(theirs):.2f} s; "
        f"{case.state_rows(ours):,} to {case.state_rows(theirs):,} sessions kept",
    )


def _strategies(
    spark: SparkSession, url: str, folder: Path, size: Size, say: Callable[[str], None]
) -> Iterator[Figure]:
    """Yield the duration of a batch with each strategy, relative to a fixed bound."""
    files = Files(folder / "files", size.rows, size.slices, by_shard=False)
    files.write()
    bench = StrategyBench(spark, url, folder, files)
    found = ratios(list(STRATEGIES), BASELINE, bench.batch_ms, rounds=size.rounds, say=say)
    for name, each in found.items():
        ratio, spread = middle(each)
        yield Figure(
            f"a batch of source() with {name}", ratio, f"of {BASELINE}", 1.05, False, spread
        )


def _late_rows(
    spark: SparkSession, url: str, folder: Path, size: Size, say: Callable[[str], None]
) -> Iterator[Figure]:
    """Yield the duration of a batch of windows with each treatment of late rows."""
    files = Files(folder / "late-files", size.rows, size.slices, by_shard=False)
    files.write()
    bench = LateBench(spark, url, folder, files)
    found = ratios(FATES, PASS, bench.batch_ms, rounds=size.rounds, say=say)
    for name, each in found.items():
        ratio, spread = middle(each)
        yield Figure(f"a batch of windows with {name}", ratio, f"of {PASS}", None, False, spread)


def _output_times(
    spark: SparkSession, url: str, folder: Path, size: Size, say: Callable[[str], None]
) -> Iterator[Figure]:
    """Yield the duration of a batch with each output time, relative to the end of the window."""
    files = Files(folder / "dated-files", size.rows, size.slices, by_shard=False)
    files.write()
    bench = OutputTimeBench(spark, url, folder, files)
    for kind, (_, dates) in WINDOWS.items():
        measure = partial(bench.batch_ms, kind)
        found = ratios(list(dates), END, measure, rounds=size.rounds, say=say)
        for name, each in found.items():
            ratio, spread = middle(each)
            title = f"a batch of {kind} dated by the {name}"
            yield Figure(title, ratio, f"of {END}", 1.05, False, spread)


def _lags(spark: SparkSession, url: str, folder: Path, rounds: int) -> Iterator[Figure]:
    """Closing lag of one stage, and of two through files; the first round warms up."""
    for trigger in ("processingTime", "availableNow"):
        lags: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for number in range(rounds + 1):
            for kind in ("plain", "ours"):
                where = folder / f"{trigger}-{kind}-{number}"
                job = f"{trigger}-{number}"
                chain = Chain(spark, where, None if kind == "plain" else url, job=job)
                chain.land()
                chain.run(trigger)
                for stage in range(len(STAGES)):
                    found = [(lag.batches, lag.seconds) for lag in chain.lags(stage)]
                    if number:
                        lags.setdefault((kind, stage), []).extend(found)
        for stages in (1, 2):
            yield _lag(trigger, stages, lags)


def _lag(trigger: str, stages: int, lags: dict[tuple[str, int], list[tuple[int, float]]]) -> Figure:
    """The lags of a chain's stages add up: a row of the first lets a window of the second close."""
    sums = {
        kind: (
            sum(max(batches for batches, _ in lags[kind, stage]) for stage in range(stages)),
            sum(statistics.median(s for _, s in lags[kind, stage]) for stage in range(stages)),
        )
        for kind in ("plain", "ours")
    }
    more = sums["ours"][0] - sums["plain"][0]
    return Figure(
        f"closing lag less plain Spark's, {'two stages' if stages > 1 else 'one stage'}, {trigger}",
        more,
        "batches",
        stages,
        False,
        f"{sums['ours'][0]} batches to {sums['plain'][0]}; "
        f"{sums['ours'][1]:.2f} s to {sums['plain'][1]:.2f} s, medians",
    )

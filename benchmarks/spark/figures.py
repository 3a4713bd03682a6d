"""The agent's figures: what it costs a query, and how much later its windows close."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from benchmarks.figures import FULL, Figure, Plan
from benchmarks.servers import ROOT, service
from benchmarks.spark import late_rows, output_times, strategies
from benchmarks.spark.data import Clicks, Files
from benchmarks.spark.overhead import MOST, RANGES, Bench, Case, Variant, cases
from benchmarks.spark.topic import Topic
from benchmarks.spark.turns import ClickBench, middle, ratios
from spark_agent.kafka_jars import JarsUnavailableError, KafkaJars, fetch
from tests.spark.cluster.chain import STAGES, Chain, TopicChain
from tests.support.kafka_server import KafkaServer


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
_CORES: Final = 2


def ignore(line: str) -> None:
    """Say nothing."""


@contextmanager
def local_spark(folder: Path, jars: str = "") -> Generator[SparkSession]:
    """Spark on two cores, in a JVM of its own; compiled by both of its compilers, as in production.

    `jars` are added to it, as `spark.jars` lists them.
    """
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(ROOT)
    spark = (
        SparkSession.builder.master(f"local[{_CORES}]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "4g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", RANGES)
        .config("spark.sql.streaming.numRecentProgressUpdates", 1_000)
        .config("spark.jars", jars)
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
KAFKA: Final = "kafka"
PARTITIONS: Final = "partitions"
IDLE: Final = "idle"

_ROUNDS_OF_PARTITIONS: Final = {2: 3, 20: 3, 200: 3, 1_000: 1}
"""Rounds by the number of state partitions: a batch with a thousand takes most of a minute."""
_QUICK_ROUNDS_OF_PARTITIONS: Final = {2: 1, 20: 1}
_FEW_ROWS: Final = Clicks(rows=16_000, slices=8)
"""Small batches, whose cost is that of their tasks."""
_DEFAULT_PARTITIONS: Final = 200
"""Spark's own number of state partitions."""


def measured(
    plan: Plan, folder: Path, say: Callable[[str], None] = ignore, only: str | None = None
) -> Iterator[Figure]:
    """Every figure of the agent, in the order of the table; `only` is the name of one part."""
    size = BIG if plan is FULL else SMALL
    jars = _kafka_jars(say) if only in {None, KAFKA} else None
    if isinstance(jars, JarsUnavailableError):
        yield Figure(KAFKA, None, "of plain", None, False, f"skipped: {jars}")
        if only == KAFKA:
            return
    listed = jars.connector_files if isinstance(jars, KafkaJars) else ""
    with service(folder / "service") as server, local_spark(folder, listed) as spark:
        bench = Bench(spark, server.url, folder)
        for case in cases(folder, size.rows, size.slices, size.few):
            if only not in {None, case.name}:
                continue
            case.input.write()
            bench.measure(case, size.rounds, say)
            yield from _costs(case)
        turns = [each for each in _TURNS if only in {None, each.part}]
        if turns:
            files = Files(folder / "files", Clicks(size.rows, size.slices))
            files.write()
            clicks = ClickBench(spark, server.url, folder, files)
            for each in turns:
                yield from _by_turns(each, clicks, size.rounds, say)
        yield from _of_small_batches(bench, server.pid, folder, plan, say, only)
        if only in {None, CLOSING_LAG}:
            yield from _lags(folder / "chains", partial(Chain, spark), server.url, size.chains)
        if isinstance(jars, KafkaJars):
            yield from _over_kafka(spark, bench, server.url, folder / "kafka", jars, size, say)


def _of_small_batches(
    bench: Bench,
    service_pid: int,
    folder: Path,
    plan: Plan,
    say: Callable[[str], None],
    only: str | None,
) -> Iterator[Figure]:
    """Yield what batches of few rows cost, and what no rows at all."""
    if only in {None, PARTITIONS}:
        yield from _over_partitions(bench, folder / PARTITIONS, plan, say)
    if only in {None, IDLE}:
        yield _idle(bench, service_pid, folder / IDLE, plan)


def _over_partitions(
    bench: Bench, folder: Path, plan: Plan, say: Callable[[str], None]
) -> Iterator[Figure]:
    """Yield the duration of a small batch by the number of state partitions."""
    files = Files(folder, _FEW_ROWS)
    files.write()
    bench.run(Variant.WHOLE, files)
    rounds_of = _ROUNDS_OF_PARTITIONS if plan is FULL else _QUICK_ROUNDS_OF_PARTITIONS
    for ranges, rounds in rounds_of.items():
        variants = (Variant.PLAIN, Variant.PYTHON, Variant.WHOLE)
        case = Case(f"{ranges} state partitions", files, variants, ranges)
        bench.measure(case, rounds, say, is_warm=True)
        ours_ms, plain_ms = (case.batch_ms(each) for each in (Variant.WHOLE, Variant.PLAIN))
        ratio, spread = case.batch_ratio(Variant.WHOLE, Variant.PLAIN)
        yield Figure(
            f"{case.name}: a small batch",
            ratio,
            "of plain",
            1.25 if ranges == _DEFAULT_PARTITIONS else None,
            False,
            f"{ours_ms:.0f} ms to {plain_ms:.0f} ms, {(ours_ms - plain_ms) / ranges:.1f} ms for each "
            f"partition, rounds {spread}",
        )
        ratio, spread = case.batch_ratio(Variant.PYTHON, Variant.PLAIN)
        name = f"{case.name}: a Python function that does nothing"
        yield Figure(name, ratio, "of plain", None, False, f"rounds {spread}")


def _idle(bench: Bench, service_pid: int, folder: Path, plan: Plan) -> Figure:
    """Return the processor time of the service for a query that runs and finds nothing."""
    files = Files(folder, _FEW_ROWS)
    files.write()
    seconds = 120 if plan is FULL else 20
    share = bench.idle_share(service_pid, files, seconds)
    name = "the service's processor for an idle query"
    return Figure(name, 100 * share, "% of a core", 0.2, False, f"over {seconds} s")


def _over_kafka(
    spark: SparkSession,
    bench: Bench,
    url: str,
    folder: Path,
    jars: KafkaJars,
    size: Size,
    say: Callable[[str], None],
) -> Iterator[Figure]:
    """Yield the cost of a query over a topic, and its closing lag."""
    with KafkaServer(jars, folder / "broker") as broker:
        topic = Topic(broker, Clicks(size.rows, size.slices))
        topic.write()
        for case in (
            Case(KAFKA, topic, MOST),
            Case(f"{KAFKA}, tasks={_CORES}", replace(topic, tasks=_CORES), MOST[1:]),
        ):
            bench.measure(case, size.rounds, say)
            yield from _costs(case)
        chain = partial(TopicChain, spark, broker=broker)
        yield from _lags(folder / "chains", chain, url, size.chains, KAFKA)


def _kafka_jars(say: Callable[[str], None]) -> KafkaJars | JarsUnavailableError:
    """Return the jars of Kafka's broker and of Spark's connector, or the reason why there are none."""
    try:
        return fetch(say, environment=os.environ)
    except JarsUnavailableError as error:
        return error


def _costs(case: Case) -> Iterator[Figure]:
    """Yield the cost of the whole and, where it was measured, of each part.

    The target in total is for fifty batches or more: with few, one batch more in the state is much.
    """
    enough = case.input.clicks.slices >= BIG.slices
    equal = 1.15 if enough else None
    yield _cost(case, Variant.WHOLE, Variant.DELAYED, equal, "closing as late")
    if Variant.PLAIN in case.variants:
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


@dataclass(frozen=True)
class _Turns:
    """Variants of a query over the same clicks, and the one to which the others are compared."""

    part: str
    title: str
    """Title of a figure, with a place for the variant."""
    variants: Sequence[str]
    baseline: str
    batch_ms: Callable[[ClickBench, str], float]
    target: float | None = 1.05


_TURNS: Final = (
    _Turns(
        STRATEGY_COSTS,
        "a batch of source() with {}",
        tuple(strategies.STRATEGIES),
        strategies.BASELINE,
        strategies.batch_ms,
    ),
    _Turns(
        LATE_ROWS,
        "a batch of windows with {}",
        late_rows.FATES,
        late_rows.PASS,
        late_rows.batch_ms,
        target=None,
    ),
    *(
        _Turns(
            OUTPUT_TIMES,
            f"a batch of {kind} dated by the {{}}",
            tuple(dates),
            output_times.END,
            partial(output_times.batch_ms, kind=kind),
        )
        for kind, (_, dates) in output_times.WINDOWS.items()
    ),
)


def _by_turns(
    turns: _Turns, bench: ClickBench, rounds: int, say: Callable[[str], None]
) -> Iterator[Figure]:
    """Yield the duration of a batch in each variant, relative to the baseline."""
    measure = partial(turns.batch_ms, bench)
    found = ratios(turns.variants, turns.baseline, measure, rounds=rounds, say=say)
    for name, each in found.items():
        ratio, spread = middle(each)
        title = turns.title.format(name)
        yield Figure(title, ratio, f"of {turns.baseline}", turns.target, False, spread)


def _lags(
    folder: Path, made: Callable[..., Chain], url: str, rounds: int, part: str = ""
) -> Iterator[Figure]:
    """Closing lag of one stage, and of two through files; the first round warms up.

    `made` makes a chain of a folder, the service's URL or none, and the name of a job.
    """
    for trigger in ("processingTime", "availableNow"):
        lags: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for number in range(rounds + 1):
            for kind in ("plain", "ours"):
                where = folder / f"{trigger}-{kind}-{number}"
                job = f"{part}{trigger}-{number}"
                chain = made(where, None if kind == "plain" else url, job=job)
                chain.land()
                chain.run(trigger)
                for stage in range(len(STAGES)):
                    found = [(lag.batches, lag.seconds) for lag in chain.lags(stage)]
                    if number:
                        lags.setdefault((kind, stage), []).extend(found)
        for stages in (1, 2):
            name = f"{part}: {CLOSING_LAG}" if part else CLOSING_LAG
            yield _lag(name, trigger, stages, lags)


def _lag(
    name: str, trigger: str, stages: int, lags: dict[tuple[str, int], list[tuple[int, float]]]
) -> Figure:
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
        f"{name} less plain Spark's, {'two stages' if stages > 1 else 'one stage'}, {trigger}",
        more,
        "batches",
        stages,
        False,
        f"{sums['ours'][0]} batches to {sums['plain'][0]}; "
        f"{sums['ours'][1]:.2f} s to {sums['plain'][1]:.2f} s, medians",
    )

"""Executors and drivers that die or stall, on a cluster of processes: every row once, none early."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent.demo.flights import LOG_SCHEMA, NEW_YORK, load_flights, write_logs
from tests.spark.cluster.cluster import RUN_S, Cluster, Drivers, alive, end
from tests.spark.cluster.data import Shape
from tests.spark.cluster.late_flights import averages
from tests.spark.cluster.spark_logs import flights_on_time
from tests.spark.cluster.straggler import ALL_RACES, Straggler
from tests.spark.flow import until
from tests.support.server import Service

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1_800)]

MOMENTS = ("planned", "written", "committed")


def _runs(*runs: tuple[Shape, int], short: tuple[Shape, int] | None = None) -> list[object]:
    """Runs for `make matrix`, and a short one for `make test-slow`."""
    every = [(each, pytest.mark.matrix) for each in runs]
    if short is not None:
        every.append((short, pytest.mark.slow))
    return [pytest.param(*run, id=f"{run[0]}, {run[1]}", marks=mark) for run, mark in every]


def _await(cluster: Cluster, moment: str) -> None:
    """Wait for a moment of a batch that is still to come."""
    planned, written, committed = cluster.planned(), cluster.written(), cluster.committed()

    def come() -> bool:
        assert cluster.runs(), "the query has ended too soon"
        match moment:
            case "planned":
                return cluster.planned() > planned
            case "written":
                return cluster.written() > written
            case _:
                return cluster.committed() > committed

    until(come, f"a batch is {moment}")


def _kill_executors(cluster: Cluster, kills: int) -> None:
    """Kill so many executors, one after the other, at different moments of their batches."""
    for number in range(kills):
        _await(cluster, "committed")
        _await(cluster, MOMENTS[number % len(MOMENTS)])
        victims = until(cluster.executors, "an executor runs")
        assert end(victims[number % len(victims)])


def _await_batch(drivers: Drivers, moment: Callable[[Drivers], int]) -> None:
    before = moment(drivers)

    def come() -> bool:
        assert drivers.runs(), "the query has ended too soon"
        return moment(drivers) > before

    until(come, "another batch")


def _run_flights(drivers: Drivers, kills: int = 0, restarts: int = 1) -> None:
    """Kill executors, and drivers with all they have started, in the middle of batches."""
    for number in range(kills):
        _await_batch(drivers, Drivers.committed)
        _await_batch(drivers, Drivers.planned)
        if (number + 1) % (kills // restarts) == 0:
            for pid in drivers.kill_driver():
                end(pid)
            drivers.start()
        else:
            victims = until(drivers.executors, "an executor runs")
            assert end(victims[number % len(victims)])
    until(lambda: not drivers.runs(), f"the query ends\n{drivers.log()}", RUN_S)


def _check_equal(found: DataFrame, expected: DataFrame) -> None:
    found = found.select(expected.columns)
    assert not expected.exceptAll(found).count(), "missing"
    assert not found.exceptAll(expected).count(), "too much"


@pytest.mark.parametrize(
    ("days", "kills", "restarts"),
    [
        pytest.param(4, 20, 3, marks=pytest.mark.matrix),
        pytest.param(1, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_flights_are_in_an_hour_or_aside(
    spark: SparkSession, service: Service, tmp_path: Path, days: int, kills: int, restarts: int
) -> None:
    logs = tmp_path / "logs"
    write_logs(load_flights(days), NEW_YORK, logs, 1 / 48)
    program = "tests.spark.cluster.late_flights"
    with Drivers(
        tmp_path, program, service.url, str(tmp_path), str(days), "1 hour", "aside"
    ) as drivers:
        _run_flights(drivers, kills, restarts)
    lines = spark.read.schema(LOG_SCHEMA).json(str(logs))
    late = spark.read.parquet(str(tmp_path / "late"))
    assert late.count(), "some flights are late"
    assert not late.exceptAll(lines).count(), "each of them once"
    _check_equal(
        spark.read.parquet(str(tmp_path / "results")), averages(lines.exceptAll(late), "1 hour")
    )


@pytest.mark.parametrize(
    ("days", "window", "kills", "restarts"),
    [
        pytest.param(4, "1 hour", 20, 3, marks=pytest.mark.matrix),
        pytest.param(29, "7 days", 0, 1, marks=pytest.mark.matrix),
        pytest.param(1, "1 hour", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_averages_of_flights_are_corrected(
    spark: SparkSession,
    service: Service,
    tmp_path: Path,
    days: int,
    window: str,
    kills: int,
    restarts: int,
) -> None:
    """The last values are those of all flights, and the first ones those of the flights on time."""
    logs = tmp_path / "logs"
    write_logs(load_flights(days), NEW_YORK, logs, 1 / 48 if kills else 1 / 8)
    program = "tests.spark.cluster.late_flights"
    with Drivers(
        tmp_path, program, service.url, str(tmp_path), str(days), window, "corrects"
    ) as drivers:
        _run_flights(drivers, kills, restarts)
    lines = spark.read.schema(LOG_SCHEMA).json(str(logs))
    results = spark.read.parquet(str(tmp_path / "results"))
    late = spark.read.parquet(str(tmp_path / "late"))
    newest = results.groupBy("window", "origin").agg(
        F.max_by(F.struct("*"), "version").alias("row")
    )
    _check_equal(newest.select("row.*"), averages(lines.exceptAll(late), window))
    if window == "1 hour":
        # A bound of two hours leaves hardly a flight behind the end of its week.
        assert results.filter("NOT on_time").count(), "some windows are corrected"
    seen = flights_on_time(spark, logs, tmp_path / "checkpoint", window, 12 * 3_600_000)
    _check_equal(results.filter("on_time"), averages(seen, window))


@pytest.mark.parametrize(
    ("shape", "kills"), _runs((Shape.SESSIONS, 20), (Shape.JOIN, 20), short=(Shape.JOIN, 2))
)
def test_executors_are_killed(service: Service, tmp_path: Path, shape: Shape, kills: int) -> None:
    with Cluster(service, tmp_path, shape, 2 + 3 * kills) as cluster:
        _kill_executors(cluster, kills)
        cluster.finish()


@pytest.mark.parametrize(("shape", "kills"), _runs((Shape.TUMBLING, 5), (Shape.JOIN, 5)))
def test_a_driver_is_killed_whose_executors_go_on(
    service: Service, tmp_path: Path, shape: Shape, kills: int
) -> None:
    """They stand still while the next driver begins, and then go on with what they were at."""
    with Cluster(service, tmp_path, shape, 4 + 4 * kills) as cluster:
        for number in range(kills):
            _kill_executors(cluster, 1)
            _await(cluster, "committed")
            _await(cluster, MOMENTS[(number + 1) % len(MOMENTS)])
            old = cluster.kill_driver()
            cluster.start()
            _await(cluster, "committed")
            # The workers first: an executor that finds its driver gone takes them with it.
            assert all(end(pid, signal.SIGCONT) for pid in reversed(old)), "they were still there"
            until(lambda old=old: not any(map(alive, old)), "they have found that it is gone")
        cluster.finish()


@pytest.mark.parametrize(("shape", "races"), _runs((Shape.SESSIONS, 10), (Shape.JOIN, 10)))
def test_tasks_race_with_their_copies(
    service: Service, tmp_path: Path, shape: Shape, races: int
) -> None:
    with Cluster(service, tmp_path, shape, 4 + 2 * races, speculation=True) as cluster:
        cluster.finish()
        assert Straggler(tmp_path / "races").races() == ALL_RACES
        # A task claims within its report. So a copy that has not reported holds no lease, and the report
        # of the straggler that wins is not dropped.
        assert not cluster.counts()

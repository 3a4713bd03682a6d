"""The sensor for Dagster: the page's definitions in a real instance, beside a real service."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from spark_agent.client.client import Client
from spark_agent.client.reports import Lease, RangeReport, Rank
from tests.integration.schedulers.conftest import type_errors
from tests.support.commands import run
from tests.support.documents import block
from tests.support.server import Service

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dagster")]

DAY_MS: Final = 86_400_000
NEW_YEAR: Final = 1767225600000
END_OF_TIME: Final = 2**63 - 1

TICKS: Final = """
import json, sys
from dagster import DagsterInstance, build_sensor_context

def tick(code, cursor):
    names = {}
    exec(code, names)
    defs = names["defs"]
    repository = defs.get_repository_def()
    [sensor] = repository.sensor_defs
    with DagsterInstance.local_temp(sys.argv[1]) as instance, build_sensor_context(
        instance=instance, cursor=cursor, resources=defs.resources, repository_def=repository
    ) as context:
        done = sensor.evaluate_tick(context)
    requests = done.run_requests or []
    return {
        "keys": [each.partition_key for each in requests],
        "run_keys": [each.run_key for each in requests],
        "cursor": done.cursor,
        "skipped": done.skip_message,
    }

for line in sys.stdin:
    try:
        answer = tick(**json.loads(line))
    except Exception as error:
        answer = {"error": repr(error)}
    print("ANSWER", json.dumps(answer), flush=True)
"""
"""A program that evaluates the sensor of some code for each line. Its start takes seconds."""


class Ticks:
    """The program, running."""

    def __init__(self, python: Path, folder: Path) -> None:
        self._process = subprocess.Popen(
            [python, "-c", TICKS, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tick(self, code: str, cursor: str | None) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"code": code, "cursor": cursor}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
                return answer
        raise AssertionError(f"the program ended with {self._process.wait()}")

    def close(self) -> None:
        self._process.communicate(timeout=60)


class Scores:
    """A job of the service whose source is reported for here, and the sensor that follows it."""

    def __init__(self, service: Service, ticks: Ticks, job: str) -> None:
        self.job, self._ticks = job, ticks
        self._url = service.url
        self.client = Client(service.url, patience_ms=30_000)
        self.client.declare(job, {"sessions": {"shards": ["a"]}})
        self.lease = self._claimed()
        self.cursor: str | None = None

    def _claimed(self) -> Lease:
        rank = Rank(self.client.open_run(self.job, ["sessions"], holder="me"), 0, 0)
        return self.client.claim(self.job, "sessions", None, holder="me", ttl_ms=600_000, rank=rank)

    def report(self, watermark_ms: int, *, final: bool = False) -> None:
        self.client.report(
            self.job, "sessions", self.lease, {"a": RangeReport(watermark_ms, final=final)}
        )

    def reset(self) -> None:
        self.client.reset(self.job)
        self.lease = self._claimed()

    def tick(self, *, url: str | None = None, **options: object) -> dict[str, Any]:
        """Evaluate the page's sensor with the cursor of the tick before."""
        more = "".join(f", {name}={value!r}" for name, value in options.items())
        code = block("python", "from dagster").replace('"scores"', f'"{self.job}"')
        code = code.replace("http://tidegauge:8000", url or self._url)
        code = code.replace('stage="sessions"', f'stage="sessions"{more}')
        tick = self._ticks.tick(code, self.cursor)
        self.cursor = tick.get("cursor")
        return tick


@pytest.fixture(scope="module")
def ticks(dagster: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ticks]:
    running = Ticks(dagster, tmp_path_factory.mktemp("instance"))
    yield running
    running.close()


@pytest.fixture
def scores(server: Service, ticks: Ticks, request: pytest.FixtureRequest) -> Scores:
    return Scores(server, ticks, re.sub(r"\W+", "-", request.node.name).strip("-"))


def test_each_partition_is_requested_once_it_is_in(scores: Scores) -> None:
    assert "has not a watermark yet" in scores.tick()["skipped"]
    scores.report(NEW_YEAR + DAY_MS - 1)
    assert "2026-01-01T23:59:59.999Z: not a further partition is in" in scores.tick()["skipped"]
    scores.report(NEW_YEAR + 3 * DAY_MS)
    assert scores.tick(limit=2)["keys"] == ["2026-01-01", "2026-01-02"]
    assert scores.tick(limit=2)["keys"] == ["2026-01-03"]
    assert not scores.tick()["keys"]


def test_a_reset_job_requests_its_partitions_anew(scores: Scores) -> None:
    scores.report(NEW_YEAR + DAY_MS)
    before = scores.tick()
    scores.reset()
    assert "has not a watermark yet" in scores.tick()["skipped"]
    scores.report(NEW_YEAR + DAY_MS)
    after = scores.tick()
    assert before["keys"] == after["keys"] == ["2026-01-01"]
    assert not set(before["run_keys"]) & set(after["run_keys"])


def test_the_end_of_time_requests_nothing_of_the_future(scores: Scores) -> None:
    scores.report(NEW_YEAR, final=True)
    days = scores.tick(limit=10**6)["keys"]
    assert days[0] == "2026-01-01"
    assert days == sorted(set(days))
    assert len(days) < 365 * 200


def test_a_service_that_is_away_is_polled_again(scores: Scores) -> None:
    assert "127.0.0.1:1" in scores.tick(url="http://127.0.0.1:1")["skipped"]


def test_a_job_that_is_gone_fails_the_evaluation(scores: Scores) -> None:
    scores.client.delete(scores.job)
    assert "UnknownJob" in scores.tick()["error"]


def test_partitions_that_a_watermark_cannot_complete_are_rejected(dagster: Path) -> None:
    code = """
from dagster import DailyPartitionsDefinition, StaticPartitionsDefinition, asset
from tidegauge_dagster import watermark_sensor
for partitions in (
    StaticPartitionsDefinition(["a"]),
    DailyPartitionsDefinition(start_date="2026-01-01", end_offset=1),
):
    @asset(partitions_def=partitions)
    def results() -> None: ...
    try:
        watermark_sensor(job="j", stage="s", partitions=partitions, target=[results])
    except (TypeError, ValueError) as error:
        print(error)
try:
    days = DailyPartitionsDefinition(start_date="2026-01-01")
    watermark_sensor(job="j", stage="s", partitions=days, target=[results], limit=0)
except ValueError as error:
    print(error)
"""
    first, second, third = run(dagster, "-c", code).splitlines()
    assert "StaticPartitionsDefinition: a watermark completes partitions of time alone" in first
    assert "end_offset=1" in second
    assert "limit is 0" in third


def test_an_hour_that_occurs_twice_is_requested_twice(dagster: Path) -> None:
    """The cursor finds its place also in the hour that clocks go back."""
    code = """
from datetime import UTC, datetime
from dagster import HourlyPartitionsDefinition
from tidegauge_dagster.partitions import complete_partitions
hours = HourlyPartitionsDefinition(start_date="2024-10-26-22:00", timezone="Europe/Berlin")
now, after, seen = datetime(2024, 10, 28, tzinfo=UTC), None, []
while found := complete_partitions(hours, 2**63 - 1, now, after, 1):
    [after] = found
    seen.append(after)
assert seen == hours.get_partition_keys(current_time=now), seen
print(len(seen), len(set(seen)))
"""
    assert run(dagster, "-c", code).split() == ["28", "28"]


def test_the_package_is_typed(dagster: Path, tmp_path: Path) -> None:
    assert type_errors("dagster", dagster, tmp_path) == ""

"""The sensor for Airflow: the page's DAG runs in a real Airflow, beside a real service."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from spark_agent.client.client import Client
from spark_agent.client.reports import RangeReport, Rank
from tests.integration.schedulers.conftest import environment_with, type_errors
from tests.support.commands import run
from tests.support.documents import block
from tests.support.server import ROOT, Service

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("airflow")]

SECOND_OF_JANUARY: Final = 1767312000000


class Books:
    """A job of the service whose source is reported for here, and the DAG that waits for it."""

    def __init__(self, service: Service, python: Path, home: Path, job: str) -> None:
        self.job, self._airflow = job, python.parent / "airflow"
        self.client = Client(service.url, patience_ms=30_000)
        self.client.declare(job, {"mobile": {"shards": ["a"]}})
        rank = Rank(self.client.open_run(job, ["mobile"], holder="me"), 0, 0)
        self._lease = self.client.claim(job, "mobile", None, holder="me", ttl_ms=600_000, rank=rank)
        connection = {"conn_type": "tidegauge", "host": "127.0.0.1", "port": service.port}
        self.variables = {
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW_CONN_TIDEGAUGE_DEFAULT": json.dumps(connection),
        }

    def report(self, watermark_ms: int) -> None:
        self.client.report(self.job, "mobile", self._lease, {"a": RangeReport(watermark_ms)})

    def start(self, **options: object) -> subprocess.Popen[str]:
        """Start the DAG of the page, with further arguments of the sensor."""
        more = "".join(f", {name}={value!r}" for name, value in options.items())
        code = block("python", "from airflow").replace('"scores"', f'"{self.job}"')
        code = code.replace('stage="sessions"', f'stage="mobile", poke_interval=0.2{more}')
        dags = Path(self.variables["AIRFLOW_HOME"], "dags")
        dags.mkdir(exist_ok=True)
        (dags / f"{self.job}.py").write_text(code.replace('"close_books"', f'"{self.job}"'))
        return subprocess.Popen(
            [self._airflow, "dags", "test", self.job, "2026-01-02"],
            env={**os.environ, **self.variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture(scope="module")
def home(airflow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an Airflow with its database."""
    folder = tmp_path_factory.mktemp("airflow-home")
    run(airflow.parent / "airflow", "db", "migrate", variables={"AIRFLOW_HOME": str(folder)})
    return folder


@pytest.fixture
def books(server: Service, airflow: Path, home: Path, request: pytest.FixtureRequest) -> Books:
    return Books(server, airflow, home, re.sub(r"\W+", "-", request.node.name).strip("-"))


def until(lines: Iterator[str], text: str) -> list[str]:
    """Read lines up to one with a text."""
    seen: list[str] = []
    for line in lines:
        seen.append(line)
        if text in line:
            return seen
    raise AssertionError(f"not in the output: {text}\n" + "".join(seen))


@pytest.mark.parametrize("deferrable", [False, True])
def test_the_dag_of_the_page_goes_on_once_everything_is_in(books: Books, deferrable: bool) -> None:
    books.report(SECOND_OF_JANUARY - 1)
    with books.start(deferrable=deferrable) as run:
        assert run.stdout is not None
        [*_, waiting] = until(run.stdout, "waiting: ")
        assert (
            "mobile is at 2026-01-01T23:59:59.999Z and not at 2026-01-02T00:00:00.000Z" in waiting
        )
        books.report(SECOND_OF_JANUARY)
        [*_, ended] = until(run.stdout, "DagRun Finished")
        run.stdout.read()
    assert "state=success" in ended


@pytest.mark.parametrize("deferrable", [False, True])
def test_a_job_that_is_gone_fails_at_once_without_retries(books: Books, deferrable: bool) -> None:
    books.report(SECOND_OF_JANUARY - 1)
    with books.start(deferrable=deferrable, retries=3) as run:
        assert run.stdout is not None
        until(run.stdout, "waiting: ")
        books.client.delete(books.job)
        lines = until(run.stdout, "DagRun Finished")
        run.stdout.read()
    assert "state=failed" in lines[-1]
    assert "AirflowFailException" in "".join(lines)
    assert f"'{books.job}'" in "".join(lines)
    assert not any("up_for_retry" in line for line in lines)


def test_airflow_lists_the_provider_and_tests_its_connection(books: Books, airflow: Path) -> None:
    listed = run(
        airflow.parent / "airflow", "providers", "list", "-o", "json", variables=books.variables
    )
    assert "tidegauge-airflow" in {each["package_name"] for each in json.loads(listed)}
    code = "from tidegauge_airflow import TidegaugeHook; print(*TidegaugeHook().test_connection())"
    assert "True the service answers" in run(airflow, "-c", code, variables=books.variables)
    for host in ("127.0.0.1", "not a host", ""):
        away = json.dumps({"conn_type": "tidegauge", "host": host, "port": 1})
        books.variables["AIRFLOW_CONN_TIDEGAUGE_DEFAULT"] = away
        assert "False" in run(airflow, "-c", code, variables=books.variables)


def test_a_connection_by_an_address_of_ipv6(books: Books, airflow: Path) -> None:
    books.variables["AIRFLOW_CONN_TIDEGAUGE_DEFAULT"] = "tidegauge://[::1]:1"
    code = "from tidegauge_airflow import TidegaugeHook; print(*TidegaugeHook().test_connection())"
    assert "GET http://[::1]:1/" in run(airflow, "-c", code, variables=books.variables)


def test_times_are_also_those_of_airflow(airflow: Path) -> None:
    """Airflow's own `datetime` and `timedelta` are pendulum's."""
    code = (
        "import pendulum; from spark_agent.times import duration_ms, read_instant_ms;"
        "print(read_instant_ms(pendulum.datetime(2026, 1, 2, tz='Europe/Berlin'), name='until'),"
        " duration_ms(pendulum.duration(hours=1)))"
    )
    assert run(airflow, "-c", code).split() == ["1767308400000", "3600000"]


@pytest.mark.parametrize("deferrable", [False, True])
def test_an_unknown_connection_fails_at_once_without_retries(
    books: Books, deferrable: bool
) -> None:
    books.report(SECOND_OF_JANUARY - 1)
    with books.start(deferrable=deferrable, retries=3, conn_id="gone") as run:
        assert run.stdout is not None
        lines = until(run.stdout, "DagRun Finished")
        run.stdout.read()
    assert "state=failed" in lines[-1]
    assert not any("up_for_retry" in line for line in lines)


def test_the_package_is_imported_with_the_oldest_airflow_that_it_names(tmp_path: Path) -> None:
    python = environment_with("airflow", tmp_path, locked=False)
    variables = {"AIRFLOW_HOME": str(tmp_path)}
    versions = "from importlib.metadata import version; print(version('apache-airflow'))"
    oldest = tomllib.loads((ROOT / "deploy/airflow/pyproject.toml").read_text())
    [named] = re.findall(r"apache-airflow>=([\d.]+)", str(oldest["project"]["dependencies"]))
    assert run(python, "-c", versions).strip().startswith(f"{named}.")
    code = (
        "from tidegauge_airflow import *; print(WatermarkTrigger('c', 'j', 's', 1, 1).serialize())"
    )
    assert "until_ms" in run(python, "-c", code, variables=variables)


def test_the_package_is_typed(airflow: Path, tmp_path: Path) -> None:
    assert type_errors("airflow", airflow, tmp_path) == ""

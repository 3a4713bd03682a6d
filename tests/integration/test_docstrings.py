"""The examples in the docstrings of the client's public classes run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from textwrap import indent

import pytest

from spark_agent import (
    AggregatorError,
    Arrival,
    AsyncClient,
    Client,
    NotInTime,
    Relay,
    Unavailable,
    Wrong,
)
from spark_agent.client.reports import RangeReport, Rank
from tests.support.documents import example_of, promised_output
from tests.support.server import ROOT, Service

NEW_YEAR = 1_767_225_600_000

IMPORTS = """\
import asyncio
from spark_agent import *
from spark_agent.client.errors import UnknownStage
from spark_agent.client.reports import RangeReport, Rank
client = Client("http://127.0.0.1:8000", patience_ms=30_000)
"""


@pytest.fixture(scope="module")
def parcels(server: Service) -> str:
    """A job with a stage that has reached the new year, and one that has not reported."""
    job, client = "parcels-of-docstrings", Client(server.url, patience_ms=30_000)
    client.declare(job, {"north": {"shards": ["a"]}, "south": {"shards": ["a"]}})
    rank = Rank(client.open_run(job, ["north"], holder="worker"), 0, 0)
    lease = client.claim(job, "north", None, holder="worker", ttl_ms=600_000, rank=rank)
    client.report(job, "north", lease, {"a": RangeReport(NEW_YEAR)})
    return job


def output_of(code: str, server: Service, job: str) -> str:
    """Run an example against a service; return its output."""
    code = f"{IMPORTS}{code}".replace("http://127.0.0.1:8000", server.url)
    code = code.replace('"parcels"', f'"{job}"').replace("1 min", "1 s")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(job, "parcels")


def test_the_client(server: Service) -> None:
    code = example_of(Client)
    assert re.fullmatch(promised_output(code), output_of(code, server, "scans-of-docstrings"))


def test_the_client_for_asyncio(server: Service, parcels: str) -> None:
    code = example_of(AsyncClient)
    run = f"async def example():\n{indent(code, '    ')}\nasyncio.run(example())\n"
    assert re.fullmatch(promised_output(code), output_of(run, server, parcels))


def test_an_arrival(server: Service, parcels: str) -> None:
    code = example_of(Arrival)
    assert output_of(code, server, parcels) == "everything before has arrived\n"
    late = output_of(code.replace('"north"', '"south"'), server, parcels)
    assert re.fullmatch(promised_output(code).replace("north", "south"), late)


def test_errors_by_the_action_of_the_caller(server: Service, parcels: str) -> None:
    code = example_of(AggregatorError)
    assert output_of(code, server, parcels) == ""
    late = output_of(code.replace('"north"', '"south"'), server, parcels)
    assert re.fullmatch(promised_output(code).replace("1,000", r"[\d,]+"), late)
    wrong = output_of(code.replace('"north"', '"nowhere"'), server, parcels)
    assert wrong.startswith("correct the request: 404")
    away = code.replace("client.wait_until", 'Client("http://127.0.0.1:1").wait_until')
    assert output_of(away, server, parcels) == "retry later\n"


def test_a_service_that_is_unavailable(server: Service, parcels: str) -> None:
    assert output_of(example_of(Unavailable), server, parcels).startswith("retry: ")


def test_a_watermark_that_is_not_in_time(server: Service, parcels: str) -> None:
    shown = output_of(example_of(NotInTime), server, parcels)
    assert "ranges of south has never reported" in shown


def test_a_wrong_request(server: Service, parcels: str) -> None:
    code = example_of(Wrong)
    assert re.fullmatch(promised_output(code), output_of(code, server, parcels))


def test_a_relay(server: Service, parcels: str) -> None:
    code = example_of(Relay)
    assert re.fullmatch(promised_output(code), output_of(code, server, parcels))

"""The commands that show a job, against what a service may answer only at times."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from spark_agent.client import Client
from spark_agent.errors import Refused, Unavailable
from spark_agent.polling import Waiting
from tests.unit.agent.answers import Answer, Answers, FakeClock

ROOT = Path(__file__).parents[3]
COMMANDS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "entry-points"
]["tidegauge.commands"]


def command(name: str) -> Callable[..., object]:
    module, _, attribute = COMMANDS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def run(name: str, *arguments: str) -> Result:
    app = typer.Typer(rich_markup_mode="markdown")
    app.command(name)(command(name))
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


OF_A_STAGE = [
    *("show", "history", "eta", "explain", "throttle", "wait"),
    *("jobs", "watch", "ranges", "apply", "delete"),
]


@pytest.mark.parametrize("name", OF_A_STAGE)
def test_help_has_examples(name: str) -> None:
    assert f"tidegauge {name}" in run(name, "--help").stdout


def test_an_answer_of_something_else_is_no_traceback() -> None:
    with Answers(Answer(body={"message": "welcome"})) as server:
        found = run("explain", "scores", "average", "--url", server.url)
    assert found.exit_code == 2
    assert "is this tidegauge?" in found.stderr


# ---- waiting


def at(output: int | None) -> Answer:
    return Answer(body={"output_watermark": output, "input_watermark": None, "status": "active"})


def waiting(server: Answers, clock: FakeClock) -> Waiting:
    client = Client(server.url, patience_ms=1_000, clock=clock, jitter=lambda: 1.0)
    return Waiting(client, clock, "scores", "average", target_ms=50, poll_s=10)


def test_it_asks_until_the_watermark_is_there() -> None:
    said: list[str] = []
    with Answers(at(None), at(49), at(50)) as server:
        waited = waiting(server, FakeClock()).wait(60_000, said.append)
    assert (waited.reached, waited.seen["output_watermark"]) == (True, 50)
    assert {asked.path for asked in server.asked} == {
        "/v1/jobs/scores/stages/average/watermark?at_least=50"
    }
    assert [asked.headers["Prefer"] for asked in server.asked] == ["wait=0", "wait=10", "wait=10"]
    assert said == []


def test_a_service_that_is_away_for_a_while_is_waited_for() -> None:
    clock = FakeClock()
    said: list[str] = []
    away = [Answer(503)] * 100
    with Answers(at(1), *away, at(50)) as server:
        waited = waiting(server, clock).wait(3_600_000, said.append)
    assert waited.reached
    assert waited.waited_ms > 10_000
    [line] = said
    assert "status 503: waiting for it to come back" in line


def test_it_gives_up_in_time_also_while_the_service_is_away() -> None:
    clock = FakeClock()
    with Answers(at(1), Answer(503)) as server:
        waited = waiting(server, clock).wait(30_000, lambda _: None)
    assert (waited.reached, waited.seen["output_watermark"]) == (False, 1)
    assert 30_000 <= waited.waited_ms <= 32_000


def test_a_last_answer_from_before_an_outage_does_not_count_as_reached() -> None:
    """The job may have been reset since."""
    clock = FakeClock()
    with Answers(at(1), at(2), Answer(503)) as server:
        waited = waiting(server, clock).wait(10_000, lambda _: None)
    assert not waited.reached


def test_a_service_that_was_never_there_is_not_waited_for() -> None:
    with Answers(Answer(503)) as server, pytest.raises(Unavailable):
        waiting(server, FakeClock()).wait(3_600_000, lambda _: None)
    with Answers(Answer(403, {"type": "/problems/forbidden"})) as server, pytest.raises(Refused):
        waiting(server, FakeClock()).wait(3_600_000, lambda _: None)


def test_where_somebody_watches_it_shows_where_it_is_and_what_is_left() -> None:
    said: list[str] = []
    expected = {
        "at": 50,
        "reached": False,
        "expected_at": "2026-01-01T00:05:00.000Z",
        "between": ["2026-01-01T00:04:00.000Z", "2026-01-01T00:07:00.000Z"],
        "confidence": 0.8,
        "because": "…",
    }
    unknown = expected | {"expected_at": None, "between": None}
    with Answers(at(7), Answer(body=expected), at(8), Answer(body=unknown), at(50)) as server:
        waited = waiting(server, FakeClock()).wait(60_000, said.append, estimates=True)
    assert waited.reached
    first = (
        "will get to 1970-01-01T00:00:00.050Z at about 2026-01-01T00:05:00.000Z, between"
        " 2026-01-01T00:04:00.000Z and 2026-01-01T00:07:00.000Z in 80% of all cases"
    )
    second = "will get to 1970-01-01T00:00:00.050Z, nobody can say when"
    assert said == [
        f"average is at 1970-01-01T00:00:00.007Z (active) and {first}",
        f"average is at 1970-01-01T00:00:00.008Z (active) and {second}",
    ]

"""The commands that show a job, against what a service may answer only at times."""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from spark_agent.client.client import Client
from spark_agent.client.sensor import Arrival
from spark_agent.client.watermark_wait import WatermarkWait
from spark_agent.exceptions import (
    NotInTime,
    Unavailable,
    Wrong,
    WrongAddress,
)
from tests.unit.agent.answers import Answer, Answers, FakeClock

ROOT = Path(__file__).parents[3]
COMMANDS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "entry-points"
]["tidegauge.commands"]


def command(name: str) -> Callable[..., object]:
    module, _, attribute = COMMANDS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def app_of(name: str) -> tuple[typer.Typer, list[str]]:
    """Return an application with a command, and the arguments that name the command in it."""
    found = command(name)
    app = typer.Typer(rich_markup_mode="markdown")
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=name)
        return app, [name]
    app.command(name)(found)
    return app, []


def run(name: str, *arguments: str) -> Result:
    app, before = app_of(name)
    return CliRunner().invoke(app, [*before, *arguments], env={"COLUMNS": "200"})


OF_A_STAGE = [
    *("show", "history", "eta", "explain", "throttle", "wait"),
    *("jobs", "watch", "ranges", "apply", "export", "delete", "status", "retire", "schema"),
]


@pytest.mark.parametrize("name", OF_A_STAGE)
def test_help_has_examples(name: str) -> None:
    assert f"tidegauge {name}" in run(name, "--help").stdout


def test_an_answer_of_something_else_is_no_traceback() -> None:
    with Answers(Answer(body={"message": "welcome"})) as server:
        found = run("explain", "scores", "average", "--url", server.url)
    assert found.exit_code == 4
    assert "is this tidegauge?" in found.stderr


# ---- waiting


def at(output: int | None) -> Answer:
    return Answer(body={"output_watermark": output, "input_watermark": None, "status": "active"})


def waiting(server: Answers, clock: FakeClock) -> WatermarkWait:
    client = Client(server.url, patience_ms=1_000, clock=clock, jitter=lambda: 1.0)
    return WatermarkWait(client, clock, "scores", "average", target_ms=50, poll_s=10)


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
    assert "status 503: retrying" in line


def test_it_gives_up_in_time_also_while_the_service_is_away() -> None:
    clock = FakeClock()
    with Answers(at(1), Answer(503)) as server:
        waited = waiting(server, clock).wait(30_000, lambda _: None)
    assert (waited.reached, waited.seen["output_watermark"]) == (False, 1)
    assert 30_000 <= waited.waited_ms <= 33_000
    assert waited.outcome == "unavailable"
    with pytest.raises(Unavailable, match=r"does not answer; when it last did"):
        waited.require()
    *_, last = server.asked
    assert last.headers["Prefer"] == "wait=1", "longer than it could wait for the answer"


def test_a_last_answer_from_before_an_outage_does_not_count_as_reached() -> None:
    """The job may have been reset since."""
    clock = FakeClock()
    with Answers(at(1), at(2), Answer(503)) as server:
        waited = waiting(server, clock).wait(10_000, lambda _: None)
    assert not waited.reached


def test_a_service_that_is_away_at_the_start_is_waited_for() -> None:
    clock = FakeClock()
    said: list[str] = []
    with Answers(*[Answer(503)] * 100, at(50)) as server:
        waited = waiting(server, clock).wait(3_600_000, said.append)
    assert waited.outcome == "reached"
    assert waited.require()["output_watermark"] == 50
    [line] = said
    assert "status 503: retrying" in line


def test_it_is_waited_for_until_the_timeout_and_no_longer() -> None:
    clock = FakeClock()
    began_ms = clock.steady_ms()
    with Answers(Answer(503)) as server, pytest.raises(Unavailable):
        waiting(server, clock).wait(60_000, lambda _: None)
    assert 60_000 <= clock.steady_ms() - began_ms <= 63_000


@pytest.mark.parametrize(
    "answer",
    [
        Answer(403, {"type": "/problems/forbidden"}),
        Answer(401, {"type": "/problems/unauthenticated"}),
        Answer(404, {"type": "/problems/unknown-job"}),
        Answer(302, "", {"Location": "http://elsewhere/"}),
    ],
    ids=lambda answer: str(answer.status),
)
def test_what_a_retry_does_not_mend_is_not_retried(answer: Answer) -> None:
    clock = FakeClock()
    with Answers(answer) as server:
        with pytest.raises((Wrong, WrongAddress)):
            waiting(server, clock).wait(3_600_000, lambda _: None)
        done = run("wait", "scores", "s", "--until", "5", "--url", server.url)
    assert clock.pauses_ms == []
    assert done.exit_code == 5


def test_each_outcome_of_waiting_has_an_exit_code_and_a_word() -> None:
    arguments: tuple[str, ...] = ("wait", "scores", "s", "--timeout", "0s", "--json", "--until")
    with Answers(at(50)) as server:
        there = run(*arguments, "50", "--url", server.url)
    with Answers(at(49)) as server:
        late = run(*arguments, "50", "--url", server.url)
    assert (there.exit_code, json.loads(there.stdout)["outcome"]) == (0, "reached")
    assert (late.exit_code, json.loads(late.stdout)["outcome"]) == (3, "not in time")
    assert run(*arguments, "50", "--url", "http://127.0.0.1:1").exit_code == 4
    for wrong in ("1796490355", "soon"):
        assert run(*arguments, wrong).exit_code == 5
    assert run("wait", "scores", "s/s", "--until", "5").exit_code == 5
    assert run("wait", "scores", "s", "--timeout", "1h").exit_code == 2
    help_text = " ".join(run("wait", "--help").stdout.split())
    for word in ("0: reached", "3: not in time", "4: the service is unavailable", "is wrong"):
        assert word in help_text


def test_an_arrival_has_the_same_words() -> None:
    def outcome(*answers: Answer) -> str | None:
        with Answers(*answers) as server:
            arrival = Arrival(Client(server.url, patience_ms=500), "scores", "s", 50)
            assert arrival.outcome is None
            try:
                assert arrival.is_complete() == (arrival.outcome == "reached")
            except Wrong:
                assert arrival.outcome == "wrong"
            return arrival.outcome

    assert outcome(at(50)) == "reached"
    assert outcome(at(49), Answer(body={"because": "…"})) == "not in time"
    assert outcome(at(49), Answer(503)) == "not in time"
    assert outcome(Answer(503)) == "unavailable"
    assert outcome(Answer(404, {"type": "/problems/unknown-stage"})) == "wrong"


def test_what_is_required_in_time_is_an_error_otherwise() -> None:
    with Answers(at(7)) as server:
        waited = waiting(server, FakeClock()).wait(0, lambda _: None)
    with pytest.raises(NotInTime, match=r"is at 1970-01-01T00:00:00\.007Z"):
        waited.require()


def test_a_terminal_shows_the_position_of_t_the_time_left_and_the_cause() -> None:
    lines: list[str] = []
    clock = FakeClock(now_ms=1_767_225_600_000)
    expected = {
        "at": 50,
        "reached": False,
        "expected_at": "2026-01-01T00:05:00.000Z",
        "between": ["2026-01-01T00:04:00.000Z", "2026-01-01T00:07:30.000Z"],
        "confidence": 0.8,
        "because": "…",
    }
    unknown = expected | {"expected_at": None, "between": None}
    cause = Answer(body={"because": "average waits for mobile"})
    answers = (
        *(at(7), Answer(body=expected), cause),
        *(at(8), Answer(body=unknown), Answer(404, {"type": "/problems/unknown-stage"})),
        at(50),
    )
    with Answers(*answers) as server:
        waited = waiting(server, clock).wait(60_000, lines.append, estimates=True)
    assert waited.reached
    target = "1970-01-01T00:00:00.050Z"
    left = "about 5 min left (4 min to 7 min 30 s)"
    ahead = "timeout in 1 min"
    assert lines == [
        f"average is at 1970-01-01T00:00:00.007Z of {target}; {left}; {ahead}; average waits for mobile",
        f"average is at 1970-01-01T00:00:00.008Z of {target}; no estimate of the time left; {ahead}",
    ]

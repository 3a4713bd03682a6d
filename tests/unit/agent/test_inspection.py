"""The commands that show a job, against answers of the contract's shape."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from spark_agent.client import Client, Refused, Unavailable
from spark_agent.waiting import Waiting
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


OF_A_STAGE = ["show", "history", "eta", "explain", "throttle", "wait"]


@pytest.mark.parametrize("name", OF_A_STAGE)
def test_help_has_examples(name: str) -> None:
    assert f"tidegauge {name}" in run(name, "--help").stdout


EXPLAINED: dict[str, Any] = {
    "job": "scores",
    "stage": "average",
    "output_watermark": 1_767_225_600_000,
    "status": "active",
    "since": "2026-01-01T00:00:03.120Z",
    "because": "average waits for sessions, where range 00000000-40000000 (holder exec-3) keeps a hold"
    " 'state' at 2026-01-01T00:00:00Z, unchanged for 12 s",
    "path": [{"stage": "average", "reason": "input"}, {"stage": "sessions", "reason": "ranges"}],
    "holders": [
        {
            "stage": "sessions",
            "range": "00000000-40000000",
            "reason": "buffering",
            "component": "state[0]",
            "promise": 1_767_225_600_000,
            "would_be": 1_767_225_660_000,
            "holder": "exec-3",
            "fence": 42,
            "expires_in_ms": 5_120,
            "reported_at": "2026-01-01T00:00:15.000Z",
            "since": "2026-01-01T00:00:03.000Z",
        },
        {
            "stage": "sessions",
            "range": "40000000-80000000",
            "reason": "never_reported",
            "component": None,
            "promise": None,
            "would_be": None,
            "holder": None,
            "fence": None,
            "expires_in_ms": None,
            "reported_at": None,
            "since": None,
        },
    ],
    "holders_total": 1_003,
}


def test_an_explanation_is_a_tree() -> None:
    with Answers(Answer(body=EXPLAINED)) as server:
        found = run("explain", "scores", "average", "--limit", "2", "--url", server.url)
    assert server.asked[0].path == "/v1/jobs/scores/stages/average/explain?limit=2"
    assert found.exit_code == 0
    branches = re.compile(r"[│├└─ ]*")
    lines = [branches.sub("", line, count=1) for line in found.stdout.rstrip().splitlines()]
    depths = [len(branches.match(line)[0]) for line in found.stdout.splitlines()]  # type: ignore[index]
    assert [line.rstrip() for line in lines] == [
        "average: 2026-01-01T00:00:00.000Z (active, since 2026-01-01T00:00:03.120Z)",
        EXPLAINED["because"],
        "average waits for its input",
        "sessions waits for its ranges",
        "00000000-40000000: buffering by 'state[0]', since 2026-01-01T00:00:03.000Z",
        "promise 2026-01-01T00:00:00.000Z; without it, 2026-01-01T00:01:00.000Z",
        "holder exec-3 (fence 42, 5.1 s left), reported at 2026-01-01T00:00:15.000Z",
        "40000000-80000000: never reported",
        "promise none yet",
        "holder nobody",
        "and 1,001 more: --limit",
    ]
    assert [depth // 4 for depth in depths] == [0, 1, 1, 2, 3, 4, 4, 3, 4, 4, 3]


def test_a_final_stage_is_explained_by_itself() -> None:
    final = EXPLAINED | {
        "status": "final",
        "because": "average is final",
        "path": [{"stage": "average", "reason": "final"}],
        "holders": [],
        "holders_total": 0,
    }
    with Answers(Answer(body=final)) as server:
        found = run("explain", "scores", "average", "--url", server.url)
    assert "average final" in found.stdout
    assert "more" not in found.stdout


THROTTLED: dict[str, Any] = {
    "version": 7,
    "groups": [
        {
            "stages": ["mobile", "console"],
            "limit": 1_767_225_660_000,
            "held_by": {"stage": "console", "range": "console-0"},
        },
        {"stages": ["web"], "limit": None, "held_by": None},
    ],
    "shards": {
        "mobile": {
            "mobile-0": {
                "pause": True,
                "until": 1_767_225_660_000,
                "rate": 1.0,
                "because": "it is 2 min ahead of console-0",
            }
        },
        "web": {"web-0": {"pause": False, "until": None, "rate": 0.5, "because": "of lag"}},
    },
}


def test_throttling_is_a_table_of_groups_and_one_of_shards() -> None:
    with Answers(Answer(body=THROTTLED)) as server:
        found = run("throttle", "scores", "--url", server.url)
    assert server.asked[0].path == "/v1/jobs/scores/throttle"
    rows = [" ".join(line.split()) for line in found.stdout.splitlines()]
    assert rows == [
        "group limit held by",
        "mobile, console 2026-01-01T00:01:00.000Z console console-0",
        "web no limit",
        "stage shard pause until rate because",
        "mobile mobile-0 yes 2026-01-01T00:01:00.000Z 1 it is 2 min ahead of console-0",
        "web web-0 no no limit 0.5 of lag",
    ]


def test_where_nothing_is_throttled_it_says_so() -> None:
    with Answers(Answer(body={"version": 1, "groups": [], "shards": {}})) as server:
        found = run("throttle", "scores", "--url", server.url)
    assert found.stdout == "no shard of job scores is asked to wait\n"


@pytest.mark.parametrize(
    ("arguments", "body"),
    [(("explain", "scores", "average"), EXPLAINED), (("throttle", "scores"), THROTTLED)],
)
def test_json_is_the_answer_as_it_is(arguments: tuple[str, ...], body: dict[str, Any]) -> None:
    with Answers(Answer(body=body)) as server:
        found = run(*arguments, "--json", "--url", server.url)
    assert json.loads(found.stdout) == body


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
    assert {asked.headers["Prefer"] for asked in server.asked} == {"wait=10"}
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

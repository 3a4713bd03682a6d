"""Instants as people give them (`tests/data/instants.json`), at each place that takes one."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from spark_agent import Arrival, AsyncClient, Client
from spark_agent.times import read_instant_ms
from tests.unit.agent.answers import Answer, Answers
from tests.unit.agent.test_inspection import at, run

CASES = json.loads((Path(__file__).parents[2] / "data" / "instants.json").read_text())
SECONDS = 1_796_490_355
BOTH_READINGS = (
    "is ambiguous: write 1796490355s for seconds (2026-12-05T17:05:55Z), 1796490355ms for"
    " milliseconds (1970-01-21T19:01:30.355Z), or ISO 8601"
)
EIGHT_HOURS_EAST = timezone(timedelta(hours=8))
ETA = {
    "at": 0,
    "reached": True,
    "expected_at": None,
    "between": None,
    "confidence": 0.8,
    "because": "…",
}


@pytest.mark.parametrize("case", CASES["read"], ids=lambda case: repr(case["given"]))
def test_an_instant_is_read(case: Any) -> None:
    assert read_instant_ms(case["given"], name="T") == case["ms"]


@pytest.mark.parametrize("case", CASES["rejected"], ids=lambda case: repr(case["given"]))
def test_what_may_be_another_instant_is_rejected(case: Any) -> None:
    with pytest.raises(ValueError, match=r"^(invalid )?T ") as refusal:
        read_instant_ms(case["given"], name="T")
    for named in case["names"]:
        assert named in str(refusal.value)


@pytest.mark.parametrize("given", [SECONDS, str(SECONDS)])
@pytest.mark.parametrize(
    "use",
    [
        lambda client, given: client.wait_until("scores", "s", given, timeout=0),
        lambda client, given: client.eta("scores", "s", given),
        lambda client, given: Arrival(client, "scores", "s", given),
    ],
    ids=["wait_until", "eta", "Arrival"],
)
def test_the_client_asks_nothing_for_what_may_be_seconds(
    use: Callable[[Client, object], object], given: object
) -> None:
    with Answers(at(2**53)) as server:
        with pytest.raises(ValueError, match=r"is ambiguous") as refusal:
            use(Client(server.url), given)
        assert server.asked == []
    assert BOTH_READINGS in str(refusal.value)


@pytest.mark.anyio
async def test_nor_does_the_client_for_asyncio() -> None:
    async with AsyncClient("http://127.0.0.1:1") as client:
        with pytest.raises(ValueError, match=r"is ambiguous"):
            await client.wait_until("scores", "s", SECONDS)
        with pytest.raises(ValueError, match=r"is ambiguous"):
            await client.eta("scores", "s", SECONDS)


@pytest.mark.parametrize(
    "arguments",
    [
        ("wait", "scores", "s", "--until"),
        ("eta", "scores", "s"),
        ("history", "scores", "s", "--from"),
        ("history", "scores", "s", "--to"),
    ],
    ids=" ".join,
)
def test_a_command_asks_nothing_for_what_may_be_seconds(arguments: tuple[str, ...]) -> None:
    with Answers(at(2**53)) as server:
        done = run(*arguments, str(SECONDS), "--url", server.url)
        assert server.asked == []
    assert done.exit_code == 5
    assert BOTH_READINGS in done.stderr


@pytest.mark.parametrize(
    ("moment", "ms"),
    [
        (datetime(2026, 1, 1, 8, tzinfo=EIGHT_HOURS_EAST), 1_767_225_600_000),
        (datetime(2026, 1, 1, tzinfo=UTC), 1_767_225_600_000),
        (datetime(2026, 1, 1), 1_767_225_600_000),  # noqa: DTZ001
        ("2026-01-01T08:00:00+08:00", 1_767_225_600_000),
        ("1767225600s", 1_767_225_600_000),
        ("1767225600ms", 1_767_225_600),
    ],
)
def test_the_client_sends_milliseconds_whatever_it_is_given(
    moment: datetime | str, ms: int
) -> None:
    with Answers(at(2**53), Answer(body=ETA)) as server:
        client = Client(server.url)
        assert client.wait_until("scores", "s", moment, timeout=0).reached
        client.eta("scores", "s", moment)
        assert Arrival(client, "scores", "s", moment).until_ms == ms
    [waited, estimated] = server.asked
    assert waited.path.endswith(f"?at_least={ms}")
    assert estimated.path.endswith(f"?at={ms}")


def test_a_command_prints_the_instant_that_it_understood() -> None:
    understood = "2026-11-25T16:00:00.000Z"
    given = ("2026-11-25T17:00:00+01:00", "1795622400s", "1795622400000ms", "1795622400000")
    for each in given:
        with Answers(at(2**53)) as server:
            waited = run("wait", "scores", "s", "--until", each, "--url", server.url)
        assert f"s has reached {understood}" in waited.stderr
        with Answers(at(1)) as server:
            late = run(
                *("wait", "scores", "s", "--until", each, "--timeout", "0s", "--url", server.url)
            )
        assert understood in late.stderr
        with Answers(Answer(body={"points": []})) as server:
            past = run("history", "scores", "s", "--from", each, "--url", server.url)
        assert f"from {understood}" in past.stderr


def test_a_command_that_waits_prints_it_before_it_waits() -> None:
    with Answers(at(1), at(2), at(2**53)) as server:
        waited = run("wait", "scores", "s", "--until", "1795622400s", "--url", server.url)
    assert waited.stderr.splitlines() == [
        "tidegauge wait: s is to reach 2026-11-25T16:00:00.000Z, within 1h",
        "tidegauge wait: s has reached 2026-11-25T16:00:00.000Z",
    ]


def test_json_has_the_instant_that_was_understood() -> None:
    url: tuple[str, ...]
    understood = "2026-11-25T16:00:00.000Z"
    with Answers(at(2**53)) as server:
        url = ("--json", "--url", server.url)
        waited = run("wait", "scores", "s", "--until", "1795622400s", *url)
    assert json.loads(waited.stdout)["understood"] == understood
    with Answers(Answer(body=ETA)) as server:
        url = ("--json", "--url", server.url)
        assert json.loads(run("eta", "scores", "s", "1795622400s", *url).stdout)["understood"] == (
            understood
        )
    with Answers(Answer(body={"points": []})) as server:
        url = ("--json", "--url", server.url)
        past = run("history", "scores", "s", "--to", "1795622400s", *url)
    assert json.loads(past.stdout)["understood"] == {"to": understood}

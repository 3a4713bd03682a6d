"""`tidegauge retire`: it shows what moves, and retires once that is confirmed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import Result

from spark_agent.times import MAX_MS
from tests.unit.agent.answers import Answer, Answers, problem
from tests.unit.agent.test_inspection import run

HOUR = 1_767_225_600_000
WATER: dict[str, Any] = {
    "job": "water",
    "stage": "taps",
    "range": "tap-2",
    "retired": False,
    "promise": HOUR,
    "holder": "worker-1",
    "held_by": "tap-1",
    "moves": [
        {
            "stage": "taps",
            "before": {"input_watermark": None, "output_watermark": HOUR, "status": "active"},
            "after": {"input_watermark": None, "output_watermark": MAX_MS, "status": "final"},
        },
        {
            "stage": "sums",
            "before": {"input_watermark": HOUR, "output_watermark": None, "status": "unknown"},
            "after": {"input_watermark": MAX_MS, "output_watermark": None, "status": "unknown"},
        },
    ],
}
MOVES = """\
tap-2 of taps has promised 2026-01-01T00:00:00.000Z
worker-1 holds a lease on it: its next report ends the retirement
taps: output 2026-01-01T00:00:00.000Z -> the end of time
taps becomes final, which cannot be taken back
sums: input 2026-01-01T00:00:00.000Z -> the end of time
without tap-2, the lowest range of taps is tap-1
"""


def retire(server: Answers, *options: str) -> Result:
    return run(
        *("retire", "water", "taps", "tap-2", "--because", "closed", "--url", server.url), *options
    )


def sent(server: Answers) -> list[Any]:
    assert {asked.path for asked in server.asked} == {
        "/v1/jobs/water/stages/taps/ranges/tap-2/retire"
    }
    return [asked.body for asked in server.asked]


DRY, DONE = ({"because": "closed", "dry_run": each} for each in (True, False))


def test_the_moves_are_shown_before() -> None:
    with Answers(Answer(body=WATER), Answer(body=WATER | {"retired": True})) as server:
        found = retire(server, "--yes")
        assert sent(server) == [DRY, DONE]
    assert found.stdout == MOVES + "tap-2 of taps is retired until its next report\n"
    assert found.exit_code == 0


def test_a_dry_run_changes_nothing() -> None:
    with Answers(Answer(body=WATER)) as server:
        found = retire(server, "--dry-run")
        assert sent(server) == [DRY]
    assert (found.stdout, found.exit_code) == (MOVES, 0)


def test_without_a_confirmation_nothing_is_retired() -> None:
    with Answers(Answer(body=WATER)) as server:
        found = retire(server)
        assert sent(server) == [DRY]
    assert found.exit_code == 1
    assert "Retire tap-2 of taps?" in found.stderr


@pytest.mark.parametrize(
    ("range_state", "shown"),
    [
        ({"retired": True, "moves": []}, "tap-2 of taps is retired already\n"),
        ({"promise": MAX_MS, "moves": []}, "tap-2 of taps is final already\n"),
    ],
)
def test_a_range_that_is_not_waited_for_stays_so(range_state: Any, shown: str) -> None:
    with Answers(Answer(body=WATER | range_state)) as server:
        found = retire(server, "--yes")
        assert sent(server) == [DRY]
    assert (found.stdout, found.exit_code) == (shown, 0)


def test_a_range_whose_retirement_moves_nothing_is_named() -> None:
    quiet = WATER | {"promise": None, "holder": None, "moves": []}
    with Answers(Answer(body=quiet)) as server:
        found = retire(server, "--dry-run")
    assert found.stdout == (
        "tap-2 of taps has never promised\n"
        "all watermarks stay where they are: another range, or another input, holds them\n"
        "without tap-2, the lowest range of taps is tap-1\n"
    )


@pytest.mark.parametrize("held_by", [{"held_by": None}, {}])
def test_a_stage_without_another_range_has_not_a_lowest_one(held_by: Any) -> None:
    """An older service does not name it."""
    last = {name: each for name, each in WATER.items() if name != "held_by"} | held_by
    with Answers(Answer(body=last)) as server:
        found = retire(server, "--dry-run")
    assert found.stdout.splitlines() == MOVES.splitlines()[:-1]


def test_it_prints_json() -> None:
    done = WATER | {"retired": True}
    with Answers(Answer(body=WATER), Answer(body=done)) as server:
        assert json.loads(retire(server, "--yes", "--json").stdout) == done


def test_an_unknown_range_is_named_with_the_way_to_the_others() -> None:
    with Answers(problem(404, "unknown-range")) as server:
        found = retire(server, "--yes")
    assert found.exit_code == 5
    assert "so it is: see `tidegauge ranges water taps`" in found.stderr


def test_a_reason_is_required() -> None:
    found = run("retire", "water", "taps", "tap-2", "--yes")
    assert found.exit_code == 2
    assert "--because" in found.stderr

"""A ledger of each older release is upgraded by the start of the service, with nothing lost."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.support.api import problem
from tests.support.old_ledger import FOLDER, HOUR, promise, put, report
from tests.support.server import Service

KEPT: Final = frozenset(
    {"job", "stage", "generation", "version", "status", "input_watermark", "output_watermark"}
    | {"updated_at", "run", "epoch"}
)
"""Members of answers that come from the ledger alone."""
RELEASES: Final = sorted(path.stem for path in FOLDER.glob("*.sql"))


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def client(release: str, tmp_path: Path) -> Iterator[httpx.Client]:
    """A service of today on the ledger of a release."""
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        connection.executescript((FOLDER / f"{release}.sql").read_text())
    with Service(tmp_path) as service, httpx.Client(base_url=service.url, timeout=60) as client:
        yield client


def kept(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name in KEPT}


def test_the_last_release_is_among_them() -> None:
    assert "0.2.0" in RELEASES


def test_answers_are_as_before(client: httpx.Client, release: str) -> None:
    before = json.loads((FOLDER / f"{release}.json").read_text())
    for path, answer in before.items():
        assert kept(client.get(path).raise_for_status().json()) == kept(answer), path


def test_promises_are_kept_and_held_to(client: httpx.Client) -> None:
    """Only a newer run may go on, from the promises of the older one."""
    ranges = client.get("/v1/jobs/water/stages/taps/ranges").raise_for_status().json()["ranges"]
    assert {each["range"]: each["promise"] for each in ranges} == {
        "tap-0": 5 * HOUR,
        "tap-1": 6 * HOUR,
    }
    claim = {"holder": "w", "ranges": ["tap-0"], "run": 0, "epoch": 2, "attempt": 0}
    run = put(client, "POST", "/v1/jobs/water/runs", {"stages": ["taps"], "holder": "driver"})[
        "run"
    ]
    assert run > 1
    older = client.post("/v1/jobs/water/stages/taps/leases", json=claim | {"run": 1})
    problem(older, 409, "stale-run")
    taps = {"tap-0": promise(9), "tap-1": promise(8)}
    report(client, "water/stages/taps", taps, run=run, epoch=2)
    body = {"run": run, "epoch": 2, "stages": {"taps": {}}}
    put(client, "POST", "/v1/jobs/water/commits", body)
    moved = client.get("/v1/jobs/water/stages/taps/watermark").raise_for_status().json()
    assert moved["output_watermark"] == 8 * HOUR
    assert moved["generation"] == 1

"""`tidegauge reset` against a real service."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from spark_agent.client.client import Client
from spark_agent.client.reports import RangeReport, Rank
from spark_agent.times import MAX_MS
from tests.support.server import Service
from tests.unit.agent.answers import Answer, Answers

COMMAND = [sys.executable, "-m", "service.cli", "reset"]
SPEC = {"taps": {"shards": ["north"]}}


def run(*arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input=answer,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_final_source_starts_over(tmp_path: Path) -> None:
    with Service(tmp_path) as service:
        client = Client(service.url)
        client.declare("water", SPEC)
        run_number = client.open_run("water", ["taps"], holder="me")
        lease = client.claim(
            "water", "taps", None, holder="me", ttl_ms=5_000, rank=Rank(run_number, 0, 0)
        )
        client.report("water", "taps", lease, {"north": RangeReport(final=True)})
        assert client.watermarks("water")["taps"].output_ms == MAX_MS
        refused = run("water", "--url", service.url, answer="n\n")
        assert refused.returncode == 1
        assert client.watermarks("water")["taps"].output_ms == MAX_MS
        done = run("water", "--url", service.url, "--yes", "--json")
        assert (done.returncode, json.loads(done.stdout)) == (0, {"job": "water", "generation": 2})
        assert client.watermarks("water")["taps"].output_ms is None
        unknown = run("fire", "--url", service.url, "--yes")
        assert unknown.returncode == 5
        assert f"there is no job 'fire' at {service.url}" in unknown.stderr
        wrong = run("wa ter", "--url", service.url, "--yes")
        assert wrong.returncode == 5
        [line] = wrong.stderr.splitlines()
        assert line.startswith("tidegauge reset: job 'wa ter' is not a valid name: use up to 128")


def test_a_generation_that_the_ledger_does_not_know_any_more_is_begun(tmp_path: Path) -> None:
    with Service(tmp_path) as service:
        client = Client(service.url)
        client.declare("water", SPEC)
        where = ("water", "--url", service.url, "--yes")
        done = run(*where, "--generation", "4")
        assert (done.returncode, done.stdout) == (0, "job water starts over, in generation 4\n")
        assert client.generation("water") == 4
        for begun in ("4", "2"):
            refused = run(*where, "--generation", begun)
            assert refused.returncode == 5
            [line] = refused.stderr.splitlines()
            assert line == (
                f"tidegauge reset: job water is in generation 4, so {begun} cannot begin again: leave "
                f"out --generation to begin the next one"
            )
        assert client.generation("water") == 4
        typo = run(*where, "--generation", "40000")
        assert typo.returncode == 5
        assert "40000 is more than 1,000 resets away" in typo.stderr
        assert client.generation("water") == 4
        never = run(*where, "--generation", "1")
        assert never.returncode == 2
        # In the words of two releases of typer.
        assert "greater than or equal to 2" in never.stderr or "x>=2" in never.stderr


def test_nobody_there() -> None:
    done = run("water", "--url", "http://127.0.0.1:1", "--yes")
    assert done.returncode == 4
    [line] = done.stderr.splitlines()
    assert "is tidegauge at http://127.0.0.1:1? Choose another with --url" in line


def test_a_store_that_does_not_answer_is_named() -> None:
    """It was taken for a wrong address."""
    problem = {"type": "/problems/unavailable", "detail": "the ledger does not answer: refused."}
    with Answers(Answer(503, problem)) as server:
        done = run("water", "--url", server.url, "--yes")
    assert done.returncode == 4
    [line] = done.stderr.splitlines()
    assert line.endswith("status 503: the ledger does not answer: refused. Retry")

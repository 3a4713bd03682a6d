"""`tidegauge show`, `history`, `eta` and `wait` against a real service."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_agent.client.client import Client
from spark_agent.client.reports import RangeReport, Rank
from spark_agent.times import MAX_MS
from tests.support.server import ROOT, Service
from tests.unit.agent.test_inspection import run

SPEC = {"taps": {"shards": ["north"]}, "hourly": {"inputs": ["taps"], "ranges": 2}}
NEW_YEAR = 1_767_225_600_000
MINUTE = 60_000


class Water:
    """A job with a source whose only shard is reported for here."""

    def __init__(self, service: Service, job: str) -> None:
        self.service = service
        self.job = job
        self.client = Client(service.url, patience_ms=30_000)
        self.client.declare(job, SPEC)

    def report(self, *watermarks_ms: int) -> None:
        number = self.client.open_run(self.job, ["taps"], holder="me")
        lease = self.client.claim(
            self.job, "taps", None, holder="me", ttl_ms=600_000, rank=Rank(number, 0, 0)
        )
        for watermark_ms in watermarks_ms:
            self.client.report(self.job, "taps", lease, {"north": RangeReport(watermark_ms)})


@pytest.fixture
def water(server: Service, request: pytest.FixtureRequest) -> Water:
    return Water(server, re.sub(r"\W+", "-", request.node.name)[:100])


def test_show_lists_jobs_stages_and_what_holds_a_stage(water: Water) -> None:
    water.report(NEW_YEAR)
    url = ("--url", water.service.url)
    assert water.job in run("show", *url).stdout
    jobs = json.loads(run("show", "--json", *url).stdout)["jobs"]
    assert {
        "job": water.job,
        "generation": 1,
        "layout_version": 1,
        "stages": ["taps", "hourly"],
    } in [{**each, "stages": list(each["stages"])} for each in jobs]
    of_job = run("show", water.job, *url).stdout
    [taps] = [line.split() for line in of_job.splitlines() if line.startswith("taps")]
    assert taps[:4] == ["taps", "active", "none", "2026-01-01T00:00:00.000Z"]
    assert taps[-3:] == ["1/1", "1/1", "0"]
    of_stage = run("show", water.job, "hourly", *url).stdout
    rows = [" ".join(line.split()) for line in of_stage.splitlines()]
    assert "00000000-80000000 never reported none yet none never" in rows
    found = json.loads(run("show", water.job, "hourly", "--json", *url).stdout)
    assert found["watermark"]["input_watermark"] == NEW_YEAR
    assert len(found["held_by"]) == 2


def test_stages_are_shown_in_the_order_of_the_graph(water: Water) -> None:
    """They were in the order of their names, so that a stage was shown above its inputs."""
    stages = {"a-last": {"inputs": ["z-first"], "ranges": 1}, "z-first": {"shards": ["0"]}}
    water.client.declare(f"{water.job}-2", stages)
    where = (f"{water.job}-2", "--url", water.service.url)
    shown = run("show", *where).stdout.splitlines()
    assert [line.split()[0] for line in shown[1:3]] == ["z-first", "a-last"]
    watched = run("watch", *where, "--count", "1").stdout.splitlines()
    assert [line.split()[0] for line in watched[2:4]] == ["z-first", "a-last"]


def test_show_has_the_promise_of_a_source_from_the_specification(water: Water) -> None:
    promise = "at - INTERVAL 10 MINUTES"
    taps = {"shards": ["north"], "watermark": promise}
    water.client.declare(water.job, {**SPEC, "taps": taps}, replace=True)
    url = ("--url", water.service.url)
    assert f"promise of a shard: {promise}\n" in run("show", water.job, "taps", *url).stdout
    assert "promise of a shard" not in run("show", water.job, "hourly", *url).stdout
    for stage, expected in (("taps", promise), ("hourly", None)):
        found = json.loads(run("show", water.job, stage, "--json", *url).stdout)
        assert found["promise"] == expected


def test_nothing_holds_a_final_stage(water: Water) -> None:
    water.report(MAX_MS)
    asked = ("show", water.job, "taps", "--url", water.service.url)
    assert json.loads(run(*asked, "--json").stdout)["held_by"] == []
    assert "slowest ranges" not in run(*asked).stdout


def test_history_is_a_table_or_the_answer(water: Water) -> None:
    water.report(NEW_YEAR, NEW_YEAR + MINUTE)
    asked = ("history", water.job, "taps", "--points", "10000", "--url", water.service.url)
    [head, *rows] = run(*asked).stdout.splitlines()
    columns = ["at", "input", "watermark", "output", "watermark", "advance", "status"]
    assert head.split() == columns
    assert rows[0].split()[1:] == ["none", "none", "yet", "unknown"]
    assert " at first " in " ".join(rows)
    assert rows[-1].split()[1:3] == ["none", "2026-01-01T00:01:00.000Z"]
    points = json.loads(run(*asked, "--json", "--from", "2026-01-01").stdout)["points"]
    assert points[0]["output_watermark"] is None
    assert NEW_YEAR < points[0]["at"] <= points[1]["at"], "the job did not exist at the begin"
    assert points[-1]["output_watermark"] == NEW_YEAR + MINUTE


def test_eta_says_when_or_why_not(water: Water) -> None:
    water.report(NEW_YEAR)
    asked = ("eta", water.job, "taps", "--url", water.service.url)
    reached = run(*asked, "2026-01-01T00:00:00Z")
    assert reached.stdout == (
        "taps has reached 2026-01-01T00:00:00.000Z:"
        " the output watermark is at 2026-01-01T00:00:00.000Z\n"
    )
    later = run(*asked, "2026-01-01T01:00:00+00:00")
    assert later.stdout.startswith(
        "taps is not at 2026-01-01T01:00:00.000Z yet, and an estimate is not possible:"
    )
    assert "\ntaps waits for " in later.stdout, "the cause"
    assert (reached.exit_code, later.exit_code) == (0, 7)
    assert json.loads(run(*asked, str(NEW_YEAR), "--json").stdout)["reached"] is True


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("show", "nosuch"), "there is no job 'nosuch' at http"),
        (("history", "JOB", "nosuch"), "has no stage 'nosuch': see `tidegauge show "),
        (("eta", "JOB", "taps", "soon"), "invalid T 'soon': write it like 2026-01-01T00:00:00Z"),
        (("eta", "JOB", "taps", str(2**63 - 2)), "at is 9223372036854775806"),
        (("wait", "JOB", "taps", "--until", "5", "--timeout", "soon"), "invalid --timeout 'soon'"),
        (("wait", "JOB", "taps", "--until", "x"), "invalid --until 'x'"),
        (("history", "JOB", "taps", "--from", "2026-01-02", "--to", "2026-01-01"), "after to"),
        (("wait", "nosuch", "taps", "--until", "5"), "there is no job 'nosuch'"),
        (("show", "../x"), "job '../x' is not a valid name"),
    ],
)
def test_what_goes_wrong_is_said_in_a_line(
    water: Water, arguments: tuple[str, ...], says: str
) -> None:
    done = run(*(water.job if a == "JOB" else a for a in arguments), "--url", water.service.url)
    assert done.exit_code == 5
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "JOB" not in done.stderr


def test_a_key_that_is_missing_is_asked_for(tmp_path: Path) -> None:
    secret = "operator-0123456789abcdef0123456789abcdef"
    with Service(tmp_path, environment={"TIDEGAUGE_ADMIN_KEY": secret}) as service:
        done = run("show", "--url", service.url)
        assert done.exit_code == 5
        assert "Name a file with a key that may read: --key-file" in done.stderr
        (tmp_path / "key").write_text(secret)
        done = run("show", "--url", service.url, "--key-file", str(tmp_path / "key"))
        assert done.exit_code == 0


def test_waiting_ends_at_once_where_there_is_nothing_to_wait_for(water: Water) -> None:
    water.report(NEW_YEAR)
    asked = ("wait", water.job, "taps", "--url", water.service.url, "--until")
    done = run(*asked, "2026-01-01T00:00:00Z", "--timeout", "0s")
    assert (done.exit_code, done.stdout) == (0, "taps is at 2026-01-01T00:00:00.000Z\n")
    late = run(*asked, str(NEW_YEAR + 1), "--timeout", "0s", "--json")
    assert late.exit_code == 3
    outcome = json.loads(late.stdout)
    assert (outcome["reached"], outcome["output_watermark"]) == (False, NEW_YEAR)
    assert f"see `tidegauge explain {water.job} taps`" in late.stderr
    assert outcome["because"].startswith("taps waits for range ")
    assert late.stderr.splitlines()[-1] == f"tidegauge wait: {outcome['because']}"


def test_a_wait_for_a_stage_without_a_watermark_ends_in_words(water: Water) -> None:
    done = run(
        *("wait", water.job, "taps", "--url", water.service.url),
        *("--until", "2026-01-01T00:00:00Z", "--timeout", "0s"),
    )
    assert done.exit_code == 3
    assert "taps is without a watermark and not at 2026-01-01T00:00:00.000Z: see" in done.stderr


@pytest.fixture
def waiter(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`tidegauge wait`, as a process beside a service that is restarted under it."""
    with Service(tmp_path) as service:
        water = Water(service, "water")
        water.report(NEW_YEAR)
        code = "import typer; from spark_agent.cli.wait import wait; typer.run(wait)"
        arguments = ("water", "taps", "--until", str(NEW_YEAR + MINUTE), "--url", service.url)
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        service.restart()
        water.report(NEW_YEAR + MINUTE)
        yield process
        process.kill()
        process.communicate()


def test_waiting_survives_a_restart(waiter: subprocess.Popen[str]) -> None:
    out, err = waiter.communicate(timeout=120)
    assert (waiter.returncode, out) == (0, "taps is at 2026-01-01T00:01:00.000Z\n"), err

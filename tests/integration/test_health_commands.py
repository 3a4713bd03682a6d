"""The commands speak from health and problems: the dead are not shown as alive."""

from __future__ import annotations

import json
import re

import pytest

from spark_agent.client.client import Client
from spark_agent.client.reports import RangeReport, Rank
from tests.support.binaries import wait_until
from tests.support.server import Service
from tests.unit.agent.test_inspection import run

SHARDS = [f"c-{k:02}" for k in range(24)]
STAGES = {
    "clicks": {"shards": SHARDS},
    "both": {"inputs": ["clicks"], "passthrough": True},
}
BECAUSE = r"24 of 24 ranges of clicks have no worker since [^(]*\(their last run was stopped\)"


class Job:
    """A job whose only run ends."""

    def __init__(self, service: Service, name: str, outcome: str) -> None:
        self.url, self.name = service.url, name
        client = Client(service.url, patience_ms=30_000)
        client.declare(name, STAGES)
        opened = client.open_run(name, ["clicks"], holder="driver-1")
        lease = client.claim(
            name, "clicks", None, holder="exec-3", ttl_ms=600_000, rank=Rank(opened, 0, 0)
        )
        client.report(name, "clicks", lease, {each: RangeReport(5) for each in SHARDS})
        if outcome == "finished" or outcome == "stopped":
            client.end_run(name, opened, outcome)

    def run(self, command: str, *arguments: str) -> str:
        done = run(command, self.name, *arguments, "--url", self.url)
        assert done.exit_code == 0, done.stderr
        return re.sub(r"\s+", " ", done.stdout)


@pytest.fixture
def job_name(request: pytest.FixtureRequest) -> str:
    return re.sub(r"\W+", "-", request.node.name)[:100]


def test_the_dead_are_not_shown_as_alive(server: Service, job_name: str) -> None:
    """`show`, `ranges`, `jobs` and `watch` said active."""
    job = Job(server, job_name, "stopped")
    shown = job.run("show")
    assert "clicks no worker" in shown
    assert "both waiting" in shown
    assert re.search(rf"no worker: {BECAUSE}; both waits for clicks", shown)
    assert "active" not in shown
    of_stage = job.run("show", "clicks")
    assert "c-00 no worker" in of_stage
    assert "active" not in of_stage
    assert "active" not in job.run("ranges", "clicks")
    assert re.search(f"both waits for clicks: {BECAUSE}", job.run("explain", "both"))
    watched = job.run("watch", "--count", "1")
    assert re.search(BECAUSE, watched)
    assert "active" not in watched
    assert f"{job_name} 2 no worker clicks" in job.run("jobs")
    found = json.loads(job.run("show", "--json"))
    assert [each["health"] for each in found["problems"]] == ["no_worker"]
    [line] = json.loads(job.run("jobs", "--json"))["jobs"]
    assert (line["health"], line["status"]) == ("no_worker", "active")


def test_a_job_between_two_nights_has_ended(server: Service, job_name: str) -> None:
    job = Job(server, job_name, "finished")
    shown = job.run("show", "clicks")
    assert "clicks ended" in shown
    assert "c-00 ended" in shown
    assert "no worker" not in shown
    explained = job.run("explain", "clicks")
    assert ": the last run of clicks finished at " in explained
    assert "no worker" not in explained


def test_all_is_well(server: Service, job_name: str) -> None:
    shown = Job(server, job_name, "").run("show")
    assert "clicks active" in shown
    assert "no worker" not in shown


def status(*arguments: str) -> tuple[int, str]:
    """Return the exit code of `status`, and its lines."""
    done = run("status", *arguments)
    return done.exit_code, re.sub(r" since [^(]*", " ", done.stdout)


@pytest.mark.parametrize("outcome", ["", "finished"])
def test_the_status_of_a_job_without_problems_is_0(
    server: Service, job_name: str, outcome: str
) -> None:
    job = Job(server, job_name, outcome)
    assert status(job.name, "--url", job.url) == (0, f"{job.name}: active\n")


def test_the_status_of_a_job_whose_ranges_are_silent_is_1(server: Service, job_name: str) -> None:
    Client(server.url, patience_ms=30_000).declare(job_name, {"taps": {"shards": ["a", "b"]}})
    code, lines = status(job_name, "--url", server.url)
    assert code == 1
    assert lines.startswith(f"{job_name}: silent\nsilent: ")


def test_the_status_of_a_job_whose_workers_are_gone_is_2(server: Service, job_name: str) -> None:
    """Also of all jobs, one of which is this one."""
    job = Job(server, job_name, "stopped")
    code, lines = status(job.name, "--url", job.url)
    assert code == 2
    assert lines == (
        f"{job.name}: no worker\n"
        "no worker: 24 of 24 ranges of clicks have no worker (their last run was stopped);"
        " both waits for clicks\n"
    )

    def is_listed() -> bool:
        code, lines = status("--url", job.url, "--limit", "10000")
        return code == 2 and f"\n{job.name}: no worker: 24 of 24 ranges" in f"\n{lines}"

    # The list of all jobs' problems may be some seconds old.
    wait_until(is_listed, "the job is listed with its problem")
    found = run("status", job.name, "--url", job.url, "--json")
    assert found.exit_code == 2
    assert json.loads(found.stdout)["health"] == "no_worker"


def test_the_status_of_more_jobs_than_the_limit(server: Service, job_name: str) -> None:
    for number in range(2):
        Job(server, f"{job_name}-{number}", "stopped")
    code, lines = status("--url", server.url, "--limit", "1")
    assert code == 2
    shown, rest = lines.splitlines()
    assert "no worker" in shown or "failed" in shown
    assert re.fullmatch(r"\d+ more: --limit \d+", rest)


def test_an_unknown_status_is_3(server: Service) -> None:
    assert run("status", "nosuch", "--url", server.url).exit_code == 3
    away = run("status", "--url", "http://127.0.0.1:1")
    assert away.exit_code == 3
    assert "is tidegauge at http://127.0.0.1:1?" in away.stderr

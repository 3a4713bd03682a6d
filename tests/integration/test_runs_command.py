"""`tidegauge runs` on a real service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_agent import Client
from tests.support.server import Service
from tests.unit.agent.test_inspection import run

SPEC = {"s": {"shards": ["0"]}, "t": {"shards": ["0"]}}


class Job:
    def __init__(self, client: Client, url: str) -> None:
        self.client, self.url = client, url
        client.declare("j", SPEC)

    def text(self, *arguments: str) -> str:
        done = run("runs", "j", *arguments, "--url", self.url)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    def shown(self, *arguments: str) -> list[list[str]]:
        """The numbers and the outcomes."""
        return [line.split()[:2] for line in self.text(*arguments).splitlines()[1:]]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Service(tmp_path) as service, Client(service.url) as client:
        yield Job(client, service.url)


def test_each_run_is_shown_with_its_end(job: Job) -> None:
    for stages in (["s"], ["s", "t"], ["s"], ["t"]):
        job.client.open_run("j", stages, "driver", links={"spark": "http://driver:4040"})
    job.client.end_run("j", 4, "failed", "out of memory")
    assert job.shown() == [["4", "failed"], ["3", "goes"], ["2", "fenced"], ["1", "fenced"]]
    assert job.shown("t") == [["4", "failed"], ["2", "fenced"]]
    assert job.shown("--limit", "1") == [["4", "failed"]]
    assert "out of memory" in job.text()
    assert "spark http://driver:4040" in job.text()


def test_a_run_does_not_outlive_a_reset(job: Job) -> None:
    job.client.open_run("j", ["s"], "driver")
    job.client.reset("j")
    assert job.shown() == [["1", "fenced"]]


def test_a_job_without_a_run(job: Job) -> None:
    assert job.text() == "job j does not have a run\n"
    assert job.text("s") == "stage s of job j does not have a run\n"


def test_a_stage_that_is_not_there(job: Job) -> None:
    done = run("runs", "j", "none", "--url", job.url)
    assert "see `tidegauge show j`" in done.stderr

"""Requests to open a run that the service finishes after their repetition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from spark_agent.client.client import Client
from spark_agent.client.errors import StaleRun
from spark_agent.driver.job import DeclaredJob, new_holder
from spark_agent.driver.preconditions import Resumption
from spark_agent.exceptions import OldCheckpointError
from spark_agent.jvm.checkpoint import Beginning
from spark_agent.jvm.progress import CommittedBatch
from tests.support.gateway import Holding
from tests.support.server import Service
from tests.unit.agent.queries import NoNotes, source, started
from tests.unit.agent.test_starting import Notes
from tests.unit.agent.test_supervisor import supervisor_of, until

JOB: Final = "j"
SPEC: Final = {"s": {"shards": ["a", "b"]}, "t": {"shards": ["a"]}}
STAGES: Final = ("s", "t")


class Driver:
    """A driver that starts one query, as a holder of its own."""

    def __init__(
        self, url: str, stages: Sequence[str] = STAGES, *, timeout_ms: int = 1_000
    ) -> None:
        self.client = Client(url, timeout_ms=timeout_ms, patience_ms=60_000)
        self.job = DeclaredJob(JOB, SPEC, client=self.client, throttle=None, replace=False)
        self.stages = stages
        self._holder = new_holder()
        self._resumption = Resumption(
            started([source(each) for each in stages]), Notes(Beginning(0))
        )
        self.newer_own_run = partial(
            self.job.newer_own_run,
            stages=stages,
            holder=self._holder,
            other_generation=self._resumption.other_generation,
        )

    def open(self) -> int:
        """Open a run, and return its number."""
        opened = self._resumption.opened
        return self.job.open_run(self.stages, self._holder, self._resumption.check, opened)

    def commit(self, run: int) -> None:
        self.client.commit(JOB, run, 0, dict.fromkeys(self.stages))

    def stale(self, run: int) -> StaleRun:
        """Return the error of a commit of this run."""
        with pytest.raises(StaleRun) as caught:
            self.commit(run)
        return caught.value


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path) as service:
        yield service


@pytest.fixture
def gateway(service: Service) -> Iterator[Holding]:
    with Holding(service.url) as gateway:
        yield gateway
        gateway.released.set()


def finish(gateway: Holding, client: Client) -> int:
    """Let the held request go on; return its run."""
    before = client.runs(JOB)["runs"][0]["run"]
    gateway.released.set()
    until(lambda: client.runs(JOB)["runs"][0]["run"] > before, "the held request opens a run")
    return client.runs(JOB)["runs"][0]["run"]


def test_a_run_that_an_overtaken_request_has_opened_is_the_driver_s_own(gateway: Holding) -> None:
    driver = Driver(gateway.url)
    run = driver.open()
    newer = finish(gateway, driver.client)
    assert newer > run
    assert driver.newer_own_run(run, driver.stale(run)) == newer
    driver.commit(newer)


def test_a_supervisor_goes_on_under_such_a_run(
    gateway: Holding, caplog: pytest.LogCaptureFixture
) -> None:
    """The query failed, as one that was taken over by itself."""
    driver = Driver(gateway.url, ["s"])
    run = driver.open()
    supervisor = supervisor_of(
        started([source("s")]),
        NoNotes(),
        run=run,
        client=driver.client,
        newer_own_run=driver.newer_own_run,
    )
    newer = finish(gateway, driver.client)
    supervisor.start()
    assert supervisor.commit_epoch(CommittedBatch(0, 0), 60_000)
    assert supervisor.running.failure is None
    assert driver.client.commits(JOB, "s")["run"] == newer
    assert driver.client.commits(JOB, "s")["epoch"] == 0
    assert f"query q goes on as run {newer}: the service was slow" in caplog.text
    supervisor.abandon("the test has ended")
    supervisor.join(60_000)


def test_another_start_in_the_same_process_fences(service: Service) -> None:
    """Its host and its process are the same."""
    first, second = Driver(service.url), Driver(service.url)
    run = first.open()
    second.open()
    stale = first.stale(run)
    with pytest.raises(StaleRun) as caught:
        first.newer_own_run(run, stale)
    assert caught.value is stale
    supervisor = supervisor_of(
        started([source("s")]),
        NoNotes(),
        run=run,
        client=first.client,
        newer_own_run=first.newer_own_run,
    )
    supervisor.start()
    assert not supervisor.commit_epoch(CommittedBatch(0, 0), 60_000)
    supervisor.join(60_000)
    assert "were taken over by driver-" in (supervisor.running.failure or "")


def test_a_driver_that_had_a_stage_in_between_fences(gateway: Holding, service: Service) -> None:
    """The overtaken request has fenced it in turn. It may have read what the first one has not."""
    first, second = Driver(gateway.url), Driver(service.url, ["t"])
    run = first.open()
    taken_over = second.open()
    newer = finish(gateway, first.client)
    stale = first.stale(run)
    assert stale.problem["run"] == newer
    with pytest.raises(StaleRun):
        first.newer_own_run(run, stale)
    with pytest.raises(StaleRun):
        second.newer_own_run(taken_over, second.stale(taken_over))


def test_a_reset_voids_such_a_run(gateway: Holding) -> None:
    driver = Driver(gateway.url)
    run = driver.open()
    newer = finish(gateway, driver.client)
    stale = driver.stale(run)
    assert driver.newer_own_run(run, stale) == newer
    driver.client.reset(JOB)
    stale = driver.stale(newer)
    assert stale.problem.get("run") is None
    with pytest.raises(StaleRun):
        driver.newer_own_run(newer, stale)


def test_such_a_run_after_a_reset_is_of_another_generation(gateway: Holding) -> None:
    """The query would go on in the new generation, with rows of the old one read."""
    driver = Driver(gateway.url)
    run = driver.open()
    driver.client.reset(JOB)
    finish(gateway, driver.client)
    stale = driver.stale(run)
    with pytest.raises(OldCheckpointError, match="generation"):
        driver.newer_own_run(run, stale)

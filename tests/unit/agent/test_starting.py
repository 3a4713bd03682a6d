"""What is compared before a run is opened: the checkpoint's next batch and the job's last epoch."""

from __future__ import annotations

import pytest

from spark_agent.checkpoint import Beginning
from spark_agent.client import Client
from spark_agent.errors import UnknownStage
from spark_agent.job import DeclaredJob
from spark_agent.reporting import OldCheckpointError
from spark_agent.starting import Resumption
from tests.unit.agent.answers import Answer, Answers, FakeClock

SPEC = {"s": {"shards": ["a"]}, "t": {"inputs": ["s"], "ranges": 1}}
DECLARED = Answer(200, {"job": "j", "generation": 1, "layout_version": 1, "stages": SPEC})
OPENED = Answer(201, {"run": 7})


def resumption(next_batch: int, *, may_reread: bool = False) -> Resumption:
    return Resumption("q", lambda: Beginning(next_batch), may_reread=may_reread)


def commits(epoch: int | None) -> Answer:
    return Answer(200, {"job": "j", "stage": "s", "generation": 1, "run": 6, "epoch": epoch})


def problem(slug: str) -> Answer:
    body = {"type": f"/problems/{slug}", "title": "No.", "status": 404, "detail": "there is none"}
    return Answer(404, body, {"Content-Type": "application/problem+json"})


def declared(server: Answers) -> DeclaredJob:
    client = Client(server.url, clock=FakeClock(), jitter=lambda: 1.0)
    return DeclaredJob("j", SPEC, client=client, throttle=None, replace=False)


@pytest.mark.parametrize(
    ("next_batch", "last_epoch"),
    [
        (0, None),  # a new checkpoint of a new job
        (5, None),  # the job was reset, or is new to the service
        (5, 4),  # as after each end: Spark has committed the last batch, and so has the service
        (5, 3),  # killed between Spark's commit and the service's; or while batch 5 ran after that
        (500, 3),  # the service was away for long
    ],
)
def test_a_checkpoint_that_is_not_behind_is_taken(next_batch: int, last_epoch: int | None) -> None:
    resumption(next_batch).check(last_epoch)


@pytest.mark.parametrize(
    ("next_batch", "last_epoch"),
    [
        (0, 0),  # a new one
        (0, 41),
        (4, 4),  # a copy one batch old, or one that has planned the job's last batch anew
        (3, 4),
    ],
)
def test_a_checkpoint_that_is_behind_is_refused(next_batch: int, last_epoch: int) -> None:
    words = rf"query q begins with batch {next_batch}, but .* up to {last_epoch}: .* older copy"
    with pytest.raises(OldCheckpointError, match=words):
        resumption(next_batch).check(last_epoch)


def test_a_checkpoint_that_is_behind_is_told_where_that_is_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    resumption(4, may_reread=True).check(4)
    assert "query q begins with batch 4, but the job already has batches" in caplog.text


def test_a_checkpoint_is_read_once_and_after_the_epoch_only() -> None:
    """Another driver may go on from the same one meanwhile; later, the query itself has."""
    numbers = iter([5])
    found = Resumption("q", lambda: Beginning(next(numbers)), may_reread=False)
    found.check(None)
    found.check(4)
    with pytest.raises(OldCheckpointError):
        found.check(5)


@pytest.mark.parametrize(
    ("next_batch", "planned", "written"),
    [
        (0, None, None),
        (5, 4, None),  # no file sink, or an output that was emptied
        (5, 4, 4),  # as after each end
        (5, 4, 2),  # batches without rows leave nothing
        (4, 4, 4),  # killed after the output was written, before the batch was committed
        (4, 4, 3),  # or while it was written
    ],
)
def test_an_output_that_is_not_ahead_is_taken(
    next_batch: int, planned: int | None, written: int | None
) -> None:
    found = Beginning(next_batch, planned, written, "/out")
    Resumption("q", lambda: found, may_reread=False).check(None)


@pytest.mark.parametrize(
    ("next_batch", "planned", "written"), [(0, None, 0), (0, None, 9), (4, 3, 4), (4, 4, 5)]
)
def test_an_output_that_is_ahead_of_its_checkpoint_is_refused(
    next_batch: int, planned: int | None, written: int
) -> None:
    """Whatever the job knows: it may have been reset, or be away."""
    found = Beginning(next_batch, planned, written, "/out")
    words = rf"begins with batch {next_batch}, but its output /out already has .* up to {written}"
    with pytest.raises(OldCheckpointError, match=words):
        Resumption("q", lambda: found, may_reread=False).check(None)


def test_the_furthest_of_its_stages_counts() -> None:
    with (
        Answers(DECLARED, commits(None), commits(5)) as server,
        pytest.raises(OldCheckpointError, match="up to 5"),
    ):
        declared(server).open_run(["s", "t"], resumption(5).check)
    paths = [(each.method, each.path) for each in server.asked]
    assert paths == [
        ("PUT", "/v1/jobs/j"),
        ("GET", "/v1/jobs/j/stages/s/commits"),
        ("GET", "/v1/jobs/j/stages/t/commits"),
    ], "and no run is opened, which would fence another query"


def test_a_run_is_opened_after_the_comparison() -> None:
    with Answers(DECLARED, commits(4), OPENED) as server:
        assert declared(server).open_run(["s"], resumption(5).check) == 7
    assert server.asked[-1].path == "/v1/jobs/j/runs"


def test_a_service_that_does_not_know_the_question_yet_is_no_obstacle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Answers(DECLARED, problem("not-found"), OPENED) as server:
        assert declared(server).open_run(["s"], resumption(0).check) == 7
    assert "the service is older than this agent" in caplog.text


def test_a_stage_that_is_gone_is_no_older_service() -> None:
    with Answers(DECLARED, problem("unknown-stage")) as server, pytest.raises(UnknownStage):
        declared(server).open_run(["s"], resumption(0).check)

"""Comparison before a run is opened: the checkpoint's next batch and the job's last epoch."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace

import pytest

from spark_agent.client.client import Client
from spark_agent.client.errors import UnknownStage
from spark_agent.driver.job import Check, Commits, DeclaredJob, Opened
from spark_agent.driver.preconditions import Resumption
from spark_agent.exceptions import OldCheckpointError
from spark_agent.executor.task import Reaction
from spark_agent.jvm.checkpoint import Beginning
from tests.unit.agent.answers import Answer, Answers, FakeClock
from tests.unit.agent.queries import source, started

SPEC = {"s": {"shards": ["a"]}, "t": {"inputs": ["s"], "ranges": 1}}
DECLARED = Answer(200, {"job": "j", "generation": 1, "layout_version": 1, "stages": SPEC})
OPENED = Answer(201, {"run": 7})


class Notes:
    """A checkpoint in memory."""

    def __init__(self, *beginnings: Beginning) -> None:
        self._beginnings = list(beginnings)
        self.noted: list[tuple[int, int | None, int]] = []

    def read(self) -> Beginning:
        return self._beginnings.pop(0)

    def note(self, generation: int, rereads_to: int | None, run: int) -> None:
        self.noted.append((generation, rereads_to, run))

    def joined(self, generation: int, stage: str) -> Collection[str]:
        return ()

    def topic_ids(self, topic: str) -> Collection[str]:
        raise NotImplementedError

    def note_topic_id(self, topic: str, id_: str) -> None:
        raise NotImplementedError

    def note_joined(self, generation: int, stage: str, shards: Collection[str]) -> None:
        pass

    def states(self, stage: str) -> tuple[int, str] | None:
        return None

    def note_states(self, stage: str, epoch: int, states: str) -> None:
        pass


def callbacks(found: Resumption) -> tuple[Check, Opened]:
    return found.check, found.opened


def open_run(found: Resumption, has: Commits) -> None:
    """As `DeclaredJob.open_run` does it."""
    found.check(has)
    found.opened(replace(has, run=(has.run or 0) + 1))


def resume(
    notes: Notes, *, on_lost_checkpoint: Reaction = "stop", dynamic: tuple[str, ...] = ()
) -> Resumption:
    sources = [source(name, is_dynamic=True) for name in dynamic]
    return Resumption(started(sources, on_lost_checkpoint=on_lost_checkpoint), notes)


def resumption(next_batch: int) -> Resumption:
    return resume(Notes(Beginning(next_batch)))


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
    resumption(next_batch).check(Commits(1, last_epoch))


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
        resumption(next_batch).check(Commits(1, last_epoch))


def test_a_checkpoint_that_is_behind_is_told_where_that_is_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    resume(Notes(Beginning(4)), on_lost_checkpoint="continue").check(Commits(1, 4))
    assert "query q begins with batch 4, but the job already has batches" in caplog.text


def test_a_checkpoint_is_read_once_and_after_the_epoch_only() -> None:
    """Another driver may go on from the same one meanwhile; later, the query itself has."""
    found = resumption(5)
    found.check_output()
    found.check(Commits(1, 4))
    with pytest.raises(OldCheckpointError):
        found.check(Commits(1, 5))


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
    resume(Notes(found)).check_output()


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
        resume(Notes(found)).check_output()


def test_the_furthest_of_its_stages_counts() -> None:
    with (
        Answers(DECLARED, commits(None), commits(5)) as server,
        pytest.raises(OldCheckpointError, match="up to 5"),
    ):
        declared(server).open_run(["s", "t"], "driver-1", *callbacks(resumption(5)))
    paths = [(each.method, each.path) for each in server.asked]
    assert paths == [
        ("PUT", "/v1/jobs/j"),
        ("GET", "/v1/jobs/j/stages/s/commits"),
        ("GET", "/v1/jobs/j/stages/t/commits"),
    ], "and no run is opened, which would fence another query"


def test_a_run_is_opened_after_the_comparison() -> None:
    with Answers(DECLARED, commits(4), OPENED, DECLARED) as server:
        assert declared(server).open_run(["s"], "driver-1", *callbacks(resumption(5))) == 7
    assert [each.path for each in server.asked[-2:]] == ["/v1/jobs/j/runs", "/v1/jobs/j"]


def test_a_run_carries_its_program_and_its_links() -> None:
    links = {"spark": "http://driver:4040"}
    with Answers(DECLARED, commits(4), OPENED, DECLARED) as server:
        client = Client(server.url, clock=FakeClock(), jitter=lambda: 1.0)
        job = DeclaredJob(
            "j", SPEC, client=client, throttle=None, replace=False, program="p", links=links
        )
        assert job.open_run(["s"], "driver-1", *callbacks(resumption(5))) == 7
    body = server.asked[2].body
    assert (body["program"], body["links"]) == ("p", links)


def test_a_service_that_is_older_is_sent_neither() -> None:
    body = {"type": "/problems/invalid-request", "title": "No.", "status": 422, "detail": "unknown"}
    refused = Answer(422, body, {"Content-Type": "application/problem+json"})
    with Answers(DECLARED, commits(4), refused, OPENED, DECLARED) as server:
        client = Client(server.url, clock=FakeClock(), jitter=lambda: 1.0)
        job = DeclaredJob("j", SPEC, client=client, throttle=None, replace=False, program="p")
        assert job.open_run(["s"], "driver-1", *callbacks(resumption(5))) == 7
    assert set(server.asked[3].body) == {"stages", "holder"}


def test_a_reset_between_the_comparison_and_the_run_is_noticed() -> None:
    """The run is of the new generation: what the query had to report would be taken."""
    after = Answer(200, {"job": "j", "generation": 2, "layout_version": 1, "stages": SPEC})
    words = "is of generation 1 of job 'j', by its checkpoint, but the job is in generation 2"
    with (
        Answers(DECLARED, commits(4), OPENED, after) as server,
        pytest.raises(OldCheckpointError, match=words),
    ):
        declared(server).open_run(["s"], "driver-1", *callbacks(resumption(5)))


def test_a_checkpoint_notes_its_generation_and_its_run() -> None:
    notes = Notes(Beginning(0))
    found = resume(notes)
    open_run(found, Commits(3, None, 6))
    assert (notes.noted, found.other_generation(3)) == ([(3, None, 7)], None)


@pytest.mark.parametrize(
    ("next_batch", "now", "is_refused"), [(5, 6, True), (5, 7, False), (5, 8, False), (0, 0, False)]
)
def test_a_ledger_that_may_have_forgotten_shards_is_refused(
    next_batch: int, now: int, is_refused: bool
) -> None:
    def found(*dynamic: str, on_lost_checkpoint: Reaction = "stop") -> Resumption:
        notes = Notes(Beginning(next_batch, generation=1, run=7))
        return resume(notes, on_lost_checkpoint=on_lost_checkpoint, dynamic=dynamic)

    words = r"has had run 7, but .* is 6: .* the shards that have joined s, .* Add them"
    with pytest.raises(OldCheckpointError, match=words) if is_refused else nullcontext():
        found("s").check(Commits(1, None, now))
    found().check(Commits(1, None, now))
    found("s", on_lost_checkpoint="continue").check(Commits(1, None, now))
    found("s").check(Commits(1, None, None))


def test_a_ledger_that_is_lost_meanwhile_may_have_forgotten_shards() -> None:
    found = resume(Notes(Beginning(0)), dynamic=("s",))
    open_run(found, Commits(1, None, 0))
    with pytest.raises(OldCheckpointError, match=r"has had run 1, but .* is 0"):
        found.check(Commits(1, None, 0))


@pytest.mark.parametrize("last_epoch", [None, 4, 900])
@pytest.mark.parametrize(
    ("now", "words"),
    [
        (4, "generation 4: it was reset, .* new checkpoint and an empty output"),
        (2, r"generation 2: the service's ledger was lost, .* `tidegauge reset j --generation 3`"),
    ],
)
def test_a_checkpoint_of_another_generation_is_refused(
    now: int, words: str, last_epoch: int | None
) -> None:
    """Whatever batches the job has: those of two generations do not compare."""
    notes = Notes(Beginning(500, 499, generation=3))
    found = resume(notes)
    with pytest.raises(OldCheckpointError, match=words):
        found.check(Commits(now, last_epoch))
    assert notes.noted == []


def test_a_generation_that_changes_later_is_noticed() -> None:
    """By the feed, or when the supervisor opens a run for a service that was away, or is new."""
    found = resumption(5)
    found.check(Commits(3, 4))
    assert found.other_generation(3) is None
    assert "is of generation 3" in (found.other_generation(2) or "")
    with pytest.raises(OldCheckpointError, match="is of generation 3"):
        found.check(Commits(2, None))


@pytest.mark.parametrize("generation", [None, 3])
def test_while_the_service_is_away_the_checkpoint_says_the_generation(
    generation: int | None,
) -> None:
    found = resume(Notes(Beginning(5, 4, generation=generation)))
    found.check_output()
    assert (found.other_generation(4) is None) == (generation is None)
    assert (found.other_generation(3) is None) == (generation == 3)


def test_a_checkpoint_of_another_generation_goes_on_where_that_is_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And is of that one from then on."""
    notes = Notes(Beginning(5, 4, generation=1, rereads_to=9))
    found = resume(notes, on_lost_checkpoint="continue")
    open_run(found, Commits(2, 3, 6))
    assert "is of generation 1" in caplog.text
    assert notes.noted == [(2, None, 7)]
    assert found.other_generation(1) is not None


def test_who_went_on_behind_the_job_may_do_so_until_it_has_passed_that() -> None:
    notes = Notes(Beginning(0))
    first = resume(notes, on_lost_checkpoint="continue")
    open_run(first, Commits(1, 7, 2))
    assert notes.noted == [(1, 7, 3)]
    second = resume(Notes(Beginning(2, 1, generation=1, rereads_to=7)))
    second.check(Commits(1, 7))
    assert second.on_lost_checkpoint == "continue"
    # Another query has gone on, from another checkpoint.
    third = resume(Notes(Beginning(3, 2, generation=1, rereads_to=7)))
    with pytest.raises(OldCheckpointError, match="up to 8"):
        third.check(Commits(1, 8))
    last = resume(Notes(Beginning(8, 7, generation=1, rereads_to=7)))
    last.check(Commits(1, 7))
    assert last.on_lost_checkpoint == "stop"


def test_a_service_that_does_not_know_the_question_yet_is_no_obstacle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Answers(DECLARED, problem("not-found"), OPENED, DECLARED) as server:
        assert declared(server).open_run(["s"], "driver-1", *callbacks(resumption(0))) == 7
    assert "the service is older than this agent" in caplog.text


def test_a_stage_that_is_gone_is_no_older_service() -> None:
    with Answers(DECLARED, problem("unknown-stage")) as server, pytest.raises(UnknownStage):
        declared(server).open_run(["s"], "driver-1", *callbacks(resumption(0)))

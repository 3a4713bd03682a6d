"""Results of the feed: watermarks rise, survive restarts, and no failure stops a query."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import pytest
from py4j.protocol import Py4JNetworkError

from spark_agent.client.client import Client
from spark_agent.clock import SystemClock
from spark_agent.driver.feeds import Feeds
from spark_agent.driver.late_rows import LateRows
from spark_agent.driver.preconditions import Resumption
from spark_agent.driver.watermark_feed import WatermarkFeed
from spark_agent.exceptions import QueryFailedError
from spark_agent.jvm.checkpoint import Beginning
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.jvm.writer import Trigger
from spark_agent.soundness.operators import Promise
from spark_agent.sources.admission import Admission, Wanted
from spark_agent.sources.control import END_MS
from spark_agent.sources.driver_link import (
    LinkClient,
    LinkError,
    LinkServer,
    Offset,
    RetryLater,
)
from spark_agent.supervision.batch_waits import BatchWaits
from spark_agent.supervision.read_through import ReadThrough
from spark_agent.times import MAX_MS
from tests.support.binaries import wait_until
from tests.unit.agent.answers import Answer, Answers, FakeClock
from tests.unit.agent.queries import CONTINUOUS, NIGHTLY, TIMING, started

POLL_MS = TIMING.poll_ms
FINISH_TIMEOUT_MS = TIMING.finish_timeout_ms
STAGE = "s"


def at(input_ms: int | None, version: int = 1, generation: int = 1) -> Answer:
    body = {
        "input_watermark": input_ms,
        "output_watermark": None,
        "status": "unknown",
        "generation": generation,
    }
    return Answer(200, body, {"ETag": f'"{generation}-{version}"'})


@dataclass
class Supervisor:
    """Commits at once, or never."""

    commits: bool = True
    alive: bool = True
    committed: list[int] = field(default_factory=list[int])
    finalise_calls: int = 0
    finalises: bool = True
    has_read: bool = True

    def has_read_sessions(self) -> bool:
        return self.has_read

    def commit_epoch(self, batch: CommittedBatch, timeout_ms: int) -> bool:
        self.committed.append(batch.epoch)
        return self.commits

    def finalise_sources(self, timeout_ms: int) -> bool:
        self.finalise_calls += 1
        return self.finalises

    @property
    def last_error(self) -> str:
        return "503: the ledger does not answer"


@dataclass
class Query:
    """A query whose batches are done by the test."""

    clock: FakeClock
    latest: CommittedBatch | None = None
    is_active: bool = True
    failures: list[str] = field(default_factory=list[str])
    lost: Exception | None = None

    def latest_batch(self) -> CommittedBatch | None:
        if self.lost is not None:
            raise self.lost
        return self.latest

    def fail(self, message: str) -> None:
        self.failures.append(message)

    @property
    def failure(self) -> str | None:
        return self.failures[0] if self.failures else None

    def done(self, epoch: int, watermark_ms: int = 0, *, read_nothing: bool = False) -> None:
        self.latest = CommittedBatch(epoch, watermark_ms, read_nothing)


class NewCheckpoint:
    """Has nothing, and keeps nothing."""

    def read(self) -> Beginning:
        return Beginning(0)

    def note(self, generation: int, rereads_to: int | None, run: int) -> None:
        pass

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

    def watermark_before(self, batch: int) -> int:
        return 0


class Unthrottled(WatermarkFeed):
    """One that never says to hold."""

    def next(self, reader: str, stage: str, at: Offset, until_ms: int | None = None) -> Offset:
        found = super().next(reader, stage, at, until_ms)
        assert isinstance(found, Offset)
        return found


def feed(
    server: Answers,
    query: Query,
    supervisor: Supervisor | None = None,
    *,
    promises: Mapping[str, Promise] | None = None,
    caps_ms: Mapping[str, int | None] | None = None,
    waits: BatchWaits | None = None,
    read: ReadThrough | None = None,
    bounded: bool = False,
    trigger: Trigger = CONTINUOUS,
    patience_ms: int = TIMING.patience_ms,
) -> Unthrottled:
    started_query = started(
        promises={STAGE: Promise()} if promises is None else promises,
        inputs={STAGE: {"a", "b"}},
        bounded=bounded,
        trigger=trigger,
        timing=replace(TIMING, patience_ms=patience_ms),
    )
    client = Client(server.url, patience_ms=patience_ms, clock=query.clock, jitter=lambda: 1.0)
    return Unthrottled(
        started_query,
        query,
        supervisor=supervisor or Supervisor(),
        waits=waits or BatchWaits(started_query),
        read=read or ReadThrough(started_query, query.clock.wall_ms()),
        late_rows=LateRows({}, {}, NewCheckpoint()),
        caps_ms=caps_ms or {},
        other_generation=Resumption(started_query, NewCheckpoint()).other_generation,
        throttle=None,
        client=client,
        clock=query.clock,
    )


def test_each_start_takes_one_turn_and_then_waits_for_news() -> None:
    query = Query(FakeClock())
    with Answers(at(None)) as server:
        following = feed(server, query)
        first = following.next("r", STAGE, Offset(None, 0))
        assert first == Offset(None, 1)
        query.done(0)
        query.clock.now_ms += 1_000
        assert following.next("r", STAGE, first) == first


def test_a_query_that_has_failed_runs_no_other_batch() -> None:
    query = Query(FakeClock())
    with Answers(at(None)) as server:
        following = feed(server, query)
        first = following.next("r", STAGE, Offset(None, 0))
        query.fail("its checkpoint is lost")
        query.done(0)
        with pytest.raises(QueryFailedError, match="its checkpoint is lost"):
            following.next("r", STAGE, first)


def test_a_watermark_that_moves_is_handed_on_once() -> None:
    query = Query(FakeClock())
    with Answers(at(5), at(9, 2)) as server:
        following = feed(server, query)
        first = following.next("r", STAGE, Offset(None, 0))
        assert first == Offset(5, 1)
        query.clock.now_ms += POLL_MS
        wait_until(lambda: following.next("r", STAGE, first) == Offset(9, 2), "a long poll's end")


def test_a_batch_is_committed_before_the_watermark_is_asked_for() -> None:
    """So that what batch n has shown is in batch n + 1, whatever the poll interval."""
    query, supervisor = Query(FakeClock()), Supervisor()
    with Answers(at(5), at(9, 2)) as server:
        following = feed(server, query, supervisor)
        first = following.next("r", STAGE, Offset(None, 0))
        query.done(0)
        assert following.next("r", STAGE, first) == Offset(9, 2)
    assert supervisor.committed == [0]


def test_the_end_of_time_is_a_time_that_spark_can_count_to() -> None:
    with Answers(at(MAX_MS)) as server:
        following = feed(server, Query(FakeClock()))
        assert following.next("r", STAGE, Offset(5, 1)) == Offset(END_MS, 2)


def test_where_a_row_at_the_watermark_is_late_spark_is_given_a_millisecond_less() -> None:
    promises = {STAGE: Promise(), "rows": Promise(spark_lag_ms=1)}
    with Answers(at(60_000)) as server:
        following = feed(server, Query(FakeClock()), promises=promises)
        assert following.next("r", STAGE, Offset(None, 0)) == Offset(59_999, 1)


def test_it_never_goes_back() -> None:
    """The job was reset, or the service restored from an old backup; the query is further."""
    query = Query(FakeClock())
    with Answers(at(5), at(None, 2)) as server:
        following = feed(server, query)
        restarted = following.next("r", STAGE, Offset(70, 8))
        assert restarted == Offset(70, 9), "the first turn repeats what was known"
        query.done(3, 70)
        query.clock.now_ms += POLL_MS
        assert following.next("r", STAGE, restarted) == restarted


def test_a_checkpoint_at_the_end_of_time_is_of_no_use_to_a_job_that_started_over() -> None:
    with Answers(at(5)) as server:
        following = feed(server, Query(FakeClock()))
        with pytest.raises(QueryFailedError, match="a new checkpoint and an empty output"):
            following.next("r", STAGE, Offset(END_MS, 8))


def test_a_checkpoint_is_compared_once_the_service_answers() -> None:
    """It did not at the start, and the query went on for good, with every row dropped as late."""
    query = Query(FakeClock())
    with Answers(Answer(404, {"type": "/problems/unknown-job"}), at(5)) as server:
        following = feed(server, query)
        here = following.next("r", STAGE, Offset(END_MS, 8))
        assert query.failures == []
        query.clock.now_ms += 60_000
        with pytest.raises(QueryFailedError, match="a new checkpoint and an empty output"):
            following.next("r", STAGE, here)


def test_a_checkpoint_ahead_of_the_job_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    query = Query(FakeClock())
    with Answers(at(5)) as server:
        feed(server, query).next("r", STAGE, Offset(70, 8))
        feed(server, query).next("r", STAGE, Offset(5, 8))
        feed(server, query).next("r", STAGE, Offset(None, 8))
    assert query.failures == []
    [logged] = [
        record.getMessage() for record in caplog.records if "checkpoint" in record.getMessage()
    ]
    assert "checkpoint is at 1970-01-01T00:00:00.070Z, but the job is only at" in logged


def test_a_run_over_what_was_there_goes_no_further_than_it_was_then() -> None:
    with Answers(at(100)) as server:
        capped = feed(server, Query(FakeClock()), caps_ms={STAGE: 40})
        assert capped.next("r", STAGE, Offset(None, 0)) == Offset(40, 1)
        unknown = feed(server, Query(FakeClock()), caps_ms={STAGE: None})
        assert unknown.next("r", STAGE, Offset(None, 0)) == Offset(None, 1)


def test_a_batch_more_where_spark_has_not_run_with_what_it_was_handed() -> None:
    query = Query(FakeClock())
    with Answers(at(5)) as server:
        following = feed(server, query)
        handed = following.next("r", STAGE, Offset(None, 0))
        query.done(0, 0)
        again = following.next("r", STAGE, handed)
        assert again == Offset(5, 2), "else who only passes rows on would never see it"
        query.done(1, 5)
        assert following.next("r", STAGE, again) == again


def test_a_watermark_that_is_stuck_in_spark_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    query = Query(FakeClock())
    with Answers(at(5)) as server:
        following = feed(server, query)
        here = following.next("r", STAGE, Offset(None, 0))
        for epoch in range(10):
            query.done(epoch, 0)
            here = following.next("r", STAGE, here)
    logged = [
        record for record in caplog.records if "Spark's watermark is stuck" in record.getMessage()
    ]
    assert len(logged) == 1
    assert here.turn == 4, "no batches without end"


class MachineClock(FakeClock):
    """The clock of the machine, as that of a source's process."""

    def wall_ms(self) -> int:
        return SystemClock().wall_ms()

    def steady_ms(self) -> int:
        return SystemClock().steady_ms()


class InputsByStage(Answers):
    """Gives each stage an input watermark of its own."""

    def __init__(self, inputs_ms: Mapping[str, int | None]) -> None:
        super().__init__(at(None))
        self._inputs_ms = inputs_ms

    def choose(self, path: str) -> Answer:
        [input_ms] = [ms for stage, ms in self._inputs_ms.items() if f"/stages/{stage}/" in path]
        return at(input_ms)


def in_triggers(
    triggers: int, inputs_ms: Mapping[str, int | None], *, adopts: bool = True
) -> list[bool]:
    """Poll the sources of a union's stages in each trigger, and return which triggers ran a batch.

    Spark adopts the smallest watermark that its control sources have handed to it.
    """
    query = Query(FakeClock())
    with InputsByStage(inputs_ms) as server:
        following = feed(server, query, promises={stage: Promise() for stage in inputs_ms})
        here, ran = dict.fromkeys(inputs_ms, Offset(None, 0)), list[bool]()
        for _ in range(triggers):
            handed = [each.watermark_ms or 0 for each in here.values()]
            found = {each: following.next(f"of {each}", each, here[each]) for each in here}
            ran.append(found != here)
            if ran[-1]:
                query.done(sum(ran) - 1, min(handed) if adopts else 0)
            here = found
        return ran


@pytest.mark.parametrize("second_ms", [5, None])
def test_a_watermark_that_another_one_of_the_query_holds_back_is_not_awaited(
    second_ms: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A union of two stages with inputs of their own: `availableNow` runs never ended."""
    ran = in_triggers(8, {"first": 9, "second": second_ms})
    adopted = second_ms is not None
    assert ran == [True, adopted, False, False, False, False, False, False]
    assert "Spark's watermark is stuck" not in caplog.text


def test_the_smallest_watermark_of_a_query_is_awaited_and_not_for_ever() -> None:
    """Neither of two is adopted: the batches of the query are not computed."""
    ran = in_triggers(8, {"first": 9, "second": 5}, adopts=False)
    assert ran == [True, True, True, True, False, False, False, False]


class TestDrained:
    def test_an_empty_batch_shows_it(self) -> None:
        query, supervisor = Query(FakeClock()), Supervisor()
        with Answers(at(None)) as server:
            following = feed(server, query, supervisor, bounded=True, trigger=NIGHTLY)
            here = following.next("r", STAGE, Offset(None, 0))
            query.done(0)
            here = following.next("r", STAGE, here)
            assert (here, supervisor.finalise_calls) == (Offset(None, 2), 0), (
                "one more batch, to see"
            )
            query.done(1, read_nothing=True)
            following.next("r", STAGE, here)
            assert supervisor.finalise_calls == 1

    def test_a_trigger_without_a_batch_shows_it(self) -> None:
        query, supervisor = Query(FakeClock()), Supervisor()
        with Answers(at(None)) as server:
            following = feed(server, query, supervisor, bounded=True)
            here = following.next("r", STAGE, Offset(None, 0))
            query.done(0)
            assert following.next("r", STAGE, here) == here
            assert supervisor.finalise_calls == 0
            following.next("r", STAGE, here)
            assert supervisor.finalise_calls == 1

    def test_a_request_of_an_earlier_trigger_shows_nothing(self) -> None:
        """A driver that stalled handles it after the next one, whose trigger has just begun."""
        query, supervisor = Query(FakeClock()), Supervisor()
        with Answers(at(None)) as server:
            following = feed(server, query, supervisor, bounded=True)
            here = following.next("r", STAGE, Offset(None, 0))
            query.done(0)
            now_ms = query.clock.steady_ms()
            assert following.next("r", STAGE, here, now_ms + 1) == here
            with pytest.raises(LinkError):
                following.next("r", STAGE, here, now_ms)
            assert supervisor.finalise_calls == 0

    def test_another_reader_of_the_same_trigger_shows_nothing(self) -> None:
        query, supervisor = Query(FakeClock()), Supervisor()
        with Answers(at(None)) as server:
            following = feed(server, query, supervisor, bounded=True)
            here = following.next("left", STAGE, Offset(None, 0))
            following.next("right", STAGE, Offset(None, 0))
            query.done(0)
            following.next("left", STAGE, here)
            following.next("right", STAGE, here)
            assert supervisor.finalise_calls == 0

    def test_a_repeated_batch_of_an_earlier_start_shows_nothing(self) -> None:
        query, supervisor = Query(FakeClock()), Supervisor()
        query.done(7, read_nothing=True)
        with Answers(at(None)) as server:
            following = feed(server, query, supervisor, bounded=True, trigger=NIGHTLY)
            following.next("r", STAGE, Offset(None, 3))
            assert supervisor.finalise_calls == 0

    def test_a_source_that_cannot_be_made_final_keeps_the_run_going_but_not_for_ever(self) -> None:
        query, supervisor = Query(FakeClock()), Supervisor(finalises=False)
        with Answers(at(None)) as server:
            following = feed(server, query, supervisor, bounded=True, trigger=NIGHTLY)
            here = following.next("r", STAGE, Offset(None, 0))
            query.done(0)
            here = following.next("r", STAGE, here)
            query.done(1, read_nothing=True)
            for _ in range(3):
                held = WatermarkFeed.next(following, "r", STAGE, here)
                assert held == RetryLater(POLL_MS), (
                    "else Spark would end the run as if all were well"
                )
            assert (supervisor.finalise_calls, query.failures) == (3, [])
            query.clock.now_ms += FINISH_TIMEOUT_MS
            with pytest.raises(QueryFailedError, match=r"503: the ledger .* did not come out"):
                following.next("r", STAGE, here)

    @pytest.mark.parametrize("bounded", [True, False])
    def test_the_end_of_a_run_waits_until_the_service_has_taken_it_and_answered(
        self, bounded: bool
    ) -> None:
        """A watermark of before the last commit, or none, is not the last one."""
        query, supervisor = Query(FakeClock()), Supervisor()
        gone = Answer(404, {"type": "/problems/unknown-job"})
        with Answers(at(5), at(9, 2), gone, at(MAX_MS, 3)) as server:
            following = feed(server, query, supervisor, bounded=bounded, trigger=NIGHTLY)
            here = following.next("r", STAGE, Offset(None, 0))
            query.done(0, 5)
            supervisor.commits = False
            assert following.next("r", STAGE, here) == Offset(5, 2), "there may be more to read"
            supervisor.commits = True
            here = following.next("r", STAGE, here)
            assert here == Offset(9, 2)
            query.done(1, 9, read_nothing=True)
            assert WatermarkFeed.next(following, "r", STAGE, here) == RetryLater(POLL_MS)
            query.clock.now_ms += 10 * POLL_MS
            assert following.next("r", STAGE, here) == Offset(END_MS, 3)

    def test_the_end_of_a_run_waits_until_its_sessions_are_read(self) -> None:
        """A query that is started by this one's end is to find this one's promise."""
        query, supervisor = Query(FakeClock()), Supervisor(has_read=False)
        with Answers(at(5)) as server:
            following = feed(server, query, supervisor, trigger=NIGHTLY)
            here = following.next("r", STAGE, Offset(None, 0))
            query.done(0, 5, read_nothing=True)
            assert WatermarkFeed.next(following, "r", STAGE, here) == RetryLater(POLL_MS)
            supervisor.has_read = True
            assert WatermarkFeed.next(following, "r", STAGE, here) == here

    @pytest.mark.parametrize(("active", "alive"), [(False, True), (True, False)])
    def test_one_that_is_being_stopped_or_was_fenced_does_not_wait(
        self, active: bool, alive: bool
    ) -> None:
        query, supervisor = Query(FakeClock()), Supervisor(commits=False, alive=alive)
        with Answers(at(5)) as server:
            following = feed(server, query, supervisor, trigger=NIGHTLY)
            query.is_active = active
            here = following.next("r", STAGE, Offset(None, 0))
            query.done(0, 5, read_nothing=True)
            assert following.next("r", STAGE, here) == here


def test_a_stage_that_waits_for_an_input_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    query = Query(FakeClock())
    known = {"input_watermark": None, "output_watermark": 5, "status": "ok"}
    stages = {"a": known, "b": known | {"output_watermark": None}, STAGE: at(None).body}
    answers = [at(None)] * 4 + [Answer(200, {"watermarks": stages})] + [at(None)] * 4
    with Answers(*answers) as server:
        following = feed(server, query)
        here = following.next("r", STAGE, Offset(None, 0))
        for epoch in range(6):
            query.done(epoch)
            here = following.next("r", STAGE, here)
    [logged] = [each for each in caplog.messages if "has no input watermark" in each]
    assert "b has promised nothing yet" in logged


def test_what_is_missing_is_asked_for_once_also_where_the_service_is_gone_by_then() -> None:
    """Each time would cost a batch the whole patience."""
    query = Query(FakeClock())
    with Answers(*[at(None)] * 4, Answer(503)) as server:
        following = feed(server, query)
        here = following.next("r", STAGE, Offset(None, 0))
        for epoch in range(8):
            query.done(epoch)
            here = following.next("r", STAGE, here)
    asked = {each.path for each in server.asked}
    assert "/v1/jobs/j/watermarks" in asked
    first = next(i for i, each in enumerate(server.asked) if each.path.endswith("j/watermarks"))
    after = [each.path for each in server.asked[first:]]
    run_out = next((i for i, path in enumerate(after) if not path.endswith("j/watermarks")), None)
    assert run_out is not None
    assert not any(path.endswith("j/watermarks") for path in after[run_out:])


def test_it_asks_no_more_often_than_it_may() -> None:
    query = Query(FakeClock())
    with Answers(at(5)) as server:
        following = feed(server, query)
        here = following.next("r", STAGE, Offset(None, 0))
        query.done(0, 5)
        for _ in range(50):
            query.clock.now_ms += 10
            following.next("r", STAGE, here)
    assert len(server.asked) <= 7


@pytest.mark.parametrize("failure", [Answer(503), Answer(404, {"type": "/problems/unknown-job"})])
def test_a_service_that_fails_costs_news_and_nothing_else(failure: Answer) -> None:
    query, supervisor = Query(FakeClock()), Supervisor(commits=False)
    with Answers(at(5), failure) as server:
        following = feed(server, query, supervisor, patience_ms=100)
        here = following.next("r", STAGE, Offset(None, 0))
        query.done(0, 5)
        before = query.clock.now_ms
        while query.clock.now_ms < before + 60_000:
            query.clock.now_ms += 10
            assert following.next("r", STAGE, here) == here
    assert len(server.asked) < 60, "asked less and less often"


@pytest.mark.parametrize("unread", [{}, {"a": 1}])
def test_a_bounded_run_is_not_drained_while_a_shard_that_waits_has_more(
    unread: dict[str, int],
) -> None:
    query, supervisor = Query(FakeClock()), Supervisor()
    waits = BatchWaits(started(by_shard=("s",)))
    with Answers(at(5)) as server:
        following = feed(server, query, supervisor, waits=waits, bounded=True, trigger=NIGHTLY)
        here = following.next("r", STAGE, Offset(None, 0))
        query.done(0, 5)
        here = following.next("r", STAGE, here)
        assert following.admit("s", Wanted(unread)) == Admission()
        query.done(1, 5, read_nothing=True)
        following.next("r", STAGE, here)
    assert supervisor.finalise_calls == (0 if unread else 1)
    assert list(waits.unread["s"]) == list(unread)


class TestLink:
    def test_an_offset_goes_to_the_driver_and_another_comes_back(self) -> None:
        asked: list[tuple[str, Offset]] = []

        def answer(control: str, reader: str, offset: Offset, until_ms: int) -> Offset:
            asked.append((control, offset))
            return Offset(7, offset.turn + 1)

        server = LinkServer("secret", answer)
        try:
            client = LinkClient(server.port, "secret", timeout_ms=5_000)
            assert client.next("3", Offset(None, 0)) == Offset(7, 1)
            assert asked == [("3", Offset(None, 0))]
            stranger = LinkClient(server.port, "guessed", timeout_ms=5_000)
            with pytest.raises(LinkError):
                stranger.next("3", Offset(None, 0))
        finally:
            server.close()
        with pytest.raises(LinkError):
            client.next("3", Offset(None, 0))
        assert len(asked) == 1

    def test_a_request_is_dropped_whose_source_no_longer_waits(self) -> None:
        """A driver that stalled found it in the socket later, after Spark had planned a batch.

        It was noted as a poll, or as a listing, of a moment at which this batch was planned already.
        """
        query, stalls = Query(MachineClock()), threading.Event()
        read, waits = ReadThrough(started(), 0), BatchWaits(started(by_shard=("s",)))
        handled: list[str] = []

        def answer(control: str, reader: str, offset: Offset, *until_ms: int) -> Offset:
            stalls.wait()
            try:
                return following.next(reader, STAGE, offset, *until_ms)
            finally:
                handled.append("next")

        def admit(source: str, wanted: Wanted, *until_ms: int) -> Admission:
            stalls.wait()
            try:
                return following.admit("s", wanted, *until_ms)
            finally:
                handled.append("admit")

        with Answers(at(5)) as service:
            following = feed(service, query, read=read, waits=waits)
            server = LinkServer("secret", answer, admit)
            try:
                impatient = LinkClient(server.port, "secret", timeout_ms=50)
                with pytest.raises(LinkError):
                    impatient.next("3", Offset(None, 0))
                with pytest.raises(LinkError):
                    impatient.admit("4", Wanted({"a": 1}))
                stalls.set()
                wait_until(lambda: len(handled) == 2, "the requests are handled")
                assert (read.polled_ms, waits.has_unread) == (None, False)
                patient = LinkClient(server.port, "secret", timeout_ms=60_000)
                assert patient.next("3", Offset(None, 0)) == Offset(5, 1)
                assert patient.admit("4", Wanted({"a": 1})) == Admission()
                assert (read.polled_ms is not None, waits.has_unread) == (True, True)
                patient.close()
            finally:
                stalls.set()
                server.close()

    @pytest.mark.parametrize("error", [ValueError("broken"), OSError("broken"), KeyError("broken")])
    def test_an_error_of_the_driver_fails_the_query_and_is_logged(
        self, error: Exception, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It was taken for an answer without news: the watermark stood still, without a reason."""

        def answer(control: str, reader: str, offset: Offset, until_ms: int) -> Offset:
            raise error

        def admit(source: str, wanted: Wanted, until_ms: int) -> Admission:
            raise error

        server = LinkServer("secret", answer, admit)
        client = LinkClient(server.port, "secret", timeout_ms=60_000)
        try:
            with pytest.raises(QueryFailedError, match=f"{type(error).__name__}.*broken"):
                client.next("3", Offset(None, 0))
            with pytest.raises(QueryFailedError, match=f"{type(error).__name__}.*broken"):
                client.admit("4", Wanted({"a": 1}))
        finally:
            client.close()
            server.close()
        assert [record.exc_info is not None for record in caplog.records] == [True, True]

    def test_a_connection_to_spark_that_is_lost_for_a_moment_costs_news_and_nothing_else(
        self,
    ) -> None:
        query = Query(FakeClock())
        with Answers(at(5)) as service:
            following, feeds = feed(service, query), Feeds()
            source = feeds.new_source(STAGE)
            later_ms = query.clock.steady_ms() + 1
            with feeds.connecting([source], following):
                query.lost = Py4JNetworkError("the connection was reset")
                with pytest.raises(LinkError):
                    feeds.next_offset(source, "r", Offset(None, 0), later_ms)
                with pytest.raises(LinkError):
                    feeds.admit(source, Wanted({}), later_ms)
                query.lost = None
                assert feeds.next_offset(source, "r", Offset(None, 0), later_ms) == Offset(5, 1)

    def test_a_query_that_nobody_started_gets_no_answer(self) -> None:
        def answer(control: str, reader: str, offset: Offset, until_ms: int) -> Offset:
            raise LinkError("unknown")

        server = LinkServer("secret", answer)
        try:
            with pytest.raises(LinkError):
                LinkClient(server.port, "secret", timeout_ms=5_000).next("3", Offset(None, 0))
        finally:
            server.close()


@pytest.mark.parametrize(
    ("generations", "words"),
    [((1, 2), "it was reset"), ((2, 1), "ledger was lost"), ((1, 1), None)],
)
def test_a_query_fails_when_its_job_is_in_another_generation(
    generations: tuple[int, int], words: str | None
) -> None:
    """A lower one is of a ledger that was lost, or restored: what it knows is of other batches."""
    query = Query(FakeClock())
    later = at(60_000 if words is None else 90_000, generation=generations[1])
    with Answers(at(60_000, generation=generations[0]), later) as server:
        following = feed(server, query)
        here = following.next("r", STAGE, Offset(None, 0))
        query.clock.now_ms += 10_000
        if words is None:
            assert following.next("r", STAGE, here) == here
        else:
            with pytest.raises(QueryFailedError, match=words):
                following.next("r", STAGE, here)

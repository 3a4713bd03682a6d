"""Every strategy under real queries, against the batch answer and the watermarks that readers see."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client import REGISTRY
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent import Pipeline
from spark_agent.clock import SystemClock
from spark_agent.executor.tally import Count
from spark_agent.strategies import (
    AnyStrategy,
    Ascending,
    Expression,
    IngressTime,
    LearnedLateness,
    NoWatermarks,
    Punctuated,
    Rows,
    WallClock,
)
from spark_agent.supervision import storage_errors
from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    DEADLINE_S,
    JOB,
    SOURCE,
    SPEC,
    START_MS,
    Flow,
    Reading,
    ended,
    steady,
    until,
    windows,
)


class Bounded:
    """Flink's `BoundedOutOfOrdernessGenerator`, with a state."""

    def update(self, state: int | None, rows: Rows) -> int:
        return rows.newest_ms if state is None else max(state, rows.newest_ms)

    def promise(self, state: int) -> int:
        return state - 5_000


class BoundedByTimes(Bounded):
    """The same, from all event times."""

    wants_times = True

    def update(self, state: int | None, rows: Rows) -> int:
        assert rows.times_ms is not None
        assert len(rows.times_ms) == rows.count
        assert int(rows.times_ms.min()) == rows.oldest_ms
        return max(state or 0, int(rows.times_ms.max()))


class BoundedByDigest(Bounded):
    """The same, from what the tasks have made of the times."""

    def digest(self, times_ms: Any) -> bytes:
        return str(int(times_ms.max())).encode()

    def update(self, state: int | None, rows: Rows) -> int:
        assert rows.times_ms is None
        return max(state or 0, *(int(each) for each in rows.digests))


STRATEGIES: dict[str, Callable[[], AnyStrategy]] = {
    "text": lambda: "at - INTERVAL 5 SECONDS",
    "expression": lambda: Expression("CASE WHEN key = 'a' THEN at - INTERVAL 5 SECONDS END"),
    "punctuated": lambda: Punctuated(when="key = 'a'", bound="5 s"),
    "punctuated by a column": lambda: Punctuated(when=F.col("key") == "a", bound="5 s"),
    "with a state": Bounded,
    "with all times": BoundedByTimes,
    "with digests": BoundedByDigest,
}
"""Each amounts to a bound of five seconds."""
RESTARTED = ("expression", "with digests")
"""One without a state and one with a state: restarts do not depend on more."""


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_promises_like_the_bound_that_it_amounts_to(flow: Flow, name: str) -> None:
    readings = steady(range(60))
    flow.write(readings[:180])
    flow.write(readings[180:])
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline, STRATEGIES[name]())
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW))
        assert flow.output_of(SOURCE) == START_MS + 56_000 - 5_000
        assert flow.counted() == windows(r for r in readings if r.second < 50)
        assert not pipeline.counts[Count.LATE_ROWS]
    if name not in RESTARTED:
        return
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline, STRATEGIES[name]())
        ended(flow.start(pipeline, frame, bounded=True, trigger=AVAILABLE_NOW))
    assert flow.counted() == windows(readings)


def test_without_watermarks_nothing_closes_until_the_source_is_final(flow: Flow) -> None:
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline, NoWatermarks())
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW))
        assert flow.output_of(SOURCE) == -1
        assert not flow.counted()
        assert flow.client.show(JOB, SOURCE).get("records") == 180
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline, NoWatermarks())
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows(steady(range(30)))


class Counting:
    """Promises by the number of rows that it has seen: each row counts once."""

    def update(self, state: int | None, rows: Rows) -> int:
        return (state or 0) + rows.count

    def promise(self, state: int) -> int:
        return START_MS + state


def test_a_state_survives_restarts_and_counts_each_batch_once(flow: Flow) -> None:
    flow.files_per_batch = 1
    for part in range(3):
        flow.write(steady(range(10 * part, 10 * part + 10)))
        with flow.pipeline() as pipeline:
            frame = flow.counts(pipeline, Counting())
            ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW))
        assert flow.output_of(SOURCE) == START_MS + 30 * (part + 1), "30 rows of each sensor"
    notes = sorted((flow.checkpoint / "tidegauge" / "states" / SOURCE).glob("[0-9]*"))
    assert len(notes) == 1, "older ones are removed"


def test_the_promise_of_a_noted_state_is_made_again(flow: Flow) -> None:
    """A driver may be killed between its note of the states and its report."""
    flow.write(steady(range(10)))
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline, Counting()), trigger=AVAILABLE_NOW))
    flow.delete_job()
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline, Counting())
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, on_lost_checkpoint="continue"))
        assert flow.output_of(SOURCE) == START_MS + 30


def begin_with_an_unreadable_state(flow: Flow) -> Path:
    """Run a first day, and put a folder in place of the noted states; return the folder."""
    flow.write(steady(range(10)))
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline, Counting()), trigger=AVAILABLE_NOW))
    [noted] = (flow.checkpoint / "tidegauge" / "states" / SOURCE).glob("[0-9]*")
    noted.rename(noted.with_name(".kept"))
    noted.mkdir()
    flow.write(steady(range(10, 20)))
    return noted


def test_a_checkpoint_that_cannot_be_read_fails_the_query_with_the_cause(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor ended, nothing reported any more, and the last run ended well."""
    monkeypatch.setattr(storage_errors, "PATIENCE_MS", 500)
    noted = begin_with_an_unreadable_state(flow)
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline, Counting())
        query = flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True)
        with pytest.raises(
            StreamingQueryException, match=rf"could not be read.*{noted.name}.*director"
        ):
            query.awaitTermination(DEADLINE_S)
    assert flow.client.runs(JOB, limit=1)["runs"][0]["outcome"] == "failed"


def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_retried(
    flow: Flow, caplog: pytest.LogCaptureFixture
) -> None:
    noted = begin_with_an_unreadable_state(flow)
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline, Counting())
        query = flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True)
        until(lambda: "cannot be read, so nothing is reported" in caplog.text, "it cannot be read")
        noted.rmdir()
        noted.with_name(".kept").rename(noted)
        ended(query)
    assert flow.watermark(COUNTS).final
    assert flow.counted() == windows(steady(range(20)))


class Broken(Counting):
    def update(self, state: int | None, rows: Rows) -> int:
        raise KeyError("litres")


class Unkept(Counting):
    def update(self, state: Any, rows: Rows) -> Any:
        return {1, 2}


class Wrong(Counting):
    def promise(self, state: Any) -> Any:
        return 1.5


class WrongInTask:
    def promise_ms(self, newest_ms: int) -> Any:
        return newest_ms / 1.0


BROKEN = (Broken(), "Broken.update has failed with KeyError: 'litres'")
UNKEPT = (Unkept(), r"Unkept.update has returned \{1, 2\}, which JSON cannot keep")
WRONG = (Wrong(), "Wrong.promise has returned 1.5: return milliseconds")
WRONG_IN_TASK = (
    WrongInTask(),
    r"WrongInTask.promise_ms\(\d+\) has returned .*: return milliseconds",
)


@pytest.mark.parametrize(
    ("strategy", "message", "trigger", "has_windows"),
    [
        # The driver calls the first three in one place, so one of them meets every kind of query.
        *(
            (*BROKEN, trigger, windows)
            for trigger in (AVAILABLE_NOW, None)
            for windows in (True, False)
        ),
        (*UNKEPT, None, True),
        (*WRONG, AVAILABLE_NOW, False),
        (*WRONG_IN_TASK, AVAILABLE_NOW, True),
        (*WRONG_IN_TASK, None, False),
    ],
)
def test_a_strategy_that_fails_ends_its_query_in_words(
    flow: Flow,
    strategy: Any,
    message: str,
    trigger: Mapping[str, object] | None,
    has_windows: bool,
) -> None:
    """Also a run that would end well otherwise, and a query that has not a window."""
    flow.write(steady(range(10)))
    with flow.pipeline() as pipeline:
        frame = (flow.counts if has_windows else flow.source)(pipeline, strategy)
        query = flow.start(pipeline, frame, trigger=trigger)
        with pytest.raises(StreamingQueryException, match=message):
            query.awaitTermination(DEADLINE_S)
        assert flow.output_of(SOURCE) == -1


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def test_a_bound_is_learned_shown_and_kept(flow: Flow, caplog: pytest.LogCaptureFixture) -> None:
    """The right sensor is three seconds late, and both have rows of the same second in two files."""
    caplog.set_level(logging.INFO, "spark_agent")

    def run(seconds: range) -> dict[str, int]:
        for second in seconds:
            flow.write(steady([second - 2, second]))
        with flow.pipeline() as pipeline:
            frame = flow.counts(pipeline, LearnedLateness(0.75, at_most="30 s"))
            query = flow.start(pipeline, frame, trigger=AVAILABLE_NOW)
            ended(query)
            return pipeline.bounds[SOURCE]

    learned = run(range(10, 25))
    assert learned.keys() == {"left", "right"}
    assert all(1_000 <= bound_ms <= 1_100 for bound_ms in learned.values())
    assert "the bound of shard left is 30 s" in caplog.text
    assert "the bound of shard left is 1 s" in caplog.text
    caplog.clear()
    assert run(range(25, 27)) == learned, "a restart does not begin with at_most"
    newest_ms = START_MS + 23_000
    assert newest_ms - 1_100 <= flow.output_of(SOURCE) <= newest_ms - 1_000
    metric = REGISTRY.get_sample_value(
        "tidegauge_agent_bound_seconds", {"job": JOB, "stage": SOURCE}
    )
    assert metric == max(learned.values()) / 1_000


def by_ingress(flow: Flow, pipeline: Pipeline) -> DataFrame:
    """Count rows by the second in which they were read."""
    read = pipeline.source(
        flow.readings(), stage=SOURCE, shard="sensor", event_time="read_at", strategy=IngressTime()
    )
    read = pipeline.watermarked(read, stage=COUNTS, event_time="read_at")
    counted = read.groupBy(F.window("read_at", "1 second"), "key").agg(F.count("*").alias("rows"))
    stamped = counted.select("key", F.unix_seconds("window.start").alias("start"), "rows")
    return pipeline.report(stamped, stage=COUNTS)


@pytest.mark.parametrize("trigger", [AVAILABLE_NOW, None])
def test_ingress_time_dates_rows_when_they_are_read_and_none_is_late(
    flow: Flow, trigger: Mapping[str, object] | None
) -> None:
    flow.files_per_batch = None
    began = now_ms()
    with flow.pipeline() as pipeline:
        query = None if trigger else flow.start(pipeline, by_ingress(flow, pipeline))
        for part in range(3):
            flow.write(steady(range(part, part + 1)))
            if query is None:
                ended(flow.start(pipeline, by_ingress(flow, pipeline), trigger=trigger))
            else:
                rows = 6 * (part + 1)
                until(lambda rows=rows: flow.counted().total() == rows, "its windows have closed")
        if query is not None:
            query.stop()
        assert began <= flow.output_of(SOURCE) <= now_ms()
        assert not pipeline.counts[Count.LATE_ROWS]
        assert not pipeline.counts[Count.DROPPED_ROWS]
    with flow.pipeline() as pipeline:
        frame = by_ingress(flow, pipeline)
        ended(flow.start(pipeline, frame, bounded=True, trigger=AVAILABLE_NOW))
        assert not pipeline.counts[Count.LATE_ROWS]
    assert flow.counted().total() == 18


class ShiftedClock(SystemClock):
    """The machine's clock, set back and forth. Spark runs on it, too."""

    def __init__(self) -> None:
        self.shift_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.shift_ms

    def govern(self, query: StreamingQuery) -> None:
        """Put it in place of the clock by which Spark dates a query's batches."""
        wrapped: Any = query._jsq
        execution: Any = wrapped.streamingQuery()
        kind = execution.getClass()
        while not any(field.getName() == "triggerClock" for field in kind.getDeclaredFields()):
            kind = kind.getSuperclass()
        field = kind.getDeclaredField("triggerClock")
        field.setAccessible(True)
        field.set(execution, self)

    def getTimeMillis(self) -> int:  # noqa: N802
        return self.wall_ms()

    def nanoTime(self) -> int:  # noqa: N802
        return time.monotonic_ns()

    def waitTillTime(self, target_ms: int) -> int:  # noqa: N802
        while self.wall_ms() < target_ms:
            self.pause(10)
        return self.wall_ms()

    class Java:
        implements: Final = ["org.apache.spark.util.Clock"]


def test_ingress_time_has_no_late_row_when_the_clock_is_set_back_and_forth(flow: Flow) -> None:
    """The next batch waits, in words, until the clock has reached the promise again.

    The sources' process has a clock of its own here, and would not notice that this one is set back: so
    it polls without a pause.
    """
    flow.files_per_batch = None
    hour_ms, rows = 3_600_000, 0
    clock = ShiftedClock()

    def write() -> None:
        nonlocal rows
        flow.write(steady([rows]))
        rows += 6

    with Pipeline(flow.url, JOB, SPEC, spark=flow.spark, poll="1 ms", clock=clock) as pipeline:
        query = flow.start(pipeline, by_ingress(flow, pipeline))
        write()
        until(lambda: flow.counted().total() == rows, "its windows have closed")
        clock.govern(query)
        for back, forth in ((-hour_ms, 0), (hour_ms, hour_ms), (0, hour_ms)):
            clock.shift_ms = back
            write()
            if back < max(0, forth):
                waits = until(lambda: pipeline.waits.get(SOURCE), "it waits")
                assert "sensors has promised not to have a row before" in waits
            clock.shift_ms = forth
            until(lambda: flow.counted().total() == rows, "all windows have closed")
            assert not pipeline.waits
        assert not pipeline.counts[Count.LATE_ROWS]
        assert not pipeline.counts[Count.DROPPED_ROWS]
        query.stop()
    late = ShiftedClock()
    with flow.pipeline(clock=late) as pipeline:
        query = flow.start(pipeline, by_ingress(flow, pipeline))
        write()
        until(lambda: pipeline.waits.get(SOURCE), "a driver whose clock is behind waits, too")
        late.govern(query)
        late.shift_ms = hour_ms
        until(lambda: flow.counted().total() == rows, "all windows have closed")
        assert not pipeline.counts[Count.LATE_ROWS]
        assert not pipeline.counts[Count.DROPPED_ROWS]


def test_a_wall_clock_advances_without_rows_and_past_a_quiet_shard(flow: Flow) -> None:
    flow.files_per_batch = None
    flow.write([Reading("left", "a", 0)])
    with flow.pipeline() as pipeline:
        flow.start(pipeline, flow.counts(pipeline, WallClock("1 hour")))
        first = until(lambda: flow.output_of(SOURCE) + 1, "it has a watermark") - 1
        assert first <= now_ms() - 3_600_000
        until(lambda: flow.output_of(SOURCE) > first + 2_000, "it goes on")
        assert flow.output_of(SOURCE) <= now_ms() - 3_600_000
        until(lambda: flow.counted() == windows([Reading("left", "a", 0)]), "its window has closed")


def test_a_wall_clock_never_passes_what_a_limited_source_has_not_read(flow: Flow) -> None:
    """Rows of the last ten seconds, one file a batch: not one of them is late."""
    flow.files_per_batch = 1
    second = now_ms() // 1_000 - START_MS // 1_000
    rows = [Reading("left", "a", second - back) for back in range(8, 0, -1)]
    for row in rows:
        flow.write([row])
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline, WallClock("10 s"))
        flow.start(pipeline, frame, trigger={"processingTime": "2 seconds"})
        until(lambda: flow.counted().total() == len(rows), "all windows have closed")
        assert not pipeline.counts[Count.LATE_ROWS]
        assert not pipeline.counts[Count.DROPPED_ROWS]


def test_a_nightly_wall_clock_covers_what_was_there_at_the_start(flow: Flow) -> None:
    flow.files_per_batch = 1
    flow.write([Reading("left", "a", 0)])
    flow.write([Reading("left", "b", 0)])
    began = now_ms()
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline, WallClock("1 s"))
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW))
        pipeline.stop()
        found = flow.output_of(SOURCE)
    assert began - 1_000 <= found <= now_ms() - 1_000
    assert not pipeline.counts[Count.LATE_ROWS]


def test_a_run_of_one_batch_that_repeats_one_promises_nothing_about_rows_since(flow: Flow) -> None:
    """The batch ends where the run before had planned it to end."""

    def fail(batch: DataFrame, epoch: int) -> None:
        raise RuntimeError(f"no batch {epoch} today")

    def read(batch: DataFrame, _: int) -> None:
        batch.count()

    def run(write: Callable[[DataFrame, int], None], pipeline: Pipeline) -> StreamingQuery:
        writer = flow.source(pipeline, WallClock("1 s")).writeStream.foreachBatch(write)
        writer = writer.option("checkpointLocation", str(flow.checkpoint)).trigger(once=True)
        return pipeline.start(writer)

    flow.files_per_batch = None
    flow.write([Reading("left", "a", 0)])
    with (
        flow.pipeline() as pipeline,
        pytest.raises(StreamingQueryException, match="no batch 0 today"),
    ):
        run(fail, pipeline).awaitTermination(DEADLINE_S)
    flow.write([Reading("left", "a", 1)])
    with flow.pipeline() as pipeline:
        ended(run(read, pipeline))
    assert flow.output_of(SOURCE) == -1, "the second file is unread"
    began = now_ms()
    with flow.pipeline() as pipeline:
        ended(run(read, pipeline))
    assert flow.output_of(SOURCE) >= began - 1_000


@pytest.mark.parametrize(
    ("event_time", "strategy", "message"),
    [
        (
            "at",
            IngressTime(),
            "IngressTime adds the column 'at', and the data frame has it already",
        ),
        ("at", Expression("nothing - INTERVAL 1 SECOND"), "the strategy's SQL cannot be read"),
        ("at", "key", "gives string; it must give a timestamp"),
        ("at", Punctuated("key"), "the strategy's SQL cannot be read"),
        ("at", "max(at)", "the strategy's SQL cannot be read"),
        ("at", "lag(at) OVER (PARTITION BY key ORDER BY at)", "the strategy's SQL cannot be read"),
        ("at", "explode(array(at))", "the strategy's SQL cannot be read"),
        ("at", Ascending, "invalid strategy"),
        ("at", 5, "invalid strategy 5: write"),
        ("at", " ", "invalid expression ' '"),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused(
    flow: Flow, event_time: str, strategy: Any, message: str
) -> None:
    with flow.pipeline() as pipeline, pytest.raises(ValueError, match=message):
        pipeline.source(
            flow.readings(),
            stage=SOURCE,
            shard="sensor",
            event_time=event_time,
            strategy=strategy,
        )


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"idle": {"after_ms": 60_000, "then": "exclude"}}, "has an idle policy"),
        ({"percentiles": [50]}, "declares percentiles"),
    ],
)
def test_a_clock_needs_no_idle_policy_and_has_no_percentiles(
    flow: Flow, policy: dict[str, object], message: str
) -> None:
    spec = {**SPEC, SOURCE: {**SPEC[SOURCE], **policy}}
    with (
        Pipeline(flow.url, JOB, spec, spark=flow.spark) as pipeline,
        pytest.raises(ValueError, match=message),
    ):
        flow.source(pipeline, WallClock("5 s"))

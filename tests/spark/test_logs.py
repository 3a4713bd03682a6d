"""Logs in folders: one shard waits while others go on, and every file is read once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent import Pipeline
from spark_agent.client.reports import RangeReport, Rank
from spark_agent.executor.tally import Count
from spark_agent.supervision.supervisor import Supervisor
from spark_agent.throttle import source_throttle
from tests.spark.flow import (
    AVAILABLE_NOW,
    BOUND,
    COUNTS,
    DEADLINE_S,
    JOB,
    SOURCE,
    SPEC,
    START_MS,
    WINDOW_S,
    Flow,
    Reading,
    ended,
    steady,
    until,
    windows,
)
from tests.support.server import Service

pytestmark = pytest.mark.spark

OTHER, SLOW = "other", "slow"
WITH_OTHER = SPEC | {OTHER: {"shards": ["only"]}}
SCHEMA = "key string, at timestamp"
DRIFT_S = 30
FILE_S = 10


class Folders:
    """Writer of the logs: the readings of each sensor in a folder of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.readings: list[Reading] = []
        self._files = 0
        path.mkdir(exist_ok=True)

    def write(self, readings: Iterable[Reading], name: str | None = None) -> None:
        """Add a file to the folder of each sensor that has some, at once and as a whole."""
        written = list(readings)
        self.readings += written
        for sensor in sorted({each.sensor for each in written}):
            lines = [
                json.dumps({"key": each.key, "at": _iso(each.second)})
                for each in written
                if each.sensor == sensor
            ]
            folder = self.path / sensor
            folder.mkdir(exist_ok=True)
            hidden = folder / ".next"
            hidden.write_text("\n".join(lines))
            hidden.rename(folder / (name or f"{self._files:04d}.json"))
        self._files += 1

    def write_each(self, sensor: str, seconds: range, file_s: int = FILE_S) -> None:
        """Write one sensor's readings of some time, `file_s` seconds in each file."""
        for first in range(seconds.start, seconds.stop, file_s):
            self.write(Reading(sensor, "a", second) for second in range(first, first + file_s))


def _iso(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(START_MS // 1_000 + second))


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "logs")


def pipeline_of(
    flow: Flow,
    throttle: Mapping[str, Any] | None = None,
    spec: Mapping[str, Any] = SPEC,
    **options: Any,
) -> Pipeline:
    set_here = {"throttle": throttle, "poll": "50 ms", "lease_ttl": "2 s"}
    return Pipeline(flow.url, JOB, spec, spark=flow.spark, **set_here, **options)


def together(*stages: str, drift_s: int = DRIFT_S) -> dict[str, Any]:
    return {"groups": [{"stages": list(stages), "max_drift_ms": drift_s * 1_000}]}


def read(pipeline: Pipeline, folders: Folders, most: int | None = 1, **options: Any) -> DataFrame:
    options.setdefault("strategy", BOUND)
    return pipeline.read_logs(
        folders.path,
        stage=SOURCE,
        format="json",
        schema=SCHEMA,
        event_time="at",
        max_files_per_shard=most,
        **options,
    )


def counts(pipeline: Pipeline, frame: DataFrame) -> DataFrame:
    windowed = pipeline.watermarked(frame, stage=COUNTS, event_time="at")
    counted = (
        windowed.groupBy(F.window("at", f"{WINDOW_S} seconds"), "key")
        .agg(F.count("*").alias("rows"))
        .select("key", F.unix_seconds("window.start").alias("start"), "rows")
    )
    return pipeline.report(counted, stage=COUNTS)


def alone(pipeline: Pipeline, frame: DataFrame) -> DataFrame:
    return frame


def promises(flow: Flow, stage: str = SOURCE) -> dict[str, int]:
    """By shard, in seconds since the start."""
    found = flow.client.ranges(JOB, stage, limit=10)["ranges"]
    return {
        each["range"]: (each["promise"] - START_MS) // 1_000
        for each in found
        if each["promise"] is not None
    }


def statuses(flow: Flow) -> dict[str, str]:
    return {
        each["range"]: each["status"]
        for each in flow.client.ranges(JOB, SOURCE, limit=10)["ranges"]
    }


def offsets(query: StreamingQuery) -> list[dict[str, Any]]:
    """Return the position in the logs after each batch."""
    sources = [json.loads(each.json)["sources"] for each in query.recentProgress]
    return [
        each["endOffset"] for batch in sources for each in batch if "shards" in each["endOffset"]
    ]


class ByHand:
    """A stage that reports by hand."""

    def __init__(self, flow: Flow, stage: str) -> None:
        self._flow, self._stage = flow, stage
        run = flow.client.open_run(JOB, [stage], "by-hand")
        self._lease = flow.client.claim(
            JOB, stage, None, holder="by-hand", ttl_ms=600_000, rank=Rank(run, 0, 0)
        )

    def is_at(self, second: int) -> None:
        report = RangeReport(START_MS + second * 1_000)
        reports = dict.fromkeys(self._lease.granted, report)
        self._flow.client.report(JOB, self._stage, self._lease, reports)

    def keeps(self, second: int, input_ms: int) -> None:
        report = RangeReport(holds={"state": START_MS + second * 1_000})
        reports = dict.fromkeys(self._lease.granted, report)
        self._flow.client.report(JOB, self._stage, self._lease, reports, input_ms=input_ms)


def test_every_file_is_read_once_and_the_windows_are_the_batch_answer(
    flow: Flow, folders: Folders
) -> None:
    """In two nights; the files of the first one are deleted before the second."""
    for second in range(0, 60, FILE_S):
        folders.write(steady(range(second, second + FILE_S)))
    (folders.path / "left" / "_unfinished.json").write_text('{"key": ')
    (folders.path / "_archive").mkdir()
    with pipeline_of(flow) as pipeline:
        ended(
            flow.start(pipeline, counts(pipeline, read(pipeline, folders)), trigger=AVAILABLE_NOW)
        )
        assert flow.output_of(SOURCE) == START_MS + (59 - 3 - 5) * 1_000
    for file in [*folders.path.glob("left/0*.json"), *folders.path.glob("right/0000.json")]:
        file.unlink()
    for second in range(60, 100, FILE_S):
        folders.write(steady(range(second, second + FILE_S)))
    with pipeline_of(flow) as pipeline:
        frame = counts(pipeline, read(pipeline, folders, most=None))
        query = flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True)
        ended(query)
        assert not pipeline.counts[Count.SPLIT_SHARDS]
    assert flow.counted() == windows(folders.readings)
    assert flow.watermark(COUNTS).final


@pytest.mark.parametrize(
    "idle",
    [
        pytest.param(None, marks=pytest.mark.matrix),
        pytest.param({"after_ms": 600_000, "then": "exclude"}, marks=pytest.mark.slow),
    ],
)
def test_one_shard_waits_while_the_other_goes_on_and_the_drift_is_kept(
    flow: Flow, folders: Folders, idle: dict[str, Any] | None
) -> None:
    """The left one's files bring four times as much as the right one's."""
    spec = SPEC if idle is None else SPEC | {SOURCE: {**SPEC[SOURCE], "idle": idle}}
    folders.write_each("left", range(200), file_s=20)
    folders.write_each("right", range(50), file_s=5)
    ahead: list[int] = []
    waits: set[str] = set()

    def has_read(second: int) -> Callable[[], bool]:
        def is_there() -> bool:
            at = promises(flow)
            if len(at) == 2:
                ahead.append(at["left"] - at["right"])
            waits.update(pipeline.shard_waits.get(SOURCE, {}))
            return at.get("right", 0) >= second

        return is_there

    with pipeline_of(flow, together(SOURCE), spec) as pipeline:
        query = flow.start(pipeline, counts(pipeline, read(pipeline, folders)))
        until(has_read(49 - 5), "the slower one has read what there is")
        stood = 49 - 5 + DRIFT_S
        until(lambda: promises(flow)["left"] == stood, "the faster one goes as far as it may")
        until(lambda: "left" in pipeline.shard_waits.get(SOURCE, {}), "it waits")
        assert "too far ahead of shard right" in pipeline.shard_waits[SOURCE]["left"]
        assert SOURCE not in pipeline.waits, "the query itself does not wait"
        # Longer than the tasks' leases, while no batch has anything to read.
        end = time.monotonic() + 3
        until(lambda: time.monotonic() > end, "some time")
        assert promises(flow)["left"] == stood
        assert flow.leased(SOURCE) == 2
        folders.write_each("right", range(50, 200), file_s=15)
        until(has_read(200 - 6), "all is read")
        until(lambda: promises(flow)["left"] >= 200 - 6, "by both")
        shown = [each["waits"] for each in offsets(query) if "waits" in each]
    assert any("too far ahead of shard right" in each["left"] for each in shown)
    assert not any("right" in each and "ahead" in each["right"] for each in shown[:4])
    assert max(ahead) <= DRIFT_S
    assert "left" in waits


@pytest.mark.slow
def test_a_shard_that_is_ahead_of_another_source_waits_alone(flow: Flow, folders: Folders) -> None:
    """The service asks it to pause, since its first file took it past the limit."""
    folders.write_each("left", range(100), file_s=100)
    folders.write_each("left", range(100, 120))
    folders.write_each("right", range(40))
    with pipeline_of(flow, together(SOURCE, OTHER), WITH_OTHER) as pipeline:
        other = ByHand(flow, OTHER)
        other.is_at(20)
        query = flow.start(pipeline, read(pipeline, folders))
        until(lambda: promises(flow).get("right") == 39 - 5, "the other one goes on")
        assert promises(flow)["left"] == 99 - 5
        assert [each["shards"]["left"]["files"] for each in offsets(query)][:3] == [1, 1, 1]
        assert SOURCE not in pipeline.waits
        assert "is throttled" in offsets(query)[1]["waits"]["left"]
        other.is_at(1_000)
        folders.write_each("right", range(40, 120))
        until(lambda: promises(flow)["left"] == 119 - 5, "it goes on")


@pytest.mark.slow
def test_a_rate_lowers_how_many_files_a_shard_gets(flow: Flow, folders: Folders) -> None:
    """A tenth of four files is less than one, so it also rests."""
    folders.write_each("left", range(240))
    spec = SPEC | {SLOW: {"inputs": [SOURCE], "ranges": 1}}
    throttle = {"stages": {SLOW: {"max_lag_ms": 1}}}
    with pipeline_of(flow, throttle, spec) as pipeline:
        folders.write_each("right", range(240))
        slow = ByHand(flow, SLOW)
        query = flow.start(pipeline, read(pipeline, folders, most=4))
        until(lambda: flow.output_of(SOURCE) > 0, "a first batch")
        slow.keeps(0, flow.output_of(SOURCE))
        until(lambda: promises(flow)["left"] >= 200 - 6, "it reads on", 60)
        found = offsets(query)
    files = [each["shards"].get("left", {"files": 0})["files"] for each in found]
    steps = [after - before for before, after in zip([0, *files], files, strict=False)]
    lowered = [step for step, each in zip(steps, found, strict=True) if "waits" in each]
    assert steps[0] == 4
    assert len(lowered) > 2
    assert set(lowered) <= {0, 1}
    assert "is to read at a rate of 0.1" in found[-1]["waits"]["left"]


@pytest.mark.slow
def test_a_restart_goes_on_in_the_middle(flow: Flow, folders: Folders, service: Service) -> None:
    """The driver was killed before Spark had committed the last batch, whose files are read again.

    So the service has not heard of that batch either.
    """
    for second in range(0, 100, FILE_S):
        folders.write(steady(range(second, second + FILE_S)))
    with pipeline_of(flow) as pipeline:
        query = flow.start(pipeline, counts(pipeline, read(pipeline, folders)))
        until(lambda: len(query.recentProgress) >= 4, "some batches")
        service.kill()
        done = len(query.recentProgress)
        folders.write(steady(range(100, 100 + FILE_S)))
        until(lambda: len(query.recentProgress) > done, "one without the service")
        query.stop()
    service.start()
    commits = sorted((flow.checkpoint / "commits").glob("[0-9]*"), key=lambda each: int(each.name))
    commits[-1].unlink()
    (flow.checkpoint / "commits" / f".{commits[-1].name}.crc").unlink(missing_ok=True)
    with pipeline_of(flow) as pipeline:
        frame = counts(pipeline, read(pipeline, folders))
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows(folders.readings)


def test_nothing_waits_in_a_query_that_has_ended(
    flow: Flow, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor may still send reports, for seconds if the service does not answer."""
    may_end = threading.Event()
    end_run = Supervisor._end_run

    def wait_and_end(self: Supervisor) -> None:
        may_end.wait(DEADLINE_S)
        end_run(self)

    monkeypatch.setattr(Supervisor, "_end_run", wait_and_end)
    folders.write_each("left", range(200), file_s=50)
    folders.write_each("right", range(20))
    with pipeline_of(flow, together(SOURCE, OTHER), WITH_OTHER) as pipeline:
        ByHand(flow, OTHER).is_at(10)
        query = flow.start(pipeline, read(pipeline, folders))
        until(lambda: "left" in pipeline.shard_waits.get(SOURCE, {}), "it waits")
        query.stop()
        try:
            assert pipeline.shard_waits == {}
            assert pipeline.waits == {}
        finally:
            may_end.set()


@pytest.mark.parametrize("build", [alone, pytest.param(counts, marks=pytest.mark.slow)])
def test_a_run_with_an_end_reads_what_was_there_and_does_not_wait_for_ever(
    flow: Flow,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    build: Callable[[Pipeline, DataFrame], DataFrame],
) -> None:
    """The left one is past the limit, and the one that it waits for never moves."""
    monkeypatch.setattr(source_throttle, "WAIT_TIMEOUT_MS", 1_500)
    folders.write_each("left", range(200), file_s=100)
    folders.write_each("right", range(20))
    with pipeline_of(flow, together(SOURCE, OTHER), WITH_OTHER) as pipeline:
        ByHand(flow, OTHER).is_at(10)
        query = flow.start(
            pipeline, build(pipeline, read(pipeline, folders)), trigger=AVAILABLE_NOW
        )
        ended(query)
        assert promises(flow) == {"left": 199 - 5, "right": 19 - 5}
        assert "made no progress for" in caplog.text
        folders.write_each("right", range(20, 60))
        ended(flow.start(pipeline, build(pipeline, read(pipeline, folders)), trigger=AVAILABLE_NOW))
        assert promises(flow) == {"left": 199 - 5, "right": 59 - 5}


@pytest.mark.slow
def test_a_run_does_not_wait_for_a_shard_of_its_own_that_has_no_more(
    flow: Flow, folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    folders.write_each("left", range(200), file_s=50)
    folders.write_each("right", range(20))
    with pipeline_of(flow, together(SOURCE)) as pipeline:
        frame = counts(pipeline, read(pipeline, folders))
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW))
        assert promises(flow) == {"left": 199 - 5, "right": 19 - 5}
    assert "made no progress" not in caplog.text


@pytest.mark.parametrize(
    ("trigger", "build"),
    [
        (AVAILABLE_NOW, counts),
        pytest.param(None, alone, marks=pytest.mark.slow),
        pytest.param(AVAILABLE_NOW, alone, marks=pytest.mark.matrix),
        pytest.param(None, counts, marks=pytest.mark.matrix),
    ],
)
def test_a_bounded_query_is_not_final_while_a_shard_that_waits_has_more(
    flow: Flow,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[Pipeline, DataFrame], DataFrame],
    trigger: Mapping[str, object] | None,
) -> None:
    monkeypatch.setattr(source_throttle, "WAIT_TIMEOUT_MS", 2_000)
    folders.write_each("left", range(200), file_s=100)
    folders.write_each("right", range(20))
    with pipeline_of(flow, together(SOURCE), SPEC) as pipeline:
        frame = build(pipeline, read(pipeline, folders))
        query = flow.start(pipeline, frame, bounded=True, trigger=trigger)
        ended(query)
        until(lambda: flow.watermark(SOURCE).final, "the source is final")
        last = offsets(query)[-1]["shards"]
        assert {shard: each["files"] for shard, each in last.items()} == {"left": 2, "right": 2}
    if build is counts:
        assert flow.counted() == windows(folders.readings)


@pytest.mark.slow
def test_a_query_that_also_reads_the_source_it_waits_for_is_not_stuck(
    flow: Flow, folders: Folders
) -> None:
    """The other source is Spark's own, and reads one file in each batch."""
    spec = {SOURCE: SPEC[SOURCE], OTHER: {"shards": ["left", "right"]}}
    spec[COUNTS] = {"inputs": [SOURCE, OTHER], "ranges": 2}
    folders.write_each("left", range(120), file_s=40)
    folders.write_each("right", range(120), file_s=40)
    for second in range(0, 120, FILE_S):
        flow.write(steady(range(second, second + FILE_S)))
    with pipeline_of(flow, together(SOURCE, OTHER), spec) as pipeline:
        other = pipeline.source(
            flow.readings(), stage=OTHER, shard="sensor", event_time="at", strategy=BOUND
        )
        both = (
            read(pipeline, folders, shard="sensor")
            .select("key", "at")
            .union(other.select("key", "at"))
        )
        query = flow.start(pipeline, counts(pipeline, both), trigger=AVAILABLE_NOW, bounded=True)
        ended(query)
        shown = [
            each["waits"]["left"] for each in offsets(query) if "left" in each.get("waits", {})
        ]
    assert any("of other" in each for each in shown)
    assert flow.counted() == windows([*folders.readings, *steady(range(120))])


def test_a_file_that_comes_late_is_refused_and_not_lost(flow: Flow, folders: Folders) -> None:
    folders.write_each("left", range(20))
    folders.write_each("right", range(20))
    with pipeline_of(flow) as pipeline:
        query = flow.start(pipeline, read(pipeline, folders))
        until(
            lambda: len(promises(flow)) == 2 and min(promises(flow).values()) == 14, "all is read"
        )
        folders.write([Reading("left", "a", 30)], name="0000-late.json")
        until(lambda: not query.isActive, "the query fails")
        with pytest.raises(StreamingQueryException) as failed:
            query.awaitTermination()
    assert "'0000-late.json', with a name that sorts before it" in str(failed.value)
    assert "Rename it to sort after '0001.json'" in str(failed.value)
    left = folders.path / "left"
    (left / "0000-late.json").rename(left / "0009.json")
    with pipeline_of(flow) as pipeline:
        ended(flow.start(pipeline, read(pipeline, folders), trigger=AVAILABLE_NOW))
        assert promises(flow)["left"] == 30 - 5


def test_a_file_that_is_broken_fails_the_query_until_it_is_repaired(
    flow: Flow, folders: Folders
) -> None:
    folders.write_each("left", range(20))
    broken = folders.path / "left" / "0001.json"
    whole = broken.read_text()
    broken.write_text(whole[:-10])
    with pipeline_of(flow) as pipeline:
        query = flow.start(pipeline, read(pipeline, folders), trigger=AVAILABLE_NOW)
        until(lambda: not query.isActive, "the query fails")
        assert "0001.json cannot be read as json" in str(query.exception())
        broken.write_text(whole)
        ended(flow.start(pipeline, read(pipeline, folders), trigger=AVAILABLE_NOW))
        assert promises(flow)["left"] == 19 - 5


def test_a_shard_with_unread_files_is_not_idle_and_a_quiet_one_is(
    flow: Flow, folders: Folders
) -> None:
    """The left one rests for a minute after its first file, as its rate asks for."""
    spec: dict[str, Any] = SPEC | {SLOW: {"inputs": [SOURCE], "ranges": 1}}
    spec[SOURCE] = {**SPEC[SOURCE], "idle": {"after_ms": 1_000, "then": "exclude"}}
    with pipeline_of(flow, {"stages": {SLOW: {"max_lag_ms": 1}}}, spec) as pipeline:
        folders.write_each("left", range(10))
        folders.write_each("right", range(10))
        query = flow.start(pipeline, read(pipeline, folders))
        until(lambda: flow.output_of(SOURCE) > 0, "a first batch")
        ByHand(flow, SLOW).keeps(0, flow.output_of(SOURCE))
        until(lambda: set(statuses(flow).values()) == {"idle"}, "both are quiet")
        folders.write_each("left", range(20, 60), file_s=40)
        folders.write_each("left", range(60, 200))
        until(lambda: "left" in pipeline.shard_waits.get(SOURCE, {}), "it rests")
        until(lambda: statuses(flow)["left"] != "idle", "the service hears that it has more")
        seen: set[str] = set()
        end = time.monotonic() + 4

        def look() -> bool:
            if "left" in pipeline.shard_waits.get(SOURCE, {}):
                seen.add(statuses(flow)["left"])
            return time.monotonic() > end

        until(look, "some time")
        # Its lease lapses during a long batch, and it counts as idle again after the next report.
        until(lambda: statuses(flow)["right"] == "idle", "the quiet one is idle")
        assert query.isActive
    assert "idle" not in seen


def test_rows_of_a_folder_that_is_no_shard_pass_and_are_counted(
    flow: Flow, folders: Folders
) -> None:
    folders.write(Reading(sensor, "a", 5) for sensor in ("left", "right", "stranger"))
    with pipeline_of(flow) as pipeline:
        query = flow.start(pipeline, read(pipeline, folders), trigger=AVAILABLE_NOW)
        ended(query)
        assert query.lastProgress is not None
        assert pipeline.counts[Count.UNKNOWN_SHARD_ROWS] == 1
    rows = flow.spark.read.json(str(flow.output)).collect()
    assert sorted(row["shard"] for row in rows) == ["left", "right", "stranger"]

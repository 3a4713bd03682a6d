"""Logs in folders: one shard waits while others go on, and every file is read once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent import Pipeline
from spark_agent import queries as queries_module
from spark_agent.messages import RangeReport, Rank
from spark_agent.tally import Count
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

pytestmark = pytest.mark.spark

OTHER, SLOW = "other", "slow"
WITH_OTHER = SPEC | {OTHER: {"shards": ["only"]}}
SCHEMA = "key string, at timestamp"
DRIFT_S = 30
FILE_S = 10


class Folders:
    """What writes the logs: the readings of each sensor in a folder of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.readings: list[Reading] = []
        self._files = 0
        path.mkdir()

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
) -> Pipeline:
    return Pipeline(
        flow.url, JOB, spec, spark=flow.spark, throttle=throttle, poll="50 ms", lease_ttl="2 s"
    )


def together(*stages: str, drift_s: int = DRIFT_S) -> dict[str, Any]:
    return {"groups": [{"stages": list(stages), "max_drift_ms": drift_s * 1_000}]}


def read(pipeline: Pipeline, folders: Folders, most: int | None = 1, **options: Any) -> DataFrame:
    return pipeline.read_logs(
        folders.path,
        stage=SOURCE,
        format="json",
        schema=SCHEMA,
        event_time="at",
        strategy=BOUND,
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
    """Where the logs were after each batch."""
    sources = [json.loads(each.json)["sources"] for each in query.recentProgress]
    return [each["endOffset"] for batch in sources for each in batch if "shards" in each["endOffset"]]


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
        ended(flow.start(pipeline, counts(pipeline, read(pipeline, folders)), trigger=AVAILABLE_NOW))
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


def test_one_shard_waits_while_the_other_goes_on_and_the_drift_is_kept(
    flow: Flow, folders: Folders
) -> None:
    """The left one's files bring four times as much as the right one's."""
    folders.write_each("left", range(0, 200, 1), file_s=20)
    folders.write_each("right", range(0, 50, 1), file_s=5)
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

    with pipeline_of(flow, together(SOURCE)) as pipeline:
        query = flow.start(pipeline, counts(pipeline, read(pipeline, folders)))
        until(has_read(49 - 5), "the slower one has read what there is")
        until(lambda: "left" in pipeline.shard_waits.get(SOURCE, {}), "the faster one waits")
        stood = promises(flow)["left"]
        assert 49 - 5 < stood <= 49 - 5 + DRIFT_S
        assert "too far ahead of shard right" in pipeline.shard_waits[SOURCE]["left"]
        assert SOURCE not in pipeline.waits, "the query itself does not wait"
        # Longer than the tasks' leases, while no batch has anything to read.
        end = time.monotonic() + 3
        until(lambda: time.monotonic() > end, "some time")
        assert promises(flow)["left"] == stood
        assert flow.leased(SOURCE) == 2
        folders.write_each("right", range(50, 200, 1), file_s=15)
        until(has_read(200 - 6), "all is read")
        until(lambda: promises(flow)["left"] >= 200 - 6, "by both")
        shown = [each["waits"] for each in offsets(query) if "waits" in each]
    assert any("too far ahead of shard right" in each["left"] for each in shown)
    assert not any("right" in each and "ahead" in each["right"] for each in shown[:4])
    assert max(ahead) <= DRIFT_S
    assert "left" in waits

"""Which shards of a source of ours wait, and which go on."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxFiles
from pyspark.sql.types import (
    ArrayType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_agent.client import Client
from spark_agent.link import LinkClient, LinkServer, Offset
from spark_agent.running import CommittedBatch
from spark_agent.sources.admission import Admission, ShardLimit, Wanted
from spark_agent.sources.arguments import check_logs
from spark_agent.sources.formats import Columns, read_file
from spark_agent.sources.logs import Logs, LogsReader, ShardFiles
from spark_agent.sources.offsets import LogsError, LogsOffset
from spark_agent.throttle import SourceThrottle, ThrottleConfig
from tests.unit.agent.answers import Answer, Answers, FakeClock

PAUSE = {"pause": True, "until": 50, "rate": 1.0, "because": "it is ahead"}
POLL_MS = 100


def asks(shards: Mapping[str, Any], *groups: Any, version: int = 1) -> Answer:
    return Answer(200, {"groups": groups, "shards": shards}, {"ETag": f'"{version}"'})


def held_by(stage: str, shard: str, limit: int | None = 50) -> dict[str, Any]:
    slowest = {"stage": stage, "range": shard}
    return {"stages": ["s", "other"], "limit": limit, "held_by": slowest}


def promises(**by_shard: int | None) -> Answer:
    found = [{"range": k, "status": "active", "promise": v} for k, v in by_shard.items()]
    return Answer(200, {"ranges": found})


def throttle(server: Answers, clock: FakeClock, **options: Any) -> SourceThrottle:
    options = {"sources": ("s",), "by_shard": ("s",)} | options
    config = ThrottleConfig("j", "q", poll_ms=POLL_MS, keep_ms=10_000, **options)
    client = Client(server.url, patience_ms=3_000, clock=clock, jitter=lambda: 1.0)
    return SourceThrottle(config, client=client, clock=clock)


def wanted(*shards: str, most: int | None = None, ends: bool = False) -> Wanted:
    return Wanted(dict.fromkeys(shards, 9), most, ends)


def after(epoch: int) -> CommittedBatch:
    return CommittedBatch(epoch, 0, duration_ms=1_000)


def files(admission: Admission) -> dict[str, int]:
    return {shard: limit.files for shard, limit in admission.limits.items()}


def test_a_shard_that_is_asked_to_pause_waits_and_the_other_does_not() -> None:
    with Answers(asks({"s": {"a": PAUSE}}, held_by("s", "b"))) as server:
        admission = throttle(server, FakeClock()).admit("s", wanted("a", "b"), None)
    assert admission.limits == {"a": ShardLimit(0, "shard a of s is throttled: it is ahead")}


def test_a_shard_that_has_nothing_to_read_waits_for_nothing() -> None:
    with Answers(asks({"s": {"a": PAUSE}}, held_by("s", "b"))) as server:
        assert files(throttle(server, FakeClock()).admit("s", wanted("b"), None)) == {}


@pytest.mark.parametrize(
    ("slowest", "waits"), [("b", {"a"}), ("a", set[str]()), ("else", {"a", "b"})]
)
def test_a_shard_waits_before_its_limit_unless_the_group_waits_for_it(
    slowest: str, waits: set[str]
) -> None:
    """Each would be taken past it by a batch like its last one."""
    group = held_by("s", slowest)
    if slowest == "else":
        group = held_by("other", "o")
    latest = promises(a=40, b=35) if slowest != "a" else promises(a=35)
    with Answers(asks({}, group), promises(a=10, b=10), latest) as server:
        throttled = throttle(server, FakeClock(), looks_ahead=True)
        assert files(throttled.admit("s", wanted("a", "b"), after(0))) == {}
        admission = throttled.admit("s", wanted("a", "b"), after(1))
    assert set(files(admission)) == waits


def test_without_looking_ahead_shards_wait_when_they_are_asked_to() -> None:
    with Answers(asks({}, held_by("other", "o"))) as server:
        throttled = throttle(server, FakeClock())
        assert files(throttled.admit("s", wanted("a"), after(0))) == {}
        assert files(throttled.admit("s", wanted("a"), after(1))) == {}


@pytest.mark.parametrize(
    ("rate", "most", "first", "rest_ms"),
    [(0.5, 4, 2, 0), (0.1, 4, 1, 1_500), (0.5, None, None, 1_000), (1.0, 4, None, 0)],
)
def test_a_rate_is_kept_by_fewer_files_and_then_by_rests(
    rate: float, most: int | None, first: int | None, rest_ms: int
) -> None:
    slow = {"pause": False, "until": None, "rate": rate, "because": "k lags"}
    clock = FakeClock()
    allowed = {} if first is None else {"a": first}
    with Answers(asks({"s": {"a": slow}})) as server:
        throttled = throttle(server, clock)
        assert files(throttled.admit("s", wanted("a", "b", most=most), None)) == allowed
        for passed_ms in range(0, rest_ms, 500):
            clock.now_ms = 1_000_000 + passed_ms
            assert files(throttled.admit("s", wanted("a", "b", most=most), after(0))) == {"a": 0}
            # Its own batch counts, not those of the other shard.
            assert throttled.reason_to_wait(after(0)) is None
        clock.now_ms = 1_000_000 + rest_ms
        assert files(throttled.admit("s", wanted("a", "b", most=most), after(0))) == allowed


def test_what_the_whole_query_rests_is_the_shard_s_rest_too() -> None:
    slow = {"pause": False, "until": None, "rate": 0.5, "because": "k lags"}
    with Answers(asks({"s": {"a": slow}, "t": {"c": slow}})) as server:
        throttled = throttle(server, FakeClock(), sources=("s", "t"))
        assert files(throttled.admit("s", wanted("a", most=4), None)) == {}
        assert throttled.reason_to_wait(after(0)) is not None


def test_a_run_with_an_end_does_not_wait_for_its_own_shard_that_has_no_more() -> None:
    with Answers(asks({"s": {"a": PAUSE}}, held_by("s", "b"))) as server:
        throttled = throttle(server, FakeClock())
        assert files(throttled.admit("s", wanted("a", "b", ends=True), None)) == {"a": 0}
        assert files(throttled.admit("s", wanted("a", ends=True), None)) == {}


def test_a_run_with_an_end_waits_as_long_as_the_limit_moves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    moved = asks({"s": {"a": PAUSE}}, held_by("other", "o", 60), version=2)
    first = asks({"s": {"a": PAUSE}}, held_by("other", "o"))
    with Answers(first, moved, Answer(304)) as server:
        throttled = throttle(server, clock, patience_ms=500)
        for now_ms, waits in (0, True), (400, True), (600, True), (900, False):
            clock.now_ms = 1_000_000 + now_ms
            found = files(throttled.admit("s", wanted("a", ends=True), None))
            assert found == ({"a": 0} if waits else {}), now_ms
    assert "made no progress" in caplog.text


SCHEMA = StructType(
    [
        StructField("key", StringType()),
        StructField("at", TimestampType()),
        StructField("shard", StringType(), nullable=False),
    ]
)


class Driver:
    """Says what may be read."""

    def __init__(self) -> None:
        self.admission = Admission()
        self.asked: list[Wanted] = []
        self.server = LinkServer("secret", lambda _control, _reader, at: at, self._admit)

    def _admit(self, source: str, wanted: Wanted) -> Admission:
        self.asked.append(wanted)
        return self.admission


@pytest.fixture
def driver() -> Any:
    driver = Driver()
    yield driver
    driver.server.close()


def reader(driver: Driver, path: Path, clock: FakeClock, most: int | None = None) -> LogsReader:
    link = LinkClient(driver.server.port, "secret", timeout_ms=5_000)
    logs = Logs(str(path), "json", "shard", "UTC", most)
    return LogsReader(logs, link, source="7", schema=SCHEMA, poll_ms=POLL_MS, clock=clock)


def put(path: Path, shard: str, *names: str) -> None:
    (path / shard).mkdir(exist_ok=True)
    for name in names:
        (path / shard / name).write_text(json.dumps({"key": name, "at": "2026-01-01T00:00:00Z"}))


def batch(following: LogsReader, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[str]:
    found = following.partitions(dict(start), dict(end))
    return [
        f"{each.shard}/{name}"
        for each in found
        if isinstance(each, ShardFiles)
        for name in each.names
    ]


ALL = ReadAllAvailable()


def test_a_batch_reads_the_same_files_however_often(tmp_path: Path, driver: Driver) -> None:
    put(tmp_path, "north", "1", "3", "5")
    put(tmp_path, "south", ".1", "_2", "3._COPYING_", "4")
    first = reader(driver, tmp_path, FakeClock(), most=2)
    start = first.initialOffset()
    end = first.latestOffset(start, first.getDefaultReadLimit())
    assert batch(first, start, end) == ["north/1", "north/3", "south/4"]
    put(tmp_path, "north", "2", "7")  # after a crash, another reader repeats the batch
    again = reader(driver, tmp_path, FakeClock(), most=2)
    assert batch(again, start, end) == ["north/1", "north/3", "south/4"]
    with pytest.raises(LogsError, match="'2', with a name that sorts before it"):
        again.latestOffset(end, ALL)
    (tmp_path / "north" / "2").rename(tmp_path / "north" / "6")
    end_of_all = again.latestOffset(end, ALL)
    assert batch(again, end, end_of_all) == ["north/5", "north/6", "north/7"]
    again.stop()
    first.stop()


def test_files_may_be_deleted_once_they_are_read_and_not_before(
    tmp_path: Path, driver: Driver
) -> None:
    put(tmp_path, "north", "1", "2")
    following = reader(driver, tmp_path, FakeClock())
    start = following.initialOffset()
    end = following.latestOffset(start, ALL)
    (tmp_path / "north" / "1").unlink()
    with pytest.raises(LogsError, match="reads 2 files of shard 'north'"):
        following.partitions(start, end)
    put(tmp_path, "north", "3")
    later = following.latestOffset(end, ALL)
    assert batch(following, end, later) == ["north/3"]
    put(tmp_path, "north", "1")
    with pytest.raises(LogsError, match="'1', with a name that sorts before it"):
        following.latestOffset(later, ALL)
    following.stop()


def test_a_shard_whose_folder_is_away_for_a_while_is_known_when_it_is_back(
    tmp_path: Path, driver: Driver
) -> None:
    put(tmp_path, "north", "1")
    put(tmp_path, "south", "1")
    following = reader(driver, tmp_path, FakeClock())
    end = following.latestOffset(following.initialOffset(), ALL)
    (tmp_path / "north").rename(tmp_path / ".north")
    put(tmp_path, "south", "2")
    later = following.latestOffset(end, ALL)
    (tmp_path / ".north").rename(tmp_path / "north")
    put(tmp_path, "north", "2")
    assert batch(following, later, following.latestOffset(later, ALL)) == ["north/2"]
    following.stop()


def test_a_file_that_grows_after_it_was_read_is_refused(tmp_path: Path, driver: Driver) -> None:
    put(tmp_path, "north", "1")
    following = reader(driver, tmp_path, FakeClock())
    start = following.initialOffset()
    end = following.latestOffset(start, ALL)
    assert batch(following, start, end) == ["north/1"]
    (tmp_path / "north" / "1").write_text("longer " * 100)
    with pytest.raises(LogsError, match="What was added is not read"):
        following.latestOffset(end, ALL)
    following.stop()


def test_a_paused_shard_reads_nothing_and_the_offset_says_why(
    tmp_path: Path, driver: Driver
) -> None:
    put(tmp_path, "north", "1")
    put(tmp_path, "south", "1")
    driver.admission = Admission({"north": ShardLimit(0, "it is ahead")})
    following = reader(driver, tmp_path, clock := FakeClock())
    start = following.initialOffset()
    end = following.latestOffset(start, ALL)
    assert batch(following, start, end) == ["south/1"]
    assert end["waits"] == {"north": "it is ahead"}
    assert driver.asked == [Wanted({"north": 1, "south": 1})]
    # It goes on asking, but not every time that Spark does.
    for _ in range(20):
        assert following.latestOffset(end, ALL) == end
        clock.now_ms += 10
    assert len(driver.asked) == 3
    driver.admission = Admission()
    clock.now_ms += POLL_MS
    assert batch(following, end, following.latestOffset(end, ALL)) == ["north/1"]
    following.stop()


def test_a_run_that_ends_does_not_end_while_a_shard_waits_and_reads_nothing_newer(
    tmp_path: Path, driver: Driver
) -> None:
    put(tmp_path, "north", "1")
    driver.admission = Admission({"north": ShardLimit(0, "it is ahead")})
    following = reader(driver, tmp_path, clock := FakeClock())
    following.prepareForTriggerAvailableNow()
    put(tmp_path, "north", "2")
    put(tmp_path, "south", "1")
    start = following.initialOffset()
    turn = following.latestOffset(start, ALL)
    assert (turn["turn"], turn["shards"], turn["waits"]) == (1, {}, {"north": "it is ahead"})
    assert following.partitions(start, turn) == []
    assert clock.pauses_ms == [POLL_MS] * 10
    driver.admission = Admission()
    end = following.latestOffset(turn, ALL)
    assert batch(following, turn, end) == ["north/1"]
    assert following.latestOffset(end, ALL) == end
    following.stop()


def test_a_driver_that_does_not_answer_lets_everything_be_read(tmp_path: Path) -> None:
    """To find nothing, although there is something, could make a source final."""
    driver = Driver()
    put(tmp_path, "north", "1")
    following = reader(driver, tmp_path, FakeClock())
    driver.server.close()
    start = following.initialOffset()
    assert batch(following, start, following.latestOffset(start, ALL)) == ["north/1"]


def test_a_folder_that_is_gone_is_an_error_and_an_empty_one_is_none(
    tmp_path: Path, driver: Driver
) -> None:
    following = reader(driver, tmp_path, FakeClock())
    start = following.initialOffset()
    assert following.latestOffset(start, ALL) == start
    gone = reader(driver, tmp_path / "gone", FakeClock())
    with pytest.raises(LogsError, match="is not there"):
        gone.latestOffset(start, ALL)
    following.stop()


def test_ten_thousand_files(tmp_path: Path, driver: Driver) -> None:
    names = [f"{number:05d}" for number in range(10_000)]
    put(tmp_path, "north", *names)
    following = reader(driver, tmp_path, FakeClock(), most=4_000)
    start: dict[str, Any] = following.initialOffset()
    read: list[str] = []
    for _ in range(3):
        end = json.loads(json.dumps(following.latestOffset(start, ReadMaxFiles(4_000))))
        read += batch(following, start, end)
        start = end
    assert read == [f"north/{name}" for name in names]
    assert len(json.dumps(start)) < 70_000
    following.stop()


def test_offsets_come_back_from_the_checkpoint() -> None:
    offset = LogsOffset(turn=3, waits={"north": "it is ahead"})
    assert LogsOffset.from_dict(offset.to_dict()) == offset
    assert not Offset.is_stored(offset.to_dict())


INSTANT = datetime(2026, 1, 1, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-01T05:00:00Z",
        "2026-01-01T00:00:00-05:00",
        "2026-01-01 00:00:00-05",
        "2026-01-01T05:00:00.000000999Z",
        "2026-01-01T00:00:00",
        "2026-01-01 00:00:00.000",
        "2026-01-01",
    ],
)
@pytest.mark.parametrize("form", ["json", "json.gz", "csv"])
def test_instants_are_exact(tmp_path: Path, text: str, form: str) -> None:
    """Those without a time zone are in the session's."""
    path = tmp_path / f"1.{form}"
    content = f"other,at\n1,{text}\n" if form == "csv" else json.dumps({"at": text})
    path.write_bytes(gzip.compress(content.encode()) if form == "json.gz" else content.encode())
    columns = Columns(
        pa.schema([("at", pa.timestamp("us", "UTC")), ("x", pa.int64())]), "America/New_York"
    )
    [found] = read_file(str(path), form.partition(".")[0], columns)
    assert found.to_pylist() == [{"at": INSTANT, "x": None}]


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
@pytest.mark.parametrize("kind", ["zoned", "local", "legacy"])
def test_instants_of_parquet_are_exact(tmp_path: Path, unit: str, kind: str) -> None:
    path = tmp_path / "1.parquet"
    at = INSTANT if kind == "zoned" else INSTANT.replace(tzinfo=None)
    at = at.replace(hour=0) if kind == "local" else at
    times = pa.array([at], pa.timestamp(unit, "UTC" if kind == "zoned" else None))
    pq.write_table(pa.table({"at": times}), path, use_deprecated_int96_timestamps=kind == "legacy")
    columns = Columns(pa.schema([("at", pa.timestamp("us", "UTC"))]), "America/New_York")
    [found] = read_file(str(path), "parquet", columns)
    assert found.column("at").to_pylist() == [INSTANT]


@pytest.mark.parametrize("form", ["json", "csv", "parquet"])
def test_an_empty_file_has_no_rows_and_a_truncated_one_is_an_error(
    tmp_path: Path, form: str
) -> None:
    path = tmp_path / "1"
    columns = Columns(pa.schema([("at", pa.timestamp("us", "UTC")), ("n", pa.int64())]), "UTC")
    table = pa.table({"at": pa.array([INSTANT], pa.timestamp("us", "UTC")), "n": [1]})
    pq.write_table(table, tmp_path / "whole")
    path.write_bytes(
        {"json": b'{"n": 1}\n{"n":', "csv": b"n,at\n1,\n1"}.get(form)
        or (tmp_path / "whole").read_bytes()[:-20]
    )
    with pytest.raises(LogsError, match=f"{path} cannot be read as {form}"):
        list(read_file(str(path), form, columns))
    if form == "parquet":
        pq.write_table(table.slice(0, 0), path)
    else:
        path.write_bytes(b"")
    assert sum(each.num_rows for each in read_file(str(path), form, columns)) == 0


def of(*columns: tuple[str, DataType]) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns])


GOOD: Mapping[str, Any] = {
    "form": "json",
    "schema": of(("at", TimestampType())),
    "shard": "shard",
    "most": 4,
}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"path": "/nowhere"}, "path '/nowhere' is not a folder"),
        ({"path": "s3://bucket/taps"}, "path 's3://bucket/taps' is a URL"),
        ({"path": 5}, "path 5 is not the path of a folder"),
        ({"form": "orc"}, "format 'orc' is not known: write 'csv', 'json' or 'parquet'"),
        ({"most": 0}, "max_files_per_shard 0 is not a number of files"),
        ({"most": True}, "max_files_per_shard True is not a number of files"),
        ({"schema": "at timestump"}, "schema 'at timestump' cannot be read"),
        ({"schema": ""}, "schema ''"),
        ({"schema": 5}, "schema 5 has no columns"),
        ({"schema": of(("Shard", StringType()))}, "shard 'shard': the schema has a column 'Shard'"),
        (
            {"schema": of(("a", StringType()), ("A", StringType()))},
            "the column 'a' is there more than once",
        ),
        (
            {"schema": of(("a", ArrayType(LongType()))), "form": "csv"},
            "'a' is of type array<bigint>, which a CSV file",
        ),
        ({"shard": ""}, "shard '' is not a column's name"),
    ],
)
def test_arguments_that_are_wrong(tmp_path: Path, wrong: dict[str, Any], error: str) -> None:
    arguments = {"path": str(tmp_path), **GOOD, **wrong}
    with pytest.raises(ValueError, match=re.escape(error)):
        check_logs(arguments.pop("path"), **arguments)

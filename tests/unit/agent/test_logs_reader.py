"""Logs in folders: which files a batch reads, and what is refused because it would never be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxFiles
from pyspark.sql.types import (
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_agent.exceptions import LogsError
from spark_agent.sources import logs as logs_module
from spark_agent.sources.admission import Admission, ShardLimit, Wanted
from spark_agent.sources.driver_link import LinkClient, LinkServer, Offset
from spark_agent.sources.logs import Logs, LogsReader, ShardFiles
from spark_agent.sources.offsets import LogsOffset
from tests.unit.agent.answers import FakeClock

POLL_MS = 100
ALL = ReadAllAvailable()

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
        self.server = LinkServer("secret", lambda _control, _reader, at, _until_ms: at, self._admit)

    def _admit(self, source: str, wanted: Wanted, until_ms: int) -> Admission:
        self.asked.append(wanted)
        return self.admission


@pytest.fixture
def driver() -> Any:
    driver = Driver()
    yield driver
    driver.server.close()


def reader(
    driver: Driver,
    path: Path,
    clock: FakeClock,
    most: int | None = None,
    complete: str = "",
    *,
    is_dynamic: bool = False,
) -> LogsReader:
    link = LinkClient(driver.server.port, "secret", timeout_ms=5_000)
    logs = Logs(str(path), "json", "shard", "UTC", "at", most, complete, is_dynamic)
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


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("name", ["1", "2"])
def test_a_file_that_changes_after_it_was_read_is_refused(
    tmp_path: Path, driver: Driver, name: str, *, restarts: bool
) -> None:
    """Additions to it, or another one in its place."""
    put(tmp_path, "north", "1", "2")
    clock = FakeClock()
    following = reader(driver, tmp_path, clock)
    start = following.initialOffset()
    end = following.latestOffset(start, ALL)
    assert batch(following, start, end) == ["north/1", "north/2"]
    assert following.latestOffset(end, ALL) == end
    clock.now_ms += POLL_MS
    if restarts:
        following.stop()
        following = reader(driver, tmp_path, clock)
    (tmp_path / "north" / ".next").write_text("longer " * 100)
    (tmp_path / "north" / ".next").rename(tmp_path / "north" / name)
    with pytest.raises(LogsError, match=f"'{name}' of shard 'north' .* has changed since"):
        following.latestOffset(end, ALL)
    following.stop()


def test_a_file_that_is_repaired_before_its_batch_is_repeated_has_not_changed(
    tmp_path: Path, driver: Driver
) -> None:
    put(tmp_path, "north", "1")
    following = reader(driver, tmp_path, FakeClock())
    start = following.initialOffset()
    end = following.latestOffset(start, ALL)
    following.stop()
    (tmp_path / "north" / "1").write_text("longer " * 100)
    again = reader(driver, tmp_path, FakeClock())
    assert batch(again, start, end) == ["north/1"]
    put(tmp_path, "north", "2")
    later = again.latestOffset(end, ALL)
    assert batch(again, end, later) == ["north/2"]
    again.stop()
    # The files that were read are known from then on.
    third = reader(driver, tmp_path, FakeClock())
    assert third.latestOffset(later, ALL) == later
    third.stop()


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
    with pytest.raises(LogsError, match="does not exist"):
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
    assert len(json.dumps(start)) < 110_000
    following.stop()


def test_offsets_come_back_from_the_checkpoint() -> None:
    offset = LogsOffset(turn=3, waits={"north": "it is ahead"})
    assert LogsOffset.from_dict(offset.to_dict()) == offset
    assert not Offset.is_stored(offset.to_dict())


@pytest.mark.parametrize(
    ("misplaced", "words"),
    [
        ("1.json", "belongs to no shard"),
        ("north/2026/1.json", "a shard's files are directly in its folder"),
    ],
)
def test_what_would_never_be_read_is_refused(
    tmp_path: Path, driver: Driver, misplaced: str, words: str
) -> None:
    put(tmp_path, "north", "1.json")
    following = reader(driver, tmp_path, FakeClock())
    start = following.latestOffset(following.initialOffset(), ALL)
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "north" / ".old").mkdir()
    assert following.latestOffset(start, ALL) == start
    (tmp_path / misplaced).parent.mkdir(exist_ok=True)
    (tmp_path / misplaced).write_text("{}")
    again = reader(driver, tmp_path, FakeClock())
    with pytest.raises(LogsError, match=words):
        again.latestOffset(start, ALL)
    following.stop()
    again.stop()


MARKER = "DONE"
"""Not a hidden name: it must not be read as data."""


def marked(driver: Driver, path: Path, clock: FakeClock | None = None) -> LogsReader:
    return reader(driver, path, clock or FakeClock(), most=2, complete=MARKER)


def drain(following: LogsReader, start: Mapping[str, Any]) -> dict[str, Any]:
    """Plan batches until nothing is new; return the offset, as it comes back from the checkpoint."""
    end = dict(start)
    while True:
        found = json.loads(json.dumps(following.latestOffset(end, ReadMaxFiles(2))))
        if found == end:
            return end
        following.partitions(end, found)
        end = found


def test_a_folder_is_complete_once_its_files_are_in_earlier_batches(
    tmp_path: Path, driver: Driver
) -> None:
    put(tmp_path, "north", "1", "2", "3", MARKER)
    put(tmp_path, "south", "1")
    following = marked(driver, tmp_path)
    first = following.latestOffset(following.initialOffset(), ReadMaxFiles(2))
    second = following.latestOffset(first, ReadMaxFiles(2))
    assert batch(following, first, second) == ["north/3"]
    third = following.latestOffset(second, ReadMaxFiles(2))
    assert batch(following, second, third) == []
    assert LogsOffset.from_dict(third).complete == {"north"}
    assert following.latestOffset(third, ReadMaxFiles(2)) == third
    assert [(each.completing, each.complete) for each in driver.asked] == [
        ((), ()),
        ((), ()),
        (("north",), ()),
        ((), ("north",)),
    ]
    following.stop()
    again = marked(driver, tmp_path)
    assert again.latestOffset(third, ReadMaxFiles(2)) == third
    assert driver.asked[-1].complete == ("north",), "each start sends what the checkpoint has"
    again.stop()


@pytest.mark.parametrize("first", ["find_marked", "list_folders"])
def test_a_marker_that_is_written_while_the_folders_are_read_is_not_found_without_the_last_file(
    tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The last file and its marker come between the two readings, whichever of them is the first."""
    put(tmp_path, "north", "1")
    following = marked(driver, tmp_path, clock := FakeClock())
    start = drain(following, following.initialOffset())
    clock.now_ms += POLL_MS
    read: Callable[..., Any] = getattr(logs_module, first)

    def read_then_written(*arguments: Any) -> Any:
        found = read(*arguments)
        put(tmp_path, "north", "2", MARKER)
        return found

    monkeypatch.setattr(logs_module, first, read_then_written)
    end = following.latestOffset(start, ReadMaxFiles(2))
    assert not LogsOffset.from_dict(end).complete
    assert (tmp_path / "north" / MARKER).exists()
    monkeypatch.undo()
    clock.now_ms += POLL_MS
    last = drain(following, end)
    assert LogsOffset.from_dict(last).shards["north"].last == "2"
    following.stop()


def test_an_empty_folder_is_complete_by_its_marker_and_a_missing_one_is_not(
    tmp_path: Path, driver: Driver
) -> None:
    put(tmp_path, "north", MARKER)
    (tmp_path / "south").mkdir()
    (tmp_path / "east").mkdir()
    (tmp_path / "east" / f".{MARKER}").mkdir()
    following = marked(driver, tmp_path)
    assert LogsOffset.from_dict(drain(following, following.initialOffset())).complete == {"north"}
    following.stop()


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("name", ["0", "9"])
def test_a_file_that_comes_into_a_complete_folder_is_refused(
    tmp_path: Path, driver: Driver, name: str, *, restarts: bool
) -> None:
    put(tmp_path, "north", "1", MARKER)
    clock = FakeClock()
    following = marked(driver, tmp_path, clock)
    end = drain(following, following.initialOffset())
    if restarts:
        following.stop()
        following = marked(driver, tmp_path, clock)
    put(tmp_path, "north", name)
    clock.now_ms += POLL_MS
    with pytest.raises(LogsError, match=f"'north' .* was complete, and after that came '{name}'"):
        following.latestOffset(end, ALL)
    (tmp_path / "north" / name).unlink()
    assert following.latestOffset(end, ALL) == end
    following.stop()


def test_a_file_of_a_complete_folder_that_changes_is_refused_before_the_next_batch(
    tmp_path: Path, driver: Driver
) -> None:
    """Also one that is not of the newest batch."""
    put(tmp_path, "north", "1", "2", "3", MARKER)
    clock = FakeClock()
    following = marked(driver, tmp_path, clock)
    end = drain(following, following.initialOffset())
    before = (tmp_path / "north" / "1").read_text()
    (tmp_path / "north" / "1").write_text("longer " * 100)
    put(tmp_path, "south", "1")
    clock.now_ms += POLL_MS
    with pytest.raises(LogsError, match=r"'north' .* was complete, and '1' in it has changed"):
        following.latestOffset(end, ALL)
    (tmp_path / "north" / "1").write_text(before)
    assert batch(following, end, following.latestOffset(end, ALL)) == ["south/1"]
    following.stop()


def test_a_file_that_was_repaired_has_not_changed_once_its_folder_is_complete(
    tmp_path: Path, driver: Driver
) -> None:
    put(tmp_path, "north", "1")
    following = marked(driver, tmp_path)
    start = following.initialOffset()
    planned = following.latestOffset(start, ALL)
    following.stop()
    (tmp_path / "north" / "1").write_text("longer " * 100)
    again = marked(driver, tmp_path)
    assert batch(again, start, planned) == ["north/1"]
    put(tmp_path, "north", MARKER)
    end = drain(again, planned)
    assert LogsOffset.from_dict(end).complete == {"north"}
    again.stop()
    third = marked(driver, tmp_path)
    assert drain(third, end) == end
    third.stop()


@pytest.mark.parametrize("gone", [["DONE"], ["1"], ["1", "DONE"]])
def test_a_complete_folder_may_be_archived_and_stays_complete(
    tmp_path: Path, driver: Driver, gone: list[str]
) -> None:
    """In each order: the marker alone takes nothing back that was promised."""
    put(tmp_path, "north", "1", MARKER)
    clock = FakeClock()
    following = marked(driver, tmp_path, clock)
    end = drain(following, following.initialOffset())
    for name in gone:
        (tmp_path / "north" / name).unlink()
    if len(gone) == 2:
        (tmp_path / "north").rmdir()
    clock.now_ms += POLL_MS
    assert following.latestOffset(end, ALL) == end
    put(tmp_path, "north", "2")
    clock.now_ms += POLL_MS
    with pytest.raises(LogsError, match="was complete, and after that came '2'"):
        following.latestOffset(end, ALL)
    following.stop()


def test_a_marker_that_is_removed_before_it_counts_completes_nothing(
    tmp_path: Path, driver: Driver
) -> None:
    put(tmp_path, "north", "1", "2", "3", MARKER)
    following = marked(driver, tmp_path)
    end = following.latestOffset(following.initialOffset(), ReadMaxFiles(2))
    (tmp_path / "north" / MARKER).unlink()
    assert not LogsOffset.from_dict(drain(following, end)).complete
    following.stop()


def test_a_run_with_an_end_completes_no_folder_with_files_that_came_since(
    tmp_path: Path, driver: Driver
) -> None:
    put(tmp_path, "north", "1")
    put(tmp_path, "south", "1")
    following = marked(driver, tmp_path)
    following.prepareForTriggerAvailableNow()
    put(tmp_path, "north", "2", MARKER)
    put(tmp_path, "south", MARKER)
    end = drain(following, following.initialOffset())
    assert LogsOffset.from_dict(end).complete == {"south"}
    following.stop()


def test_a_driver_that_does_not_answer_notes_nothing_as_complete(tmp_path: Path) -> None:
    driver = Driver()
    put(tmp_path, "north", "1", MARKER)
    following = marked(driver, tmp_path)
    end = drain(following, following.initialOffset())
    assert LogsOffset.from_dict(end).complete == {"north"}
    put(tmp_path, "south", "1", MARKER)
    following.stop()
    driver.server.close()
    again = marked(driver, tmp_path)
    assert LogsOffset.from_dict(drain(again, end)).complete == {"north"}


@pytest.mark.parametrize("name", ["zürich", "a b", "x" * 129, "-a"])
def test_a_folder_that_cannot_join_by_its_name_is_refused(
    driver: Driver, tmp_path: Path, name: str
) -> None:
    put(tmp_path, "north", "1.json")
    put(tmp_path, name, "1.json")
    following = reader(driver, tmp_path, FakeClock(), is_dynamic=True)
    with pytest.raises(LogsError, match="the watermark would not wait for its rows"):
        following.latestOffset(following.initialOffset(), ALL)
    (tmp_path / name).rename(tmp_path / "south")
    found = following.latestOffset(following.initialOffset(), ALL)
    assert batch(following, following.initialOffset(), found) == ["north/1.json", "south/1.json"]
    following.stop()


def test_a_folder_that_is_not_in_a_fixed_list_may_have_any_name(
    driver: Driver, tmp_path: Path
) -> None:
    put(tmp_path, "zürich", "1.json")
    following = reader(driver, tmp_path, FakeClock())
    assert following.latestOffset(following.initialOffset(), ALL) != following.initialOffset()
    following.stop()

"""The observer accuses who is guilty, and nobody else. The last test is a pipeline that is guilty."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from tests.spark.flow import until
from tests.spark.matrix.cell import FIRST, Cell
from tests.spark.matrix.data import iso, logs
from tests.spark.matrix.observer import Observer, Output
from tests.spark.matrix.rows import Operator
from tests.support.server import Service

STAGE = "hourly"


class Told(ThreadingHTTPServer):
    """Answers like the service, with the watermark that it is given."""

    watermark_ms: int | None = None
    declared = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Told)
        stage = {"input_watermark": None, "output_watermark": server.watermark_ms}
        self.send_response(200 if server.declared else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"watermarks": {STAGE: stage}}).encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


@pytest.fixture
def told() -> Iterator[Told]:
    with Told(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def put(folder: Path, batch: int, *times_ms: int | None) -> None:
    """Write one batch as a file sink does: the file, and then the entry in its log."""
    path = folder / f"part {batch}.json"
    rows = [{} if ms is None else {"window": {"end": iso(ms)}} for ms in times_ms]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    log = folder / "_spark_metadata"
    log.mkdir(exist_ok=True)
    entry = log / f"{batch}{'.compact' if batch == 9 else ''}"
    hidden = log / f".{batch}.tmp"
    hidden.write_text(f"v1\n{json.dumps({'path': path.as_uri(), 'action': 'add'})}")
    hidden.rename(entry)


@pytest.fixture
def observer(told: Told, tmp_path: Path) -> Observer:
    return Observer(told.url, "job", {STAGE: Output(tmp_path, "window.end")})


def found(observer: Observer) -> list[tuple[int, int]]:
    return [(each.row_ms, each.watermark_ms) for each in observer.violations]


def test_a_row_behind_a_watermark_that_was_seen(
    told: Told, observer: Observer, tmp_path: Path
) -> None:
    told.watermark_ms = 5_000
    observer.turn()
    put(tmp_path, 9, 4_999, 5_000, 5_001, None, -1)
    observer.turn()
    assert found(observer) == [(4_999, 5_000), (-1, 5_000)]
    assert observer.judged == {STAGE: 4}
    with pytest.raises(AssertionError, match=r"2 rows .*\n.*:04\.999Z .*:05\.000Z"):
        observer.check()


def test_a_file_that_was_there_when_the_watermark_was_seen(
    told: Told, observer: Observer, tmp_path: Path
) -> None:
    told.watermark_ms = 5_000
    observer.turn()
    told.watermark_ms = 7_000
    put(tmp_path, 0, 6_000)
    observer.turn()
    put(tmp_path, 1, 7_000)
    observer.turn()
    observer.check()
    assert observer.seen == {STAGE: 7_000}


def test_a_file_is_there_when_the_log_says_so(
    told: Told, observer: Observer, tmp_path: Path
) -> None:
    told.watermark_ms = 5_000
    (tmp_path / "part of nothing.json").write_text('{"window": {"end": "1970-01-01T00:00:00Z"}}')
    observer.turn()
    observer.turn()
    assert not observer.judged
    assert not observer.violations


def test_a_watermark_that_was_seen_stays_seen(
    told: Told, observer: Observer, tmp_path: Path
) -> None:
    told.watermark_ms = 5_000
    observer.turn()
    told.watermark_ms = None
    observer.turn()
    told.watermark_ms = 3_000
    observer.turn()
    put(tmp_path, 0, 4_000)
    observer.turn()
    assert found(observer) == [(4_000, 5_000)]


def test_the_end_of_time(told: Told, observer: Observer, tmp_path: Path) -> None:
    told.watermark_ms = 2**63 - 1
    observer.turn()
    put(tmp_path, 0, 5_000)
    observer.turn()
    with pytest.raises(AssertionError, match="the end of time"):
        observer.check()


def test_files_without_a_log_and_a_job_that_is_not_there_yet(told: Told, tmp_path: Path) -> None:
    told.declared = False
    observer = Observer(told.url, "job", {STAGE: Output(tmp_path, "at", logged=False)})
    observer.turn()
    (tmp_path / "0.json").write_text(json.dumps({"at": iso(1_000)}))
    told.declared, told.watermark_ms = True, 5_000
    observer.turn()
    assert not observer.judged
    (tmp_path / ".hidden.json").write_text(json.dumps({"at": iso(1_000)}))
    (tmp_path / "1.json").write_text(json.dumps({"at": iso(2_000)}))
    observer.turn()
    assert found(observer) == [(2_000, 5_000)]


def test_it_watches_by_itself_and_says_when_it_cannot(told: Told, tmp_path: Path) -> None:
    told.watermark_ms = 5_000
    with Observer(told.url, "job", {STAGE: Output(tmp_path, "at", logged=False)}) as observer:
        until(lambda: observer.turns, "a turn of its own", 30)
        (tmp_path / "0.json").write_text(json.dumps({"at": iso(1_000)}))
    assert found(observer) == [(1_000, 5_000)]
    with Observer("http://127.0.0.1:1", "job", {}) as blind:
        until(lambda: blind.error, "it cannot see", 30)
    with pytest.raises(AssertionError, match="the observer has failed"):
        blind.check()


@pytest.mark.spark
def test_a_pipeline_that_breaks_its_word(
    spark: SparkSession, aggregator: Service, tmp_path: Path
) -> None:
    operator = Operator(
        "stamped with its start, and vouched for",
        lambda frames: (
            frames["views"]
            .groupBy(F.window("at", "6 hours"), "key")
            .agg(F.count("*").alias("rows"))
            .select("key", F.col("window.start").alias("started_at"), "rows")
        ),
        "started_at",
        event_time="started_at",
        delay="0 s",
    )
    cell = Cell(spark, aggregator.url, "guilty", tmp_path, operator)
    with cell.observer:
        cell.land([0])
        cell.once(FIRST, bounded=False)
        through_ms = logs()["views"].promised_ms(0)
        until(lambda: cell.observer.seen.get(FIRST) == through_ms, "it has promised", 30)
        cell.land([1])
        cell.once(FIRST, bounded=False)
    assert cell.observer.violations
    assert {each.stage for each in cell.observer.violations} == {FIRST}
    with pytest.raises(AssertionError, match=r"rows came too late:\nfirst: a row of 2024-03-01T"):
        cell.observer.check()
    assert cell.counts["early_rows"] > 0  # the agent's own guard has seen it too

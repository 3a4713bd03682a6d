"""Rows in flight of a source, as sketches: of a task, and of the batches that the driver has seen."""

from __future__ import annotations

import base64
import random
import subprocess
import sys

import pyarrow as pa
import pytest

from spark_agent.arrow import ShardRows
from spark_agent.client.reports import NOTHING_IN_FLIGHT, RangeReport
from spark_agent.executor.in_flight import (
    StageInFlight,
    TaskInFlight,
    sketch_of,
    unpacked,
)
from spark_agent.strategies import Ascending, BoundedOutOfOrderness
from tests.support.server import ROOT

BOUND = BoundedOutOfOrderness("100 ms")


def arrays(rows: list[tuple[str | None, int | None]]) -> tuple[pa.Array, pa.Array]:
    times = [None if at is None else at * 1_000 for _, at in rows]
    return pa.array([shard for shard, _ in rows]), pa.array(times, pa.timestamp("us"))


def newest(**newest_ms: int) -> dict[str, ShardRows]:
    return {shard: ShardRows(0, ms, 1, mark_ms=ms) for shard, ms in newest_ms.items()}


def read(task: TaskInFlight) -> dict[str, tuple[int, float, float]]:
    """The number, the oldest and the newest of the event times of each shard."""
    found = {}
    for shard, packed in task.packed().items():
        sketch = unpacked(packed)
        found[shard] = sketch.n, sketch.get_min_value(), sketch.get_max_value()
    return found


def test_a_task_keeps_what_its_promises_have_not_passed() -> None:
    task = TaskInFlight(BOUND.promise_ms)
    rows: list[tuple[str | None, int | None]] = [("a", at) for at in range(1_000)]
    rows += [("b", 5), ("b", 50), ("unknown", 7), ("a", 9_999_999), (None, 3), ("b", None)]
    random.Random(0).shuffle(rows)
    task.add(*arrays(rows), newest(a=999, b=50))
    assert read(task) == {"a": (101, 899, 999), "b": (2, 5, 50)}


@pytest.mark.parametrize("batches", [3, 200])
def test_a_task_drops_what_later_rows_have_passed(batches: int) -> None:
    task = TaskInFlight(Ascending().promise_ms)
    for number in range(batches):
        latest = 10 * number + 9
        task.add(*arrays([("a", latest - 9 + at) for at in range(10)]), newest(a=latest))
    count, oldest, latest = read(task)["a"]
    assert (oldest, latest) == (10 * batches - 1, 10 * batches - 1)
    assert count == 1


def test_a_task_of_many_batches_keeps_them_all_while_none_is_passed() -> None:
    task = TaskInFlight(BoundedOutOfOrderness("1 hour").promise_ms)
    for number in range(100):
        task.add(*arrays([("a", number)]), newest(a=number))
    assert read(task) == {"a": (100, 0, 99)}


def test_the_driver_merges_batches_and_removes_what_is_passed() -> None:
    stage = StageInFlight()
    stage.add("a", sketch_of(range(100)).serialize(), 0)
    assert stage.unreported(9)["a"].count == 100
    stage.add("a", sketch_of(range(100, 200)).serialize(), 100)
    stage.add("b", sketch_of([]).serialize(), 7)
    found = stage.unreported(9)
    assert found["a"].count == 100
    assert unpacked(found["a"].event_times).get_min_value() == 100
    assert found["b"] == NOTHING_IN_FLIGHT
    assert list(stage.unreported(1)) == ["a"]
    stage.mark_reported(["a", "b"])
    assert stage.unreported(9) == {}
    stage.keep_only(["b"])
    assert stage.unreported(9) == {"a": NOTHING_IN_FLIGHT}


def test_a_sketch_that_is_trimmed_keeps_its_ranks() -> None:
    """Within the sketch's error, also where an item stands for many."""
    stage = StageInFlight()
    times = random.Random(1).sample(range(1_000_000), 100_000)
    stage.add("a", sketch_of(times).serialize(), 600_000)
    sketch = unpacked(stage.unreported(1)["a"].event_times)
    assert abs(sketch.n - 40_000) < 0.03 * 100_000
    for rank in (0.1, 0.34, 0.67, 0.9):
        exact = 600_000 + rank * 400_000
        assert abs(sketch.get_quantile(rank) - exact) < 0.05 * 400_000


def test_a_report_says_it_in_the_form_of_the_service() -> None:
    packed = sketch_of([5, 6]).serialize()
    stage = StageInFlight()
    stage.add("a", packed, 0)
    body = RangeReport(records=0, pending=stage.unreported(1)["a"]).body()
    assert body["watermark"] is None
    assert body["pending"]["count"] == 2
    sent = unpacked(base64.b64decode(body["pending"]["event_times"]))
    assert (sent.get_min_value(), sent.get_max_value()) == (5, 6)
    assert RangeReport(pending=NOTHING_IN_FLIGHT).body() == {"watermark": None, "pending": None}


def test_nothing_is_imported_for_it_unless_it_is_used() -> None:
    code = "import sys, spark_agent.executor.in_flight; print('datasketches' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"

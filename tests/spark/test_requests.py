"""Requests of tasks, as the service counts them."""

from __future__ import annotations

import re
import time
from collections import Counter
from urllib.request import urlopen

from pyspark.sql.streaming.query import StreamingQuery

from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    POLL_MS,
    RANGES,
    START_MS,
    Flow,
    ended,
    steady,
    until,
    windows,
)
from tests.support.server import Service

_COUNTED = re.compile(
    r'tidegauge_requests_total\{method="(\w+)",route="([^"]*)",status="(\d+)"\} ([\d.e+]+)'
)
_STAGE = "/v1/jobs/{job}/stages/{stage}"
CORES = 2


def requests(url: str) -> Counter[str]:
    """Return the number of requests to stages, by their last part."""
    with urlopen(f"{url}/metrics") as answer:
        found = _COUNTED.findall(answer.read().decode())
    counted = Counter[str]()
    for _, route, _, count in found:
        if route.startswith(_STAGE):
            counted[route.removeprefix(_STAGE)] += int(float(count))
    return counted


def batches_with_rows(query: StreamingQuery) -> int:
    return sum(each["numInputRows"] > 0 for each in query.recentProgress)


def all_batches(query: StreamingQuery) -> int:
    return sum("addBatch" in each["durationMs"] for each in query.recentProgress)


def test_a_task_sends_one_request(flow: Flow, service: Service) -> None:
    """A key range has one task a batch, and so has a shard with rows. Tasks of a process share the
    request for their stage's promise.
    """
    seconds = [range(10), range(10, 30), range(30, 50)]
    for part in seconds:
        flow.write(steady(part))
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline), bounded=True, trigger=AVAILABLE_NOW)
        ended(query)
    assert flow.counted() == windows(steady(range(50)))
    counted = requests(service.url)
    # The driver reports each shard once more at the end: nothing more comes.
    source_tasks = CORES * batches_with_rows(query)
    key_tasks = RANGES * all_batches(query)
    of_driver = 2
    assert key_tasks < counted["/reports"] <= key_tasks + source_tasks + of_driver
    assert counted["/leases"] <= of_driver, "tasks claim with their reports"
    stages = 2
    assert counted["/watermark"] <= CORES * stages * all_batches(query) + of_driver


def test_an_idle_query_waits_in_long_polls(flow: Flow, service: Service) -> None:
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        flow.start(pipeline, flow.counts(pipeline), bounded=False)
        until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "all rows have been reported")
        before = requests(service.url)["/watermark"]
        idle_until = time.monotonic() + 60 * POLL_MS / 1_000
        until(lambda: time.monotonic() >= idle_until, "the time of sixty polls")
        polls = requests(service.url)["/watermark"] - before
    a_last_batch = 5
    assert polls <= a_last_batch

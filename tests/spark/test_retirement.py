"""A retired shard stays retired while its query runs, until the query reads a row of it."""

from __future__ import annotations

import pytest

from tests.spark.flow import COUNTS, JOB, SOURCE, START_MS, Flow, Reading, until
from tests.support.server import Service

pytestmark = pytest.mark.spark


def shards(flow: Flow) -> dict[str, tuple[bool, str | None]]:
    """By shard: whether it is retired, and its last report."""
    ranges = flow.client.ranges(JOB, SOURCE, limit=2)["ranges"]
    return {each["range"]: (each.get("retired", False), each["reported_at"]) for each in ranges}


def test_reports_of_a_quiet_query_do_not_end_a_retirement(flow: Flow, service: Service) -> None:
    """The driver reports an empty backlog every two seconds, which ended it."""
    del service
    flow.write([Reading("left", "a", second) for second in range(30)])
    with flow.pipeline() as pipeline:
        flow.start(pipeline, flow.counts(pipeline))
        until(lambda: shards(flow)["left"][1], "the rows are reported")
        flow.client.retire(JOB, SOURCE, "right", "its site is closed")
        until(lambda: flow.output_of(COUNTS) == START_MS + 24_000, "right is not waited for")
        reported = shards(flow)["left"][1]
        for _ in range(2):
            until(lambda: shards(flow)["left"][1] != reported, "left is reported again")  # noqa: B023
            reported = shards(flow)["left"][1]
        assert shards(flow)["right"][0]
        flow.write([Reading("right", "a", 40)])
        until(lambda: not shards(flow)["right"][0], "a row of right is read")

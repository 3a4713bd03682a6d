"""Promises by the clock, which the driver makes also while a batch runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import pytest

from spark_agent import IngressTime
from spark_agent.client.reports import RangeReport
from spark_agent.supervision.clock_promises import ClockPromises
from spark_agent.supervision.driver_reporter import DriverReporter
from spark_agent.supervision.read_through import ReadThrough
from tests.unit.agent.answers import FakeClock
from tests.unit.agent.queries import source, started


@dataclass
class Reporter:
    epoch: int = 3
    watched: list[bool] = field(default_factory=list[bool])

    def report_shards(
        self, stage: str, reports: Mapping[str, RangeReport], *, watched: bool
    ) -> list[str]:
        assert stage == "s"
        self.watched.append(watched)
        return list(reports)


@pytest.mark.parametrize("has_idle_policy", [False, True])
def test_a_promise_by_the_clock_does_not_prove_that_a_shard_is_quiet(
    has_idle_policy: bool,
) -> None:
    query = started([source("s", has_idle_policy=has_idle_policy)], clocks={"s": IngressTime()})
    clock, reporter = FakeClock(), Reporter()
    read = ReadThrough(query, clock.wall_ms())
    promises = ClockPromises(query, read, {"s": {"a", "b"}}, clock)
    read.note_poll("reader", clock.wall_ms(), None)
    promises.report(cast("DriverReporter", reporter), at_end=False)
    assert reporter.watched == [not has_idle_policy]

"""The chain of stages that is measured beside Flink, on a real service."""

from __future__ import annotations

import pytest

from benchmarks.flink.chain import measure
from tests.support.server import Service

pytestmark = pytest.mark.anyio


async def test_each_tick_gets_through_two_keyed_stages(server: Service) -> None:
    found = await measure(server.url, "chain-benchmark", stages=2, rate=50, ticks=5)
    assert len(found) == 5
    assert min(found) > 0

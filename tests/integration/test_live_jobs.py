"""A job's live state may be lost between any two steps of a use case: it comes back, and the use case
goes on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from service.aggregator import Aggregator, Precondition, Retention
from service.clock import SystemClock
from service.frontier.leases import Rank
from service.ledger.sql import SqlLedger
from service.live.memory import MemoryLiveStore
from service.metrics import Metrics
from service.model.leases import Claim
from service.model.reports import Report
from service.spec import decode_spec

pytestmark = pytest.mark.anyio

SPEC = decode_spec(b'{"stages":{"s":{"shards":["a","b"]}}}')


class Forgetful(MemoryLiveStore):
    """Loses all it has after each release."""

    async def release(self, job: str, tokens: Sequence[str]) -> int:
        released = await super().release(job, tokens)
        await self.remove(job, 1)
        return released


@pytest.fixture
async def aggregator(tmp_path: Path) -> AsyncIterator[Aggregator]:
    clock = SystemClock()
    made = Aggregator(
        Forgetful(clock),
        SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/ledger.db"),
        clock=clock,
        metrics=Metrics(),
        checkpoint_interval_ms=60_000,
        retention=Retention(fine_ms=1, keep_ms=1),
    )
    await made.open()
    yield made
    await made.close()


async def test_a_state_that_is_lost_after_a_release_is_restored(aggregator: Aggregator) -> None:
    await aggregator.definitions.define("j", SPEC, Precondition())
    grant = await aggregator.claim("j", "s", Claim(None, "x", 60_000, Rank()))
    assert await aggregator.release("j", [grant.token]) == 1
    again = await aggregator.claim("j", "s", Claim(None, "y", 60_000, Rank()))
    reported, _ = await aggregator.report("j", "s", Report(again.token, ["a", "b"], [5, 7]))
    assert reported.accepted == 2
    assert (await aggregator.reader.stage("j", "s")).view.watermark.output == 5

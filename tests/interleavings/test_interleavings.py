"""Random requests to two replicas. `make interleavings` sends many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.clock import SystemClock
from tests.interleavings.fuzzer import Fuzzer
from tests.support.inprocess import InProcess
from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.stores import Stores

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("seed", [1, 2])
async def test_two_replicas_agree_whatever_meets(
    tmp_path: Path,
    redis_server: RedisServer,
    postgres_server: PostgresServer,
    caplog: pytest.LogCaptureFixture,
    seed: int,
):
    stores, clock = Stores(redis_server, postgres_server), SystemClock()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    async with (
        InProcess(tmp_path / "one", clock=clock, stores=stores) as one,
        InProcess(tmp_path / "other", clock=clock, stores=stores) as other,
    ):
        fuzzer = Fuzzer([one.client, other.client], seed)
        await fuzzer.run(2_000)
    assert [
        record.getMessage() for record in caplog.records if "damaged" in record.getMessage()
    ] == []
    assert fuzzer.watermarks_seen > 100
    # It was put to the proof: each of these has met the others.
    for act, status in (
        ("put", 200),
        ("put", 201),
        ("report", 200),
        ("commit", 200),
        ("reset", 200),
    ):
        assert fuzzer.statuses[act, status], (act, status)

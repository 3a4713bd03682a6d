"""Two replicas commit the two inputs of a stage at the same moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from service.clock import SystemClock
from tests.support.inprocess import InProcess
from tests.support.stores import Stores

pytestmark = pytest.mark.anyio

ROUNDS = 30


@pytest.mark.parametrize("stores", ["redis,postgres"], indirect=True)
async def test_what_is_behind_both_has_advanced_once_both_commits_are_answered(
    tmp_path: Path, stores: Stores
):
    for replica in "ab":
        (tmp_path / replica).mkdir()
    async with (
        InProcess(tmp_path / "a", clock=SystemClock(), stores=stores) as one,
        InProcess(tmp_path / "b", clock=SystemClock(), stores=stores) as other,
    ):
        a, b = one.api(), other.api()
        b.job = a.job
        sources = {"x": {"shards": ["0"]}, "y": {"shards": ["0"]}}
        await a.define(sources | {"both": {"inputs": ["x", "y"], "passthrough": True}})
        run_x, run_y = await a.run("x"), await b.run("y")
        token_x = await a.token("x", run=run_x, ttl_ms=600_000)
        token_y = await b.token("y", run=run_y, ttl_ms=600_000)
        for epoch in range(1, ROUNDS):
            await a.report("x", token_x, {"0": 10 * epoch}, epoch=epoch)
            await b.report("y", token_y, {"0": 10 * epoch + 1}, epoch=epoch)
            await asyncio.gather(
                a.commit(epoch, {"x": {}}, run=run_x), b.commit(epoch, {"y": {}}, run=run_y)
            )
            assert await a.output("both") == 10 * epoch

"""The driver's rank is above that of every task of its epoch, on every live store."""

from __future__ import annotations

from typing import Any

import pytest

from spark_agent.supervision.driver_reporter import DRIVER_ATTEMPT
from tests.support.api import Api, problem

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stores", ["memory,sqlite", "redis,sqlite"], indirect=True)
async def test_the_driver_outranks_tasks_of_its_epoch_after_years_of_tasks(api: Api) -> None:
    """Spark counts the tasks of an application in 64 bits."""
    await api.define({"taps": {"shards": ["a"]}})
    run = await api.run("taps")
    task: dict[str, Any] = {"holder": "task", "run": run, "epoch": 4, "attempt": 2**31}
    assert (await api.claim("taps", ["a"], **task))["granted"] == ["a"]
    driver: dict[str, Any] = {"holder": "driver", "run": run, "epoch": 4, "attempt": DRIVER_ATTEMPT}
    assert (await api.claim("taps", ["a"], **driver))["granted"] == ["a"]
    problem(
        await api.post_claim("taps", ["a"], **task | {"holder": "other"}), 409, "lease-conflict"
    )
    later: dict[str, Any] = {**task, "epoch": 5, "attempt": 0}
    assert (await api.claim("taps", ["a"], **later))["granted"] == ["a"]

"""Every vector of `tests/data/aggregation.json` over HTTP, on every combination of stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.api import MAX, Api

pytestmark = pytest.mark.anyio

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "aggregation.json").read_text()
)["vectors"]


def number(value: int | str | None) -> int | None:
    if isinstance(value, str):
        assert value == "MAX"
        return MAX
    return value


def words(ranges: dict[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, dict) else number(v) for k, v in ranges.items()}


async def check(api: Api, step: dict[str, Any]) -> None:
    """Check the step's expectation, by the snapshot and by each stage's own address."""
    snapshot = await api.snapshot()
    checked = 0
    for key, member in {
        "out": "output_watermark",
        "input": "input_watermark",
        "status": "status",
    }.items():
        for stage, wanted in step.get(key, {}).items():
            value = wanted if key == "status" else number(wanted)
            assert snapshot[stage][member] == value, (stage, member)
            assert (await api.watermark(stage))[member] == value
            checked += 1
    assert checked, "a step without an expectation"


@pytest.mark.parametrize(
    "stores",
    ["memory,sqlite", "memory,postgres", "redis,sqlite", "redis,postgres"],
    indirect=True,
)
@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
async def test_vector(api: Api, vector: dict[str, Any]):
    await api.define(vector["stages"])
    tokens = {
        name: await api.token(name, ttl_ms=600_000)
        for name, stage in vector["stages"].items()
        if not stage.get("passthrough")
    }
    for step in vector["steps"]:
        stage = step["report"]
        observed = {"input_watermark": number(step["in"])} if "in" in step else {}
        answer = await api.report(stage, tokens[stage], words(step["ranges"]), **observed)
        assert answer["rejected"] == []
        await check(api, step)


def test_there_are_vectors():
    assert len(VECTORS) >= 7

"""Every test vector against the pure core: no store, no service, the frontier alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from service.frontier.agreement import Agreement, Member, agreement
from service.frontier.graph import Pipeline, StageWatermark
from service.frontier.promises import keyed_promise, source_promise
from service.frontier.reports import join_report
from service.frontier.timestamps import MAX, MIN
from service.model.pipeline_spec import (
    PipelineSpec,
    StageSpec,
    decode_spec,
    encode_spec,
)

VECTORS = json.loads((Path(__file__).parent.parent / "data" / "aggregation.json").read_text())


def time(value: int | str | None) -> int:
    return {None: MIN, "MAX": MAX}.get(value, value)  # type: ignore[call-overload, return-value]


class Core:
    """The least that makes a service of the frontier: remember, join, propagate."""

    def __init__(self, stages: Mapping[str, Any]) -> None:
        spec = decode_spec(json.dumps({"stages": stages}).encode())
        self.pipeline: Pipeline = spec.pipeline()
        self.members: dict[str, dict[str, Member]] = {
            name: dict.fromkeys(stage.layout.names, Member())
            for name, stage in self.pipeline.stages.items()
            if stage.layout is not None
        }
        self.published = dict.fromkeys(self.pipeline.stages, StageWatermark())

    def agreements(self) -> dict[str, Agreement]:
        return {name: agreement(members.values()) for name, members in self.members.items()}

    def report(self, stage: str, ranges: Mapping[str, Any], observed: int | str | None) -> None:
        members = self.members[stage]
        for name, word in ranges.items():
            before = members[name]
            said: dict[str, Any] = {"watermark": word} if isinstance(word, int | str) else word
            holds = [time(hold) for hold in said.get("holds", {}).values()]
            if self.pipeline.stages[stage].is_source:
                watermark = time(said.get("watermark"))
                promise = source_promise(watermark, holds, final=said.get("final", False))
            else:
                promise = keyed_promise(time(observed), holds)
            members[name] = Member(
                *join_report(before.promise, promise, idle=said.get("idle", False))
            )
        self.published |= self.pipeline.propagate(self.published, self.agreements(), [stage])


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda vector: vector["name"])
def test_vector_holds_in_the_pure_core(vector: dict[str, Any]) -> None:
    core = Core(vector["stages"])
    for number, step in enumerate(vector["steps"]):
        core.report(step["report"], step["ranges"], step.get("in"))
        for stage, expected in step.get("out", {}).items():
            assert core.published[stage].output == time(expected), (number, stage)
        for stage, expected in step.get("input", {}).items():
            assert core.published[stage].input == time(expected), (number, stage)
        for stage, expected in step.get("status", {}).items():
            assert core.published[stage].status == expected, (number, stage)


def test_a_specification_reads_back_as_it_was_written() -> None:
    spec = PipelineSpec(
        {"s": StageSpec(shards=("b", "a")), "u": StageSpec(inputs=("s",), passthrough=True)}
    )
    assert decode_spec(encode_spec(spec)).stages == spec.stages
    stored = decode_spec(encode_spec(spec, {"s": ["d", "c"]}))
    assert (stored.stages, stored.joined) == (spec.stages, {"s": ("c", "d")})

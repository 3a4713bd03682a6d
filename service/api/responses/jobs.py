"""Responses about jobs, their graphs and runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from service.api.requests import Number, Run
from service.api.responses.common import Count, Next
from service.frontier.graph import Stage
from service.frontier.health import Health
from service.model.jobs import JobView, Specification
from service.model.pipeline_spec import StageSpec, ThrottleSpec


class JobBody(Struct, frozen=True, omit_defaults=True):
    """A stored pipeline."""

    job: str
    generation: Count
    layout_version: Count
    stages: dict[str, StageSpec]
    health: (
        Annotated[
            dict[str, Health],
            Meta(description="Health of each stage, as in its watermark. Left out while unknown"),
        ]
        | UnsetType
    ) = UNSET
    throttle: ThrottleSpec | None = None


class JobLine(Struct, frozen=True):
    """A job in the list of jobs."""

    job: str
    generation: Count
    layout_version: Count
    stages: list[str]


class JobsBody(Struct, frozen=True):
    """Jobs, by name: all of them, or a page."""

    jobs: list[JobLine]
    next: Next = UNSET


class NodeBody(Struct, frozen=True):
    """A stage of the graph."""

    stage: str
    inputs: list[str]
    kind: Literal["source", "keyed", "passthrough"]
    ranges: Count


class GraphBody(Struct, frozen=True):
    """A job's graph, without the names of its shards: each stage after its inputs."""

    job: str
    layout_version: Count
    stages: list[NodeBody]


class CommitsBody(Struct, frozen=True):
    """Last commit of a stage in the job's present generation."""

    job: str
    stage: str
    generation: Count
    run: Annotated[Run | None, Meta(description="The run that the stage belongs to; null: none")]
    epoch: Annotated[
        Number | None,
        Meta(
            description="The last epoch with a durable commit, of any run: reports for this epoch or an"
            " earlier one are stale; null: none"
        ),
    ]


def written_job(found: Specification, healths: Mapping[str, Health] | None = None) -> bytes:
    """Write a `JobBody`, with the stored stages.

    The stored text is an object that begins with `stages`, so the other members are put before it.
    Shards that have joined since are stored behind it, and are not shown.

    >>> written_job(Specification("j", 1, 2, b'{"stages":{"s":{"shards":["0"]}}}'))
    b'{"job":"j","generation":1,"layout_version":2,"stages":{"s":{"shards":["0"]}}}'
    """
    text = found.spec
    if b'"joined"' in text:
        text = msgspec.json.encode(_authored(text))
    _, _, stages = text.partition(b"{")
    numbers = b'"generation":%d,"layout_version":%d' % (found.generation, found.layout_version)
    if healths:
        numbers += b',"health":%b' % msgspec.json.encode(healths)
    return b'{"job":%b,%b,%b' % (msgspec.json.encode(found.job), numbers, stages)


class _Authored(Struct, omit_defaults=True):
    stages: msgspec.Raw
    throttle: msgspec.Raw | UnsetType = UNSET


_authored = msgspec.json.Decoder(_Authored).decode
"""Decode a stored specification in its author's form, without checking its members."""


def graph_body(job: JobView) -> GraphBody:
    """Return a job's graph."""
    stages = job.pipeline.stages
    return GraphBody(
        job.name,
        job.layout_version,
        [_node_body(name, stages[name]) for name in job.pipeline.order],
    )


def _node_body(name: str, stage: Stage) -> NodeBody:
    ranges = 0 if stage.layout is None else len(stage.layout)
    if stage.is_source:
        return NodeBody(name, [], "source", ranges)
    kind = "passthrough" if stage.is_passthrough else "keyed"
    return NodeBody(name, list(stage.inputs), kind, ranges)

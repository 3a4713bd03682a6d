"""The specification of a pipeline in JSON, and the pipeline that it stands for."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from service.errors import InvalidPipelineSpecError
from service.frontier.errors import InvalidPipelineError, InvalidRangeError
from service.frontier.graph import Pipeline, Stage
from service.frontier.ranges import KEY_SPACE, KeyLayout, KeyRange, Layout, ShardLayout

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$(?!\n)"
"""To Python, `$` also matches before a newline that ends the text; the rest keeps that out."""

MAX_STAGES = 1_000
MAX_RANGES = 1_000_000

Name = Annotated[
    str,
    Meta(pattern=NAME_PATTERN, description="A letter or digit, then up to 127 of `A-Za-z0-9._-`"),
]


class KeyRangeSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys from `start` up to, not including, `end`, of 0 to 4294967296."""

    start: Annotated[int, Meta(ge=0, lt=KEY_SPACE)]
    end: Annotated[int, Meta(gt=0, le=KEY_SPACE)]


class StageSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A source (`shards`), a keyed stage (`inputs` and `ranges`) or a passthrough (`inputs`)."""

    shards: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_RANGES)] | None = None
    inputs: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_STAGES)] | None = None
    ranges: (
        Annotated[int, Meta(ge=1, le=MAX_RANGES)]
        | Annotated[tuple[KeyRangeSpec, ...], Meta(min_length=1, max_length=MAX_RANGES)]
        | None
    ) = None
    passthrough: bool = False


class PipelineSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A pipeline: its stages by name."""

    stages: Annotated[dict[Name, StageSpec], Meta(min_length=1, max_length=MAX_STAGES)]

    @property
    def range_count(self) -> int:
        """How many ranges it has in all: known before any of them takes memory."""
        return sum(_count(stage) for stage in self.stages.values())

    def pipeline(self) -> Pipeline:
        """Check it and return the pipeline. Raises `InvalidPipelineSpecError`, naming the stage."""
        stages: dict[str, Stage] = {}
        for name, spec in self.stages.items():
            try:
                stages[name] = Stage(tuple(sorted(spec.inputs or ())), _layout(spec))
            except InvalidRangeError as error:
                raise InvalidPipelineSpecError(f"stage {name!r}: {error}", stage=name) from None
        try:
            return Pipeline(stages)
        except InvalidPipelineError as error:
            raise InvalidPipelineSpecError(str(error), stage=error.stage) from None


def _count(spec: StageSpec) -> int:
    if isinstance(spec.ranges, int):
        return spec.ranges
    return len(spec.shards or spec.ranges or ())


def _layout(spec: StageSpec) -> Layout | None:
    given = [spec.shards is not None, spec.ranges is not None, spec.passthrough]
    if sum(given) != 1:
        raise InvalidRangeError(
            "set exactly one of `shards` (a source), `ranges` (a keyed stage) and `passthrough: true`"
        )
    if spec.shards is not None:
        return ShardLayout.of(spec.shards)
    if isinstance(spec.ranges, int):
        return KeyLayout.tile(spec.ranges)
    if spec.ranges is not None:
        return KeyLayout.of(KeyRange(r.start, r.end) for r in spec.ranges)
    return None


_decoder = msgspec.json.Decoder(PipelineSpec)


def decode_spec(spec: bytes) -> PipelineSpec:
    """Decode a specification. Raises msgspec's errors if it does not fit."""
    return _decoder.decode(spec)


def encode_spec(spec: PipelineSpec) -> bytes:
    """Encode a specification."""
    return msgspec.json.encode(spec)

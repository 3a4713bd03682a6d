"""The specification of a pipeline in JSON, and its conversion to the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from service.errors import InvalidPipelineSpecError
from service.frontier.errors import InvalidPipelineError, InvalidRangeError
from service.frontier.graph import Pipeline, Stage
from service.frontier.policies import (
    NO_POLICY,
    NO_THROTTLE,
    IdlePolicy,
    StagePolicy,
    ThrottleGroup,
    ThrottlePolicy,
)
from service.frontier.ranges import KEY_SPACE, KeyLayout, KeyRange, Layout, ShardLayout

ONLY_AT_THE_END = r"(?!\n)"
"""Addition to a pattern that ends in `$`: in Python, `$` also matches before a newline at the end."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$" + ONLY_AT_THE_END

MAX_STAGES = 1_000
MAX_RANGES = 1_000_000
MAX_POLICY_MS = 100 * 365 * 86_400_000

Name = Annotated[
    str,
    Meta(pattern=NAME_PATTERN, description="A letter or digit, then up to 127 of `A-Za-z0-9._-`"),
]


class KeyRangeSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys from `start` up to, not including, `end`, of 0 to 4294967296."""

    start: Annotated[int, Meta(ge=0, lt=KEY_SPACE)]
    end: Annotated[int, Meta(gt=0, le=KEY_SPACE)]


_LONGEST_EXPRESSION = 1_000
NONE_JOINED: Mapping[str, Sequence[str]] = {}


class IdleSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Conditions under which a source does not wait for a quiet shard."""

    after_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_POLICY_MS,
            description="The time for which it must have no record and no backlog, not be paused, and"
            " be watched: under a lease throughout, or while its stage's run committed epochs",
        ),
    ]
    then: Annotated[
        Literal["exclude", "follow_clock"],
        Meta(
            description="`exclude`: it is idle, so it is left out of the minimum. `follow_clock`: it"
            " promises the service's clock minus `slack_ms`"
        ),
    ]
    slack_ms: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=MAX_POLICY_MS,
                description="With `follow_clock`, and only then: the largest lateness of a record when"
                " it is reported",
            ),
        ]
        | None
    ) = None


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
    percentiles: (
        Annotated[
            tuple[Annotated[int, Meta(ge=1, le=99)], ...],
            Meta(max_length=99, description="Percentile watermarks that are computed"),
        ]
        | None
    ) = None
    idle: IdleSpec | None = None
    dynamic: Annotated[
        bool,
        Meta(
            description="A source: further shards join with their first claim, and leave once they are"
            " final. They are not shown in the specification"
        ),
    ] = False
    watermark: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=_LONGEST_EXPRESSION,
                description="A source: the expression of SQL from which its executor makes a shard's"
                " promise, as the greatest value over the shard's rows. The service shows it, and does"
                " not evaluate it",
                examples=["at - INTERVAL 10 MINUTES"],
            ),
        ]
        | None
    ) = None


class ThrottleGroupSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Sources whose shards may not run ahead of the slowest of them by more than a drift."""

    stages: Annotated[
        tuple[Name, ...],
        Meta(
            min_length=1, max_length=MAX_STAGES, description="Sources; each is in one group at most"
        ),
    ]
    max_drift_ms: Annotated[int, Meta(ge=0, le=MAX_POLICY_MS, description="In event time")]


class ThrottleStageSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Largest lag of a stage behind an upstream source before the source is throttled."""

    max_lag_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_POLICY_MS,
            description="Between the output watermarks of the source and of the stage. Beyond it the"
            " source should read at `max_lag_ms` ÷ lag of its rate, at least 0.1",
        ),
    ]


class ThrottleSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Conditions under which the sources of a job should pause or slow down."""

    groups: Annotated[
        tuple[ThrottleGroupSpec, ...],
        Meta(
            max_length=MAX_STAGES,
            description="Alignment: sources that stay together, within a drift",
        ),
    ] = ()
    stages: (
        Annotated[
            dict[Name, ThrottleStageSpec],
            Meta(max_length=MAX_STAGES, description="Back-pressure, by the stage that is behind"),
        ]
        | None
    ) = None


class PipelineSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A pipeline: its stages by name."""

    stages: Annotated[dict[Name, StageSpec], Meta(min_length=1, max_length=MAX_STAGES)]
    throttle: ThrottleSpec | None = None

    @property
    def range_count(self) -> int:
        """Number of its ranges, computed before any of them takes memory."""
        return sum(_count(stage) for stage in self.stages.values())

    def pipeline(self, joined: Mapping[str, Sequence[str]] = NONE_JOINED) -> Pipeline:
        """Check the specification and return the pipeline, with joined shards of its dynamic sources.

        Raises `InvalidPipelineSpecError`, naming the stage.
        """
        stages: dict[str, Stage] = {}
        is_throttled = bool(_throttle(self.throttle))
        for name, spec in self.stages.items():
            try:
                stages[name] = Stage(
                    tuple(sorted(spec.inputs or ())),
                    _layout(spec, joined.get(name, ()) if spec.dynamic else ()),
                    _policy(name, spec, is_throttled=is_throttled and spec.shards is not None),
                )
            except InvalidRangeError as error:
                raise InvalidPipelineSpecError(f"stage {name!r}: {error}", stage=name) from None
        try:
            return Pipeline(stages, _throttle(self.throttle))
        except InvalidPipelineError as error:
            raise InvalidPipelineSpecError(str(error), stage=error.stage) from None


def _count(spec: StageSpec) -> int:
    if isinstance(spec.ranges, int):
        return spec.ranges
    return len(spec.shards or spec.ranges or ())


def _layout(spec: StageSpec, joined: Sequence[str]) -> Layout | None:
    given = [spec.shards is not None, spec.ranges is not None, spec.passthrough]
    if sum(given) != 1:
        raise InvalidRangeError(
            "set exactly one of `shards` (a source), `ranges` (a keyed stage) and `passthrough: true`"
        )
    if spec.shards is not None:
        declared = set(spec.shards)
        return ShardLayout.of((*spec.shards, *(name for name in joined if name not in declared)))
    if isinstance(spec.ranges, int):
        return KeyLayout.tile(spec.ranges)
    if spec.ranges is not None:
        return KeyLayout.of(KeyRange(r.start, r.end) for r in spec.ranges)
    return None


def _policy(name: str, spec: StageSpec, *, is_throttled: bool) -> StagePolicy:
    percentiles = spec.percentiles or ()
    if len(set(percentiles)) < len(percentiles):
        raise InvalidPipelineSpecError(
            f"stage {name!r}: percentiles {list(percentiles)} names one twice", stage=name
        )
    if spec.shards is None and (spec.idle is not None or spec.dynamic):
        member = "dynamic" if spec.dynamic else "idle"
        raise InvalidPipelineSpecError(
            f"stage {name!r}: `{member}` is for a source: only shards come, go and become quiet",
            stage=name,
        )
    if spec.shards is None and spec.watermark is not None:
        raise InvalidPipelineSpecError(
            f"stage {name!r}: `watermark` is for a source: the watermark of any other stage follows from"
            f" its inputs",
            stage=name,
        )
    if spec.passthrough and percentiles:
        raise InvalidPipelineSpecError(
            f"stage {name!r}: a passthrough has no ranges, so it cannot have `percentiles`",
            stage=name,
        )
    if not (percentiles or spec.idle or spec.dynamic or is_throttled):
        return NO_POLICY
    idle = None if spec.idle is None else _idle_policy(name, spec.idle)
    return StagePolicy(tuple(sorted(percentiles)), idle, spec.dynamic, is_throttled)


def _idle_policy(name: str, spec: IdleSpec) -> IdlePolicy:
    if (spec.then == "follow_clock") != (spec.slack_ms is not None):
        raise InvalidPipelineSpecError(
            f'stage {name!r}: idle.slack_ms goes with `"then": "follow_clock"`, and only with it',
            stage=name,
        )
    return IdlePolicy(spec.after_ms, spec.slack_ms)


def _throttle(spec: ThrottleSpec | None) -> ThrottlePolicy:
    if spec is None:
        return NO_THROTTLE
    return ThrottlePolicy(
        tuple(ThrottleGroup(group.stages, group.max_drift_ms) for group in spec.groups),
        {name: stage.max_lag_ms for name, stage in (spec.stages or {}).items()},
    )


class StoredSpec(PipelineSpec, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stored specification: in its author's form, and the shards that have joined since."""

    joined: dict[Name, tuple[Name, ...]] | None = None
    """By dynamic source, the shards that have joined with a claim and have not left."""

    def stored_pipeline(self) -> Pipeline:
        """Return the pipeline, with the shards that have joined."""
        return self.pipeline(self.joined or NONE_JOINED)


_decoder = msgspec.json.Decoder(StoredSpec)


def decode_spec(spec: bytes) -> StoredSpec:
    """Decode a stored specification. Raises msgspec's errors if it is invalid."""
    return _decoder.decode(spec)


def encode_spec(spec: PipelineSpec, joined: Mapping[str, Sequence[str]] = NONE_JOINED) -> bytes:
    """Encode a specification, with the shards that have joined its dynamic sources."""
    kept = {name: tuple(sorted(shards)) for name, shards in joined.items() if shards}
    return msgspec.json.encode(StoredSpec(spec.stages, spec.throttle, kept or None))

"""The pipeline: a directed acyclic graph of stages, and the propagation of watermarks along it."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from service.frontier.agreement import Agreement, Member, agreement
from service.frontier.errors import InvalidPipelineError
from service.frontier.policies import (
    NO_POLICY,
    NO_THROTTLE,
    IdlePolicy,
    StagePolicy,
    ThrottlePolicy,
)
from service.frontier.ranges import Layout, ShardLayout
from service.frontier.timestamps import MAX, MIN


@dataclass(frozen=True, slots=True)
class Stage:
    """A step with a watermark of its own.

    A *source* has shards and no inputs, a *keyed* stage has inputs and key ranges, a *passthrough*
    stage has inputs and no ranges: its output is its input.

    >>> Stage(("a",)).is_passthrough, Stage((), ShardLayout.of("0")).is_source
    (True, True)
    """

    inputs: tuple[str, ...] = ()
    layout: Layout | None = None
    policy: StagePolicy = NO_POLICY

    @property
    def is_source(self) -> bool:
        """True for a source: its ranges are shards."""
        return isinstance(self.layout, ShardLayout)

    @property
    def is_passthrough(self) -> bool:
        """True for a stage without ranges."""
        return self.layout is None


class Status(StrEnum):
    """A stage's status, which follows from its output watermark."""

    UNKNOWN = "unknown"
    """The output watermark does not exist yet."""
    ACTIVE = "active"
    """The stage has an output watermark, and more may come."""
    IDLE = "idle"
    """No range is active: the watermark stands still, and downstreams do not wait for it."""
    FINAL = "final"
    """The output is at the end of time."""


@dataclass(frozen=True, slots=True)
class StageWatermark:
    """The watermarks of a stage, as readers see them.

    >>> StageWatermark().status, StageWatermark(output=5).status
    (<Status.UNKNOWN: 'unknown'>, <Status.ACTIVE: 'active'>)
    """

    input: int = MIN
    output: int = MIN
    idle: bool = False

    @property
    def status(self) -> Status:
        """The status that follows from these."""
        if self.output == MAX:
            return Status.FINAL
        if self.idle:
            return Status.IDLE
        return Status.UNKNOWN if self.output == MIN else Status.ACTIVE

    def advance(self, input_: int, output: int, *, idle: bool) -> StageWatermark:
        """Join with newer values. Watermarks never go back; idleness may come and go.

        >>> StageWatermark(10, 8).advance(9, 12, idle=False)
        StageWatermark(input=10, output=12, idle=False)
        """
        output = max(self.output, output)
        return StageWatermark(max(self.input, input_), output, idle and output != MAX)


@dataclass(frozen=True)
class Pipeline:
    """A checked graph. Raises `InvalidPipelineError`, naming the stage, if it is invalid.

    >>> Pipeline({"s": Stage((), ShardLayout.of("0")), "k": Stage(("s",))}).order
    ('s', 'k')
    >>> Pipeline({"a": Stage(("b",)), "b": Stage(("a",))})
    Traceback (most recent call last):
    service.frontier.errors.InvalidPipelineError: stage 'a': inputs form a cycle: a → b → a
    >>> Pipeline({"k": Stage(("s",))})
    Traceback (most recent call last):
    service.frontier.errors.InvalidPipelineError: stage 'k': its input 's' is not in the pipeline
    """

    stages: Mapping[str, Stage] = field(hash=False)
    throttle: ThrottlePolicy = field(default=NO_THROTTLE, hash=False)

    def __post_init__(self) -> None:
        if not self.stages:
            raise InvalidPipelineError(None, "it has no stages")
        for name, stage in self.stages.items():
            _check_stage(name, stage, self.stages)
        self.order  # noqa: B018  (a cycle is found by sorting)
        _check_throttle(self.throttle, self.stages)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The stages, each after its inputs."""
        graph = {name: stage.inputs for name, stage in self.stages.items()}
        try:
            return tuple(TopologicalSorter(graph).static_order())
        except CycleError as error:
            cycle: list[str] = _from_smallest(error.args[1])
            raise InvalidPipelineError(
                cycle[0], f"inputs form a cycle: {' → '.join(cycle)}"
            ) from None

    @cached_property
    def range_count(self) -> int:
        """Number of ranges of all its stages."""
        return sum(len(stage.layout) for stage in self.stages.values() if stage.layout is not None)

    @cached_property
    def idle_policies(self) -> Mapping[str, IdlePolicy]:
        """The policies for idleness, by stage."""
        policies = {name: stage.policy.idle for name, stage in self.stages.items()}
        return {name: policy for name, policy in policies.items() if policy is not None}

    @cached_property
    def dynamic_sources(self) -> tuple[str, ...]:
        """The sources whose shards may join and leave."""
        return tuple(name for name, stage in self.stages.items() if stage.policy.is_dynamic)

    @cached_property
    def downstreams(self) -> Mapping[str, tuple[str, ...]]:
        """The downstream stages of each stage."""
        found: dict[str, list[str]] = {name: [] for name in self.stages}
        for name in self.order:
            for upstream in self.stages[name].inputs:
                found[upstream].append(name)
        return {name: tuple(downstream) for name, downstream in found.items()}

    @cached_property
    def sources_above(self) -> Mapping[str, frozenset[str]]:
        """The upstream sources of each stage; for a source, itself."""
        found: dict[str, frozenset[str]] = {}
        for name in self.order:
            stage = self.stages[name]
            above = frozenset[str]().union(*(found[upstream] for upstream in stage.inputs))
            found[name] = frozenset({name}) if stage.is_source else above
        return found

    def ancestors(self, stages: Iterable[str]) -> tuple[str, ...]:
        """Return these stages and all stages upstream of them, each after its inputs.

        >>> flow = Pipeline({"s": Stage((), ShardLayout.of("0")), "u": Stage(("s",))})
        >>> flow.ancestors(["u"]), flow.ancestors(["s"])
        (('s', 'u'), ('s',))
        """
        found: set[str] = set()
        ahead = [name for name in stages if name in self.stages]
        while ahead:
            name = ahead.pop()
            if name not in found:
                found.add(name)
                ahead.extend(self.stages[name].inputs)
        return tuple(name for name in self.order if name in found)

    def reach(self, touched: Iterable[str]) -> frozenset[str]:
        """Return the `touched` stages and every stage that they can move.

        >>> flow = Pipeline({"s": Stage((), ShardLayout.of("0")), "u": Stage(("s",))})
        >>> sorted(flow.reach(["s"])), sorted(flow.reach(["u"]))
        (['s', 'u'], ['u'])
        """
        found: set[str] = set()
        ahead = list(touched)
        while ahead:
            name = ahead.pop()
            if name not in found:
                found.add(name)
                ahead.extend(self.downstreams[name])
        return frozenset(found)

    def propagate(
        self,
        published: Mapping[str, StageWatermark],
        agreements: Mapping[str, Agreement],
        touched: Iterable[str],
    ) -> dict[str, StageWatermark]:
        """Propagate the agreements of the `touched` stages along the graph; return the changed
        watermarks.

        `published` is the watermark of every stage, `agreements` the agreement of the ranges of each
        stage that has ranges. The result, laid over `published`, is one consistent snapshot: stages are
        taken in the order of the graph, so no input is ahead of the outputs that it was made of.

        >>> flow = Pipeline({"s": Stage((), ShardLayout.of("0")), "u": Stage(("s",))})
        >>> flow.propagate({}, {"s": Agreement(7)}, ["s"])["u"]
        StageWatermark(input=7, output=7, idle=False)
        """
        changed: dict[str, StageWatermark] = {}
        around = ChainMap(changed, dict(published))
        affected = set(touched)
        for name in self.order:
            if name not in affected:
                continue
            before = published.get(name, _NOWHERE)
            after = self._step(name, before, around, agreements)
            if after != before:
                changed[name] = after
                affected.update(self.downstreams[name])
        return changed

    def unpublished(
        self, published: Mapping[str, StageWatermark], agreements: Mapping[str, Agreement]
    ) -> frozenset[str]:
        """Return the stages whose ranges have moved on from their published watermarks.

        `agreements`: of the ranges of some stages. An advance is on its way to the readers, or cannot be
        published: the ranges do not hold the stage.

        >>> flow = Pipeline({"s": Stage((), ShardLayout.of("0")), "u": Stage(("s",))})
        >>> at = dict.fromkeys("su", StageWatermark(5, 5))
        >>> flow.unpublished(at, {"s": Agreement(7)}), flow.unpublished(at, {"s": Agreement(5)})
        (frozenset({'s'}), frozenset())
        """
        return frozenset(
            name
            for name in agreements
            if self._step(name, published[name], published, agreements) != published[name]
        )

    def _step(
        self,
        name: str,
        before: StageWatermark,
        around: Mapping[str, StageWatermark],
        agreements: Mapping[str, Agreement],
    ) -> StageWatermark:
        stage = self.stages[name]
        if stage.is_source:
            own = agreements[name]
            return before.advance(MIN, own.watermark, idle=own.idle)
        upstream = input_agreement(around.get(u, _NOWHERE) for u in stage.inputs)
        if stage.is_passthrough:
            joined = max(before.input, upstream.watermark)
            return before.advance(joined, joined, idle=upstream.idle)
        own = agreements[name]
        observed = max(before.input, upstream.watermark)
        return before.advance(
            observed, own.watermark, idle=is_keyed_idle(upstream, own, published_input=observed)
        )


_NOWHERE = StageWatermark()


def input_agreement(upstreams: Iterable[StageWatermark]) -> Agreement:
    """Return the agreement of a stage's upstreams: its input watermark.

    >>> input_agreement([StageWatermark(output=5), StageWatermark(output=9)]).watermark
    5
    >>> input_agreement([StageWatermark(output=5, idle=True), StageWatermark(output=9)]).watermark
    9
    """
    return agreement(Member(u.output, u.idle) for u in upstreams)


def is_keyed_idle(upstreams: Agreement, ranges: Agreement, *, published_input: int) -> bool:
    """Return whether a keyed stage is idle: its upstreams are idle, and its ranges hold no rows.

    A range may hold events of its idle upstreams, and a downstream that continued without the range
    would get them late. So each range must be idle, and must have observed the published input. A
    promise proves the latter, since it never exceeds the input that its range has observed.

    >>> quiet, ranges = Agreement(7, idle=True), Agreement(7, idle=True)
    >>> is_keyed_idle(quiet, ranges, published_input=7), is_keyed_idle(quiet, ranges, published_input=8)
    (True, False)
    >>> is_keyed_idle(Agreement(9), ranges, published_input=7)
    False
    """
    return upstreams.idle and ranges.idle and ranges.watermark >= published_input


def is_ahead(reached: Agreement, published: StageWatermark) -> bool:
    """Return whether the agreement of a stage's ranges may be ahead of its published watermark, so that
    it must be checked.

    >>> is_ahead(Agreement(7), StageWatermark(output=5))
    True
    >>> is_ahead(Agreement(5, idle=True), StageWatermark(output=5))
    True
    >>> is_ahead(Agreement(5), StageWatermark(output=5))
    False
    """
    return reached.watermark > published.output or reached.idle != published.idle


def _check_stage(name: str, stage: Stage, stages: Mapping[str, Stage]) -> None:
    if stage.is_source and stage.inputs:
        raise InvalidPipelineError(name, "a source (shards) has no inputs")
    if not stage.is_source and not stage.inputs:
        raise InvalidPipelineError(name, "a stage without shards needs inputs")
    for upstream in stage.inputs:
        if upstream not in stages:
            raise InvalidPipelineError(name, f"its input {upstream!r} is not in the pipeline")
    if len(set(stage.inputs)) < len(stage.inputs):
        raise InvalidPipelineError(name, "an input is named twice")


def _check_throttle(throttle: ThrottlePolicy, stages: Mapping[str, Stage]) -> None:
    grouped: set[str] = set()
    for group in throttle.groups:
        for name in group.stages:
            if name not in stages or not stages[name].is_source:
                raise InvalidPipelineError(name, "throttle.groups names it, but it is not a source")
            if name in grouped:
                raise InvalidPipelineError(name, "throttle.groups names it twice")
            grouped.add(name)
    for name in throttle.max_lag_ms:
        if name not in stages or stages[name].is_source:
            raise InvalidPipelineError(
                name, "throttle.stages names it, but it is not a stage with inputs"
            )


def _from_smallest(cycle: list[str]) -> list[str]:
    """Rotate a cycle so that it begins, and ends, with its smallest name."""
    ring = cycle[:-1][::-1]
    first = ring.index(min(ring))
    return [*ring[first:], *ring[:first], ring[first]]

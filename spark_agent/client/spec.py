"""Parsing of a pipeline's specification, as far as the agent needs it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, cast

_KEY_SPACE: Final = 2**32
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def is_name(name: object) -> bool:
    """Return whether the service accepts the name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_name(what: str, name: object) -> None:
    """Raise `ValueError` unless the service accepts the name.

    >>> check_name("shard", "été")
    Traceback (most recent call last):
    ValueError: shard 'été' is not a valid name: use up to 128 letters A-Z and a-z, digits, and \
. _ -, and start with a letter or a digit
    """
    if not is_name(name):
        raise ValueError(
            f"{what} {name!r} is not a valid name: use up to 128 letters A-Z and a-z, digits, and "
            f". _ -, and start with a letter or a digit"
        )


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage: a source has shards, a keyed stage has ranges (their ids, in order)."""

    name: str
    shards: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    has_idle_policy: bool = False
    """True if a quiet shard of the source counts as idle while a worker watches it."""
    percentiles: tuple[int, ...] = ()
    """The percentile watermarks that the service keeps of the stage."""
    is_dynamic: bool = False
    """True if shards that are not in the specification join when they are claimed."""
    watermark: str | None = None
    """The expression of SQL for the promises of a source's shards; None: not in the specification."""

    @property
    def role(self) -> str:
        """Kind of the stage, for error messages."""
        if self.shards:
            return "source"
        return "keyed stage" if self.ranges else "passthrough stage"


def read_spec(stages: Mapping[str, Mapping[str, Any]]) -> dict[str, StageSpec]:
    """Parse the `stages` of a specification, in the service's format. Raises `ValueError`.

    Only the form of each stage is checked here; the service checks the graph.
    """
    _check_shape(stages)
    if not stages:
        raise ValueError("spec: it has no stages; give it at least one source")
    return {name: _read_stage(name, stage) for name, stage in stages.items()}


def _check_shape(stages: object) -> None:
    if not isinstance(stages, Mapping):
        raise ValueError(  # noqa: TRY004  (like every error in a specification)
            f"spec: it must be a mapping from stage names to stages, {{…}}, not {stages!r}"
        )
    found = cast("Mapping[object, object]", stages)
    for name, stage in found.items():
        if not isinstance(stage, Mapping):
            raise ValueError(  # noqa: TRY004
                f"spec: stage {name!r} must be a mapping, such as {{'shards': […]}}, not {stage!r}"
            )


def _read_stage(name: str, stage: Mapping[str, Any]) -> StageSpec:
    check_name("spec: stage", name)
    inputs = tuple(map(str, _listed(name, stage, "inputs")))
    percentiles = tuple(cast("Sequence[int]", _listed(name, stage, "percentiles")))
    if "shards" in stage:
        shards = tuple(map(str, _listed(name, stage, "shards")))
        for shard in shards:
            check_name(f"spec: stage {name!r}: shard", shard)
        has_policy = stage.get("idle") is not None
        return StageSpec(
            name,
            shards=shards,
            has_idle_policy=has_policy,
            percentiles=percentiles,
            is_dynamic=bool(stage.get("dynamic")),
            watermark=_expression(name, stage.get("watermark")),
        )
    if "ranges" in stage:
        if isinstance(stage["ranges"], int):
            _check_count(name, stage["ranges"])
            ranges = range_ids(stage["ranges"])
        else:
            ranges = range_ids(cast("Any", _listed(name, stage, "ranges")))
        return StageSpec(name, ranges=ranges, inputs=inputs, percentiles=percentiles)
    if stage.get("passthrough"):
        return StageSpec(name, inputs=inputs, percentiles=percentiles)
    raise ValueError(
        f"spec: stage {name!r} has neither 'shards' (a source), nor 'ranges' (a keyed stage), nor "
        f"'passthrough': {dict(stage)!r}"
    )


def _expression(name: str, watermark: object) -> str | None:
    if watermark is not None and not isinstance(watermark, str):
        raise ValueError(
            f"spec: stage {name!r}: watermark must be an expression of SQL, such as "
            f"'at - INTERVAL 10 MINUTES', not {watermark!r}"
        )
    return watermark


def _listed(name: str, stage: Mapping[str, Any], member: str) -> Sequence[object]:
    found: object = stage.get(member, ())
    if found is None and member == "percentiles":
        return ()
    if not isinstance(found, (list, tuple)):
        expected = "a number of key ranges, or a list of them" if member == "ranges" else "a list"
        raise ValueError(  # noqa: TRY004  (like every error in a specification)
            f"spec: stage {name!r}: {member} must be {expected}, not {found!r}"
        )
    return cast("Sequence[object]", found)


def _check_count(name: str, ranges: int) -> None:
    if ranges < 1:
        raise ValueError(f"spec: stage {name!r}: ranges must be 1 or more, not {ranges!r}")


def upstream(stages: Mapping[str, StageSpec], stage: str, within: Collection[str]) -> set[str]:
    """Return the nearest upstream stages outside `within` that feed a stage's input.

    Passthrough stages, which no query executes, and the stages in `within` are replaced by their
    own upstreams.

    >>> stages = read_spec({"a": {"shards": ["0"]}, "b": {"shards": ["0"]},
    ...   "both": {"inputs": ["a", "b"], "passthrough": True}, "k": {"inputs": ["both"], "ranges": 1}})
    >>> upstream(stages, "k", {"a"})
    {'b'}
    """
    found: set[str] = set()
    for each in stages[stage].inputs:
        above = stages.get(each)
        if above is None:
            continue
        if each in within or above.role == "passthrough stage":
            found |= upstream(stages, each, within)
        else:
            found.add(each)
    return found


def ancestors(stages: Mapping[str, StageSpec], stage: str) -> set[str]:
    """Return every stage that a stage's input depends on."""
    found: set[str] = set()
    for each in stages[stage].inputs:
        if each in stages and each not in found:
            found |= {each} | ancestors(stages, each)
    return found


def range_ids(ranges: int | Sequence[Mapping[str, int]]) -> tuple[str, ...]:
    """Return the ids of key ranges, in the order of the key space.

    >>> range_ids(2)
    ('00000000-80000000', '80000000-100000000')
    >>> range_ids([{"start": 16, "end": 4294967296}, {"start": 0, "end": 16}])
    ('00000000-00000010', '00000010-100000000')
    """
    if isinstance(ranges, int):
        bounds = [i * _KEY_SPACE // ranges for i in range(ranges + 1)]
        pairs = list(pairwise(bounds))
    else:
        pairs = sorted((each["start"], each["end"]) for each in ranges)
    return tuple(f"{start:08x}-{end:08x}" for start, end in pairs)

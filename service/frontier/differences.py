"""Differences between two specifications of a job, in a few words for each stage."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from service.frontier.graph import Pipeline, Stage
from service.frontier.policies import ThrottlePolicy
from service.frontier.ranges import ShardLayout

_NAMED: Final = 3
"""Number of inputs or shards that are named."""

_WHOLE: Final = frozenset({"new", "removed"})
"""Words of a whole stage that comes, or goes."""

_UNNAMED: Final = re.compile(r"\branges\b|\d more\b|…$|^(new|removed|changed)$")
"""Words of a change that do not name each range that it may end, or were shortened."""

_THROTTLE: Final = {
    (False, True): "a throttle",
    (True, False): "no throttle any more",
    (True, True): "another throttle",
}
"""Words of a throttle, by its presence before and after."""


def differences(before: Pipeline, after: Pipeline) -> Mapping[str, str]:
    """Return what differs, by stage.

    >>> from service.frontier.ranges import KeyLayout
    >>> one, two = (Stage((), ShardLayout.of(names)) for names in ("ab", "bcdef"))
    >>> k, wider = (Stage(("s",), KeyLayout.tile(count)) for count in (2, 4))
    >>> before = Pipeline({"s": one, "k": k, "u": Stage(("k",))})
    >>> for each in differences(before, Pipeline({"s": two, "k": wider, "v": Stage(("k",))})).items():
    ...     print(*each)
    s + shards c, d, e and 1 more, - shard a
    k 4 ranges in place of 2
    u removed
    v new

    A throttle is a policy of the sources of its group, and of the stage whose lag it limits.

    >>> from service.frontier.policies import ThrottlePolicy
    >>> lag = ThrottlePolicy(max_lag_ms={"k": 60_000})
    >>> limited = Pipeline(before.stages, lag)
    >>> dict(differences(before, limited)), dict(differences(limited, before))
    ({'k': 'a throttle'}, {'k': 'no throttle any more'})
    >>> dict(differences(limited, Pipeline(before.stages, ThrottlePolicy(max_lag_ms={"k": 5}))))
    {'k': 'another throttle'}
    """
    found = {name: "removed" for name in before.stages if name not in after.stages}
    for name, stage in after.stages.items():
        old = before.stages.get(name)
        if old is None:
            found[name] = "new"
        elif any(_changes(old, stage)):
            found[name] = ", ".join(_changes(old, stage))
    had, has = _throttled(before.throttle), _throttled(after.throttle)
    for name in dict.fromkeys(_throttled_otherwise(before.throttle, after.throttle)):
        if found.get(name) not in _WHOLE:
            words = _THROTTLE[name in had, name in has]
            found[name] = ", ".join(filter(None, [found.get(name), words]))
    ordered = dict.fromkeys((*before.stages, *after.stages))
    return {name: found[name] for name in ordered if name in found}


def may_end_range(words: str, range_name: str) -> bool:
    """Return whether a change of a stage, in these words, may have ended a range. Not all names are
    written, and other key ranges are not named at all.

    >>> may_end_range("+ shard t-2, - shard t-1", "t-1")
    True
    >>> may_end_range("- shards a, b, c and 1 more", "t-1")
    True
    >>> may_end_range("+ shard t-2, a throttle", "t-1"), may_end_range("new", "t-1")
    (False, True)
    >>> may_end_range("- shards a, b…", "t-1"), may_end_range("changed", "t-1")
    (True, True)
    """
    return bool(_UNNAMED.search(words)) or range_name in re.split(r"[ ,]+", words)


def _throttled(by: ThrottlePolicy) -> set[str]:
    return {*by.max_lag_ms, *(name for group in by.groups for name in group.stages)}


def _throttled_otherwise(before: ThrottlePolicy, after: ThrottlePolicy) -> Iterator[str]:
    """Yield the sources whose groups differ, and the stages whose limits of lag do."""
    for these, others in ((before, after), (after, before)):
        for group in these.groups:
            if group not in others.groups:
                yield from group.stages
        for stage, lag_ms in these.max_lag_ms.items():
            if others.max_lag_ms.get(stage) != lag_ms:
                yield stage


def _changes(old: Stage, new: Stage) -> Iterator[str]:
    yield from _named("input", old.inputs, new.inputs)
    if old.layout != new.layout:
        yield from _ranges(old, new)
    # Follows from the throttle of the job, which is compared apart.
    if replace(old.policy, is_throttled=False) != replace(new.policy, is_throttled=False):
        yield "another policy"


def _ranges(old: Stage, new: Stage) -> Iterator[str]:
    if isinstance(old.layout, ShardLayout) and isinstance(new.layout, ShardLayout):
        yield from _named("shard", old.layout.names, new.layout.names)
        return
    was, now = (0 if each.layout is None else len(each.layout) for each in (old, new))
    yield "other ranges" if was == now else f"{now:,} ranges in place of {was:,}"


def _named(kind: str, old: Iterable[str], new: Iterable[str]) -> Iterator[str]:
    """Yield the names that have come, and those that have gone."""
    before, after = dict.fromkeys(old), dict.fromkeys(new)
    for sign, names in (
        ("+", [each for each in after if each not in before]),
        ("-", [each for each in before if each not in after]),
    ):
        if names:
            plural = "s" if len(names) > 1 else ""
            more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
            yield f"{sign} {kind}{plural} {', '.join(names[:_NAMED])}{more}"

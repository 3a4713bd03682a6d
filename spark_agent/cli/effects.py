"""Effects of a change of a job's specification, in words. Does not import Spark."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, cast

_SHOWN: Final = 10


def removals(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield the stages and shards that are removed.

    >>> before = {"stages": {"s": {"shards": ["a", "b"]}, "k": {"inputs": ["s"], "ranges": 2}}}
    >>> list(removals(before, {"stages": {"s": {"shards": ["b"]}}}))
    ['shard a of s', 'stage k']
    """
    new: Mapping[str, Any] = after.get("stages", {})
    for name, stage in before.get("stages", {}).items():
        if name not in new:
            yield f"stage {name}"
        elif isinstance(new[name], dict):
            kept = set(new[name].get("shards") or ())
            yield from (
                f"shard {each} of {name}" for each in stage.get("shards") or () if each not in kept
            )


def effects(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    retired: Callable[[str], Collection[str]],
    is_final: Callable[[str], bool],
) -> Iterator[str]:
    """Yield the effects on watermarks of other key ranges, and of shards that come and go. `retired`
    returns the retired shards of a source.

    >>> before = {"stages": {"s": {"shards": ["a", "b", "old"]}, "t": {"shards": ["x"]}}}
    >>> after = {"stages": {"s": {"shards": ["b", "c", "d"]}, "t": {"shards": ["x"]}}}
    >>> old = {"s": ["old"]}.__getitem__
    >>> for line in effects(before, after, old, "t".__eq__): print(line)
    s stands still until new shards have reported: c, d
    s does not wait any longer for: a
    s has not waited for: old, which is retired
    >>> next(effects(before, after, old, "s".__eq__)).partition(";")[0]
    's is final, and all rows of new shards are late: c, d'

    Other key ranges supersede all leases of their stage.

    >>> k, wider = ({"stages": {"k": {"inputs": ["s"], "ranges": count}}} for count in (2, 4))
    >>> list(effects(k, wider, old, "t".__eq__))
    ['k stands still until its workers claim the new ranges']
    """
    new: Mapping[str, Any] = after.get("stages", {})
    for name, stage in before.get("stages", {}).items():
        changed = new.get(name)
        if not isinstance(changed, dict):
            continue
        later = cast("dict[str, Any]", changed)
        if _has_other_ranges(stage, later) and not is_final(name):
            yield f"{name} stands still until its workers claim the new ranges"
        old_shards = dict.fromkeys(map(str, stage.get("shards") or ()))
        new_shards = dict.fromkeys(map(str, later.get("shards") or ()))
        if not old_shards:
            continue
        come = [each for each in new_shards if each not in old_shards]
        gone = [each for each in old_shards if each not in new_shards]
        if come:
            yield (
                f"{name} is final, and all rows of new shards are late: {few(come)}; reset the job"
                " if they must count"
                if is_final(name)
                else f"{name} stands still until new shards have reported: {few(come)}"
            )
        done = retired(name) if gone else ()
        if waited := [each for each in gone if each not in done]:
            yield f"{name} does not wait any longer for: {few(waited)}"
        if aside := [each for each in gone if each in done]:
            yield f"{name} has not waited for: {few(aside)}, which {_are(aside)} retired"


def _has_other_ranges(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether a stage has other key ranges, which workers have to claim."""
    old, new = before.get("ranges"), after.get("ranges")
    return bool(old) and bool(new) and old != new


def _are(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"


def few(names: Sequence[str]) -> str:
    """Write the first of some names, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

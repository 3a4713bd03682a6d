"""Changes of a job's specification, and their effects, in words. Does not import Spark."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, cast

_SHOWN: Final = 10
_LISTED: Final = 10


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


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield the changes from one specification to another, a line each.

    >>> before = {"stages": {"s": {"shards": ["a"]}, "k": {"inputs": ["s"], "ranges": 2}}}
    >>> after = {"stages": {"s": {"shards": ["a", "b"]}, "m": {"inputs": ["s"]}}, "throttle": {}}
    >>> for line in differences(before, after): print(line)
    - stage k
    ~ stage s: shards: + "b"
    + stage m: {"inputs": ["s"]}
    ~ throttle: null -> {}
    """
    old: Mapping[str, Any] = before.get("stages", {})
    new: Mapping[str, Any] = after.get("stages", {})
    yield from (f"- stage {name}" for name in old if name not in new)
    for name, stage in new.items():
        if name not in old:
            yield f"+ stage {name}: {json.dumps(stage)}"
        elif old[name] != stage:
            yield f"~ stage {name}: {'; '.join(_members(old[name], stage))}"
    for part in sorted({*before, *after} - {"stages"}):
        if before.get(part) != after.get(part):
            yield f"~ {part}: {json.dumps(before.get(part))} -> {json.dumps(after.get(part))}"


def _members(old: Any, new: Any) -> Iterator[str]:  # noqa: ANN401  (any value of the file)
    if not isinstance(old, dict) or not isinstance(new, dict):
        yield f"{json.dumps(old)} -> {json.dumps(new)}"
        return
    before, after = cast("dict[str, Any]", old), cast("dict[str, Any]", new)
    for name in [*before, *(name for name in after if name not in before)]:
        if before.get(name) != after.get(name):
            yield f"{name}: {_change(before.get(name), after.get(name))}"


def _change(old: Any, new: Any) -> str:  # noqa: ANN401
    if isinstance(old, list) and isinstance(new, list):
        # A layout may have a million shards.
        before = dict.fromkeys(json.dumps(each) for each in cast("list[Any]", old))
        after = dict.fromkeys(json.dumps(each) for each in cast("list[Any]", new))
        gone = [f"- {each}" for each in before if each not in after][:_LISTED]
        come = [f"+ {each}" for each in after if each not in before][:_LISTED]
        return ", ".join([*gone, *come]) or "in another order"
    return f"{json.dumps(old)} -> {json.dumps(new)}"

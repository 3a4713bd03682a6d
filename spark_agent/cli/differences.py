"""Differences between two specifications of a job, a line each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

_LISTED: Final = 10
"""Number of shards that are listed of those that come, or go."""


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield the changes from one specification to another, a line each.

    >>> before = {"stages": {"s": {"shards": ["a"]}, "k": {"inputs": ["s"], "ranges": 2}}}
    >>> after = {"stages": {"s": {"shards": ["a", "b"]}, "m": {"inputs": ["s"]}}, "throttle": {}}
    >>> for line in differences(before, after): print(line)
    - stage k
    ~ stage s: shards: + "b"
    + stage m: {"inputs": ["s"]}
    + throttle: {}
    >>> list(differences(after, after | {"throttle": {"groups": []}}))
    ['~ throttle: {} -> {"groups": []}']
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
        was, wanted = before.get(part), after.get(part)
        if was is None and wanted is not None:
            yield f"+ {part}: {json.dumps(wanted)}"
        elif wanted is None and was is not None:
            yield f"- {part}: {json.dumps(was)}"
        elif was != wanted:
            yield f"~ {part}: {json.dumps(was)} -> {json.dumps(wanted)}"


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

"""Late ranges of final stages: their number, and in words.

A range whose retirement has made its stage final may report again, and a shard that a final stage gets
may report. Such a range holds nothing back, and is not a problem: nothing else shows that its rows are
late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from service.frontier import retirement as rule
from service.frontier.columns import Bools, lowest
from service.frontier.timestamps import MAX, MIN, time_text
from service.model.jobs import StageView
from service.model.observations import StageObservation

_NAMED: Final = 3
"""Number of late ranges that are named."""

REMEDY = "Reset the job, and run its queries again, if the late rows must count."
"""The next thing to do about late ranges of a final stage."""


@dataclass(frozen=True, slots=True)
class LateRanges:
    """The late ranges of a final stage."""

    stage: str
    total: int
    range: str
    """The one with the lowest promise."""
    promise: int
    has_worker: bool
    others: Sequence[str] = ()
    """The next ones, the lowest promises first."""


def late_ranges(
    stages: Mapping[str, StageView], observed: Mapping[str, StageObservation]
) -> Sequence[LateRanges]:
    """Return the late ranges of these stages."""
    found: list[LateRanges] = []
    for stage, seen in observed.items():
        if stages[stage].watermark.output != MAX:
            continue
        late = np.flatnonzero(_late(stages[stage], seen))
        if len(late):
            first, *others = late[lowest(seen.promises[late], _NAMED)].tolist()
            promise, has_worker = int(seen.promises[first]), bool(seen.owners[first])
            name, *more = map(seen.layout.name, (first, *others))
            found.append(LateRanges(stage, len(late), name, promise, has_worker, more))
    return found


def count_late_ranges(stage: StageView, seen: StageObservation) -> int:
    """Return the number of late ranges of a stage."""
    # The usual case, on every read: nothing is allocated for it.
    if stage.watermark.output != MAX:
        return 0
    return int(np.count_nonzero(_late(stage, seen)))


def _late(stage: StageView, seen: StageObservation) -> Bools:
    """Return the late ranges of a final stage."""
    since_ms = stage.advanced_at_ms
    return rule.late_ranges(seen.promises, seen.reported_at_ms, seen.raised_at_ms, since_ms)


def late_text(late: LateRanges, because: str | None) -> str:
    """Write that rows of a final stage's ranges are late. `because`: the reason of its retirement.

    >>> text = late_text(LateRanges("in", 1, "b", 60_000, has_worker=False), "lost disk")
    >>> text.partition(": ")[0]
    'range b of in has reported again after its retirement (lost disk)'
    >>> text.partition(": ")[2]
    'it is at 1970-01-01T00:01:00Z, has no worker, and all its rows are late, since in is final'
    >>> several = LateRanges("in", 5, "b", MIN, has_worker=True, others=["c", "d"])
    >>> late_text(several, None).partition(":")[0]
    'range b of in has reported since in is final'
    >>> late_text(several, None).partition(" (")[2]
    'so are the rows of ranges c, d and 2 more)'
    """
    again = (
        f"has reported since {late.stage} is final"
        if because is None
        else f"has reported again after its retirement ({because})"
    )
    at = "no time" if late.promise == MIN else time_text(late.promise)
    worker = "" if late.has_worker else ", has no worker"
    return (
        f"range {late.range} of {late.stage} {again}: it is at {at}{worker}, and all its rows are late,"
        f" since {late.stage} is final{_others_text(late)}"
    )


def _others_text(late: LateRanges) -> str:
    if not late.others:
        return ""
    left = late.total - 1 - len(late.others)
    more = f" and {left:,} more" if left else ""
    plural = "s" if len(late.others) > 1 else ""
    return f" (so are the rows of range{plural} {', '.join(late.others)}{more})"

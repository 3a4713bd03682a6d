"""Findings of an examination of a deployment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    verdict: Verdict
    says: str
    """The finding and, if something is at fault, its remedy."""


def compare_clocks(what: str, theirs_ms: int, asked_ms: int, answered_ms: int) -> Finding:
    """Judge a store's clock, read between two readings of this machine's.

    >>> compare_clocks("clock", theirs_ms=5_000, asked_ms=4_000, answered_ms=6_000).verdict
    'ok'
    >>> compare_clocks("clock", theirs_ms=9_000, asked_ms=4_000, answered_ms=6_000).says
    'is 3000 ms ahead of this machine: synchronise both, or lag and the times in the history are wrong'
    """
    apart_ms = max(theirs_ms - answered_ms, asked_ms - theirs_ms, 0)
    if apart_ms <= 1_000:
        return Finding(what, "ok", "agrees with this machine to a second")
    which = "ahead of" if theirs_ms > answered_ms else "behind"
    return Finding(
        what,
        "warning",
        f"is {apart_ms} ms {which} this machine: synchronise both, or lag and the times in the"
        " history are wrong",
    )

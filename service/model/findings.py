"""Findings of an examination of a deployment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one examination."""

    what: str
    verdict: Verdict
    says: str
    """The finding and, if something is at fault, its remedy."""


def compare_clocks(what: str, theirs_ms: int, before_ms: int, after_ms: int) -> Finding:
    """Compare a store's clock, read between two readings of this machine's, with this machine.

    >>> compare_clocks("clock", theirs_ms=5_000, before_ms=4_000, after_ms=6_000).verdict
    'ok'
    >>> compare_clocks("clock", theirs_ms=9_000, before_ms=4_000, after_ms=6_000).verdict
    'warning'
    """
    apart_ms = max(theirs_ms - after_ms, before_ms - theirs_ms, 0)
    if apart_ms <= 1_000:
        return Finding(what, "ok", "agrees with this machine to a second")
    which = "ahead of" if theirs_ms > after_ms else "behind"
    return Finding(
        what,
        "warning",
        f"is {apart_ms} ms {which} this machine: synchronise both, or lag and the times in the"
        " history are wrong",
    )

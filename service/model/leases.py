"""Requests for leases, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from service.frontier.leases import Rank

MAX_DENIED = 1_000
"""Largest number of denied ranges that a result lists."""

LostReason = Literal["expired", "superseded", "released", "unknown"]
"""The reason why a token, or a range under it, is no longer current."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim for ranges of a stage."""

    ranges: Sequence[str] | None
    """None: all ranges."""
    holder: str
    ttl_ms: int
    rank: Rank
    watched: bool = True
    """False: the worker does not poll the ranges under this lease, so it is not evidence that they are
    quiet (`continues_watch`)."""


@dataclass(frozen=True, slots=True)
class Denied:
    """A range that was not granted, with its holder, unless the stage has no such range."""

    range: str
    reason: Literal["held", "unknown"]
    holder: str | None = None
    expires_in_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease: the right to report for `granted` until it runs out."""

    token: str
    fence: int
    expires_in_ms: int
    granted: Sequence[str]
    denied: Sequence[Denied]
    """The first `MAX_DENIED` of them."""
    denied_total: int
    returned: bool = False
    """True if a range of the stage has returned, and the answer must wait (see `awaits_revision`)."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """A renewed lease."""

    token: str
    expires_in_ms: int
    ranges: Sequence[str]


@dataclass(frozen=True, slots=True)
class LostLease:
    """A lease that was not renewed."""

    token: str
    reason: LostReason

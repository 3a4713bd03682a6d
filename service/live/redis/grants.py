"""Claims as arguments of the scripts, and their results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from service.live.redis import schema
from service.live.redis.job_layout import JobLayout, Runs
from service.model.leases import MAX_DENIED, Claim, Denied, Grant


def claim_args(claim: Claim, runs: Runs) -> list[Any]:
    """Return a claim of these ranges as `grant` in `leases.lua` takes it."""
    rank = "".join(
        schema.number_text(part) for part in (claim.rank.run, claim.rank.epoch, claim.rank.attempt)
    )
    return [list(runs), claim.holder, claim.ttl_ms, rank, str(claim.rank.run), claim.watched]


def read_denied(
    job_layout: JobLayout,
    stage: str,
    unknown: Sequence[str],
    denied: Iterable[Sequence[Any]] | None,
) -> tuple[list[Denied], int]:
    """Return the ranges that were denied, the first `MAX_DENIED` of them, and their number."""
    listed = [Denied(name, "unknown") for name in unknown[:MAX_DENIED]]
    total = len(unknown)
    for holder, left_ms, held in denied or ():
        names = job_layout.names(stage, held)
        total += len(names)
        some = names[: MAX_DENIED - len(listed)]
        listed += [Denied(name, "held", holder, int(left_ms)) for name in some]
    return listed, total


def read_grant(
    job_layout: JobLayout,
    stage: str,
    claim: Claim,
    token: str,
    unknown: Sequence[str],
    values: Sequence[Any],
) -> Grant:
    """Read what was granted: [fence, runs of granted ranges, denied]."""
    fence, granted, denied = values
    names = job_layout.names(stage, granted)
    return Grant(
        token, int(fence), claim.ttl_ms, names, *read_denied(job_layout, stage, unknown, denied)
    )

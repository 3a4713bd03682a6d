"""Responses about leases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from service.api.range_names import written
from service.api.responses.common import Count
from service.model.leases import Denied, Grant, LostReason


class DeniedBody(Struct, frozen=True, omit_defaults=True):
    """A range that was not granted."""

    range: str
    reason: Literal["held", "unknown"]
    holder: str | None = None
    expires_in_ms: Count | None = None


class GrantBody(Struct, frozen=True, omit_defaults=True):
    """A lease. The token is shown here and nowhere else."""

    token: str
    fence: Count
    expires_in_ms: Count
    granted: list[str]
    denied: list[DeniedBody]
    denied_total: Count | None = None
    """Number of the denied ranges, only if not all are listed."""


class RenewalBody(Struct, frozen=True):
    """A renewed lease."""

    token: str
    expires_in_ms: Count
    ranges: list[str]


class LostBody(Struct, frozen=True):
    """A lease that was lost."""

    token: str
    reason: LostReason


class RenewedBody(Struct, frozen=True):
    """The result of a renewal."""

    renewed: list[RenewalBody]
    lost: list[LostBody]


class ReleasedBody(Struct, frozen=True):
    """Number of the leases that were current, and were released."""

    released: Count


def denied_bodies(denied: Iterable[Denied]) -> list[DeniedBody]:
    """Return the ranges that were not granted."""
    return [DeniedBody(d.range, d.reason, d.holder, d.expires_in_ms) for d in denied]


async def grant_body(grant: Grant) -> GrantBody:
    """Return a lease."""
    return GrantBody(
        grant.token,
        grant.fence,
        grant.expires_in_ms,
        await written(grant.granted),
        denied_bodies(grant.denied),
        grant.denied_total if grant.denied_total > len(grant.denied) else None,
    )

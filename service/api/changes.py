"""Changes of a job that explain the course of its watermarks, for readers of the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fastapi import Request

from service.api.descriptions import query, wall_clock
from service.api.endpoints import Call, Endpoints
from service.api.exchange import check_name, integer, span, whole_number
from service.api.paging import cursor_parameter
from service.api.responses.changes import ChangesBody, changes_body
from service.errors import (
    InvalidRequestError,
    UnavailableError,
    UnknownJobError,
    UnknownStageError,
)
from service.frontier.timestamps import EARLIEST, LATEST
from service.model.changes import Change
from service.model.keys import Role
from service.model.pipeline_spec import NAME_PATTERN

endpoints = Endpoints("pipelines")

DEFAULT_LIMIT, MAX_LIMIT = 100, 1_000

_MOST_AT_ONCE: Final = 10_000
"""Number of changes in one millisecond that pages pass."""


@endpoints.get(
    "/v1/jobs/{job}/changes",
    role=Role.READ,
    gives=ChangesBody,
    errors=(UnknownJobError, UnknownStageError, InvalidRequestError, UnavailableError),
    parameters=(
        query(
            "stage",
            "Without the runs and retirements of other stages",
            {"type": "string", "pattern": NAME_PATTERN},
        ),
        query("from", "The begin; the first change by default", wall_clock()),
        query("to", "The end, included; now by default", wall_clock()),
        query(
            "limit",
            "Number of changes",
            {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
        ),
        cursor_parameter({"type": "string", "pattern": r"^-?[0-9]{1,15}\.[0-9]{1,5}$"}),
    ),
)
async def get_changes(call: Call[None]) -> ChangesBody:
    """Show the changes of a job, newest first: its runs, resets, retirements and specifications.

    A job that was deleted and created again has its earlier changes, too, except runs.
    """
    request = call.request
    limit = integer(request, "limit", 1, MAX_LIMIT, DEFAULT_LIMIT) or DEFAULT_LIMIT
    stage = request.query_params.get("stage")
    if stage is not None:
        check_name("stage", stage)
    from_ms, until_ms = span(request, call.aggregator.now_ms())
    before_ms, skip = _cursor(request)
    until_ms = until_ms if before_ms is None else min(until_ms, before_ms)
    # One more shows that there is another page.
    found = await call.aggregator.changes.newest(
        call.job, stage, (from_ms, until_ms), limit + 1, skip
    )
    if stage is not None and all(each.stages is None for each in found):
        await call.aggregator.check_filter(call.job, stage)
    page = found[:limit]
    following = _following(page, before_ms, skip) if len(found) > limit else None
    return changes_body(page, following)


def _cursor(request: Request) -> tuple[int | None, int]:
    """Return the moment of the last change of the page before, and the number of its changes then."""
    cursor = request.query_params.get("cursor")
    if cursor is None:
        return None, 0
    at, _, skip = cursor.partition(".")
    return (
        whole_number("cursor", at, EARLIEST, LATEST),
        whole_number("cursor", skip, 0, _MOST_AT_ONCE),
    )


def _following(page: Sequence[Change], before_ms: int | None, skip: int) -> str:
    last_ms = page[-1].at_ms
    same = sum(each.at_ms == last_ms for each in page)
    return f"{last_ms}.{same + skip if last_ms == before_ms else same}"

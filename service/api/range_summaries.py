"""Summary of a stage's ranges: counts in buckets, and the most important ranges singly."""

from __future__ import annotations

from service.aggregator import SLOWEST, Condition, Window
from service.api.descriptions import query
from service.api.endpoints import Call, Endpoints
from service.api.exchange import integer
from service.api.responses.summaries import RangeSummaryBody, range_summary_body
from service.errors import InvalidRequestError, OverloadedError, UnknownJobError, UnknownStageError
from service.model.keys import Role
from service.model.pipeline_spec import MAX_RANGES

endpoints = Endpoints("watermarks")

DEFAULT_BUCKETS, MAX_BUCKETS = 200, 2_000
DEFAULT_LIMIT, MAX_LIMIT = 20, 1_000
ALL = "all"
_SHOWN = (SLOWEST, *(each.value for each in Condition), ALL)


@endpoints.get(
    "/v1/jobs/{job}/stages/{stage}/range-summary",
    role=Role.READ,
    gives=RangeSummaryBody,
    errors=(UnknownJobError, UnknownStageError, OverloadedError),
    parameters=(
        query(
            "buckets",
            "Number of buckets, each of neighbouring ranges",
            {"type": "integer", "minimum": 1, "maximum": MAX_BUCKETS, "default": DEFAULT_BUCKETS},
        ),
        query(
            "from",
            "The index of the first range",
            {"type": "integer", "minimum": 0, "maximum": MAX_RANGES, "default": 0},
        ),
        query(
            "to",
            "The index after the last range; all by default",
            {"type": "integer", "minimum": 1, "maximum": MAX_RANGES},
        ),
        query(
            "show",
            "The ranges to list: those of a condition, `slowest` (of those that the stage waits for), or"
            " `all` in their order. The lowest promise comes first",
            {"type": "string", "enum": list(_SHOWN), "default": SLOWEST},
        ),
        query(
            "limit",
            "Number of listed ranges",
            {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
        ),
    ),
)
async def get_range_summary(call: Call[None]) -> RangeSummaryBody:
    """Show a stage's ranges, or a window of them: counted in buckets, and some of them singly."""
    request = call.request
    show = request.query_params.get("show", SLOWEST)
    if show not in _SHOWN:
        raise InvalidRequestError(f"show is {show[:100]!r}: it must be one of {', '.join(_SHOWN)}")
    window = Window(
        start=integer(request, "from", 0, MAX_RANGES, 0) or 0,
        end=integer(request, "to", 1, MAX_RANGES, None),
        buckets=integer(request, "buckets", 1, MAX_BUCKETS, DEFAULT_BUCKETS) or DEFAULT_BUCKETS,
        show=None if show == ALL else show,
        limit=integer(request, "limit", 1, MAX_LIMIT, DEFAULT_LIMIT) or DEFAULT_LIMIT,
    )
    async with call.turn():
        found = await call.aggregator.range_summaries.read(call.job, call.stage, window)
        return range_summary_body(call.job, call.stage, found)

"""Past watermarks of a stage, and estimates."""

from __future__ import annotations

from typing import Final

from fastapi import Response

from service.api.descriptions import event_time, query, wall_clock
from service.api.endpoints import Call, Endpoints
from service.api.exchange import answer, integer, moment, span
from service.api.responses.history import EtaBody, HistoryBody, eta_body, past_watermark_body
from service.errors import InvalidRequestError, UnavailableError, UnknownJobError, UnknownStageError
from service.frontier.timestamps import understood
from service.model.keys import Role

endpoints = Endpoints("watermarks")

DEFAULT_POINTS, MAX_POINTS = 500, 10_000
_DEFAULT_SPAN_MS: Final = 3_600_000

AT: Final = "Tidegauge-At"


@endpoints.get(
    "/v1/jobs/{job}/stages/{stage}/history",
    role=Role.READ,
    gives=HistoryBody,
    errors=(UnknownJobError, UnknownStageError, UnavailableError),
    parameters=(
        query("from", "The begin; an hour before `to` by default", wall_clock()),
        query("to", "The end, included; now by default", wall_clock()),
        query(
            "points",
            "Number of intervals; the answer has the last change of each",
            {"type": "integer", "minimum": 1, "maximum": MAX_POINTS, "default": DEFAULT_POINTS},
        ),
    ),
)
async def get_history(call: Call[None]) -> HistoryBody:
    """Show a stage's past watermarks by wall time, in the job's present generation.

    The first point is the state at `from`, unless the job or its history begins later. The others are
    changes after it.
    """
    points = integer(call.request, "points", 1, MAX_POINTS, DEFAULT_POINTS) or DEFAULT_POINTS
    from_ms, until_ms = span(call.request, call.aggregator.now_ms(), _DEFAULT_SPAN_MS)
    found = await call.aggregator.history.points(
        call.job, call.stage, from_ms=from_ms, until_ms=until_ms, points=points
    )
    return HistoryBody(list(map(past_watermark_body, found)))


@endpoints.get(
    "/v1/jobs/{job}/stages/{stage}/eta",
    role=Role.READ,
    gives=EtaBody,
    errors=(UnknownJobError, UnknownStageError, UnavailableError),
    parameters=(
        {
            **query("at", "The event time for the output watermark to reach", event_time()),
            "required": True,
        },
    ),
    headers={AT: "The instant of `at` as understood. An instant of 1970 means: seconds were sent"},
)
async def get_eta(call: Call[None]) -> Response:
    """Estimate when a stage's output watermark reaches an event time, from its history.

    The answer has a reason in place of an estimate if the watermark stands still for longer than
    before, or if the history is too short.
    """
    target = moment(call.request, "at", is_event=True)
    if target is None:
        raise InvalidRequestError("at is missing: the event time to reach, in ms or RFC 3339")
    state, found = await call.aggregator.history.estimate(call.job, call.stage, target)
    body = eta_body(target, found, state.view.watermark.output)
    return answer(body, headers={AT: understood(target)})

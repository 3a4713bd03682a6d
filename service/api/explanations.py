"""The explanation of a watermark, and the throttle advice for sources."""

from __future__ import annotations

from fastapi import Response

from service.api.descriptions import header, query
from service.api.endpoints import Call, Endpoints
from service.api.exchange import answer, entity_tags, integer, preferred_wait_s
from service.api.responses.explanations import ExplanationBody, explanation_body
from service.api.responses.throttle import ThrottleBody, throttle_body
from service.errors import OverloadedError, UnknownJobError, UnknownStageError
from service.frontier.throttle import ThrottleView
from service.model.keys import Role

endpoints = Endpoints("explanations")

DEFAULT_HOLDERS, MAX_HOLDERS = 10, 1_000


@endpoints.get(
    "/v1/jobs/{job}/stages/{stage}/explain",
    role=Role.READ,
    gives=ExplanationBody,
    errors=(UnknownJobError, UnknownStageError, OverloadedError),
    parameters=(
        query(
            "limit",
            "Number of the ranges that hold it back",
            {"type": "integer", "minimum": 1, "maximum": MAX_HOLDERS, "default": DEFAULT_HOLDERS},
        ),
    ),
)
async def explain(call: Call[None]) -> ExplanationBody:
    """Explain a stage's watermark, down to the ranges that hold it back."""
    limit = integer(call.request, "limit", 1, MAX_HOLDERS, DEFAULT_HOLDERS) or DEFAULT_HOLDERS
    async with call.turn():
        found = await call.aggregator.explainer.explain(call.job, call.stage, limit)
    return explanation_body(call.job, found)


@endpoints.get(
    "/v1/jobs/{job}/throttle",
    role=Role.READ,
    gives=ThrottleBody,
    also={304: "It has not changed"},
    errors=(UnknownJobError, OverloadedError),
    parameters=(
        header("If-None-Match", "An ETag: 304 if it is unchanged"),
        header("Prefer", "`wait=30`: seconds to wait for a change, at most 60"),
    ),
    headers={
        "ETag": "Changes with the advice",
        "Preference-Applied": "The wait that was granted",
    },
)
async def get_throttle(call: Call[None]) -> Response:
    """Show the throttle advice for the shards of a job; with `Prefer: wait`, once it has changed.

    The advice follows from the job's `throttle` and from the present watermarks. The answer to a report
    has the advice for the reported shards.
    """
    tags = entity_tags(call.request.headers.get("if-none-match"))
    wait_s = preferred_wait_s(call.request)
    headers: dict[str, str] = {}

    def is_new(view: ThrottleView) -> bool:
        return tags is None or not ("*" in tags or str(throttle_body(view).version) in tags)

    throttling = call.aggregator.throttling
    if wait_s is None or tags is None:
        view = await throttling.read(call.job)
    else:
        view = await call.wait_for(throttling.wait(call.job, is_new, wait_s))
        call.confirm_key()
        headers["Preference-Applied"] = f"wait={wait_s}"
    body = throttle_body(view)
    headers["ETag"] = f'"{body.version}"'
    if not is_new(view):
        return Response(status_code=304, headers=headers)
    return answer(body, headers=headers)

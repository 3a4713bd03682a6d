"""Watermarks: read at once, by a long poll, or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext

from fastapi import Response

from service.aggregator import Changes, StageState
from service.api.descriptions import event_time, header, query
from service.api.endpoints import Call, Endpoints
from service.api.event_stream import EventStream
from service.api.exchange import (
    JsonResponse,
    answer,
    encode,
    entity_tags,
    integer,
    moment,
    preferred_wait_s,
)
from service.api.responses.ranges import RangesBody, is_keyed, range_body
from service.api.responses.throttle import throttle_body
from service.api.responses.watermarks import SnapshotBody, WatermarkBody, read_body
from service.errors import (
    InvalidRequestError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
    UnknownJobError,
    UnknownStageError,
)
from service.frontier.ranges import KeyRange
from service.frontier.timestamps import understood
from service.model.keys import Role

endpoints = Endpoints("watermarks")

DEFAULT_LIMIT, MAX_LIMIT = 100, 10_000
_AT_ONCE = 100
"""Number of ranges that are written without a pause for other requests."""

AT_LEAST = "Tidegauge-At-Least"

_SOFT_POLL_S = 0.25
"""Poll interval of a wait for a soft value, which changes without a publication."""


@endpoints.get(
    "/v1/jobs/{job}/stages/{stage}/watermark",
    role=Role.READ,
    hot=True,
    gives=WatermarkBody,
    also={304: "It has not changed"},
    errors=(UnknownJobError, UnknownStageError, OverloadedError),
    parameters=(
        query("at_least", "With `Prefer: wait`: the output watermark to wait for", event_time()),
        query(
            "percentile",
            "One of the stage's percentiles: its watermark stands in place of the output watermark",
            {"type": "integer", "minimum": 1, "maximum": 99},
        ),
        header("If-None-Match", "An ETag: 304 if it is unchanged"),
        header("Prefer", "`wait=30`: seconds to wait for the change or the time, at most 60"),
    ),
    headers={
        "ETag": "Changes with input, output and status",
        "Preference-Applied": "The wait that was granted",
        AT_LEAST: "The instant of `at_least` as understood. An instant of 1970 means: seconds were sent",
    },
)
async def get_watermark(call: Call[None]) -> Response:
    """Show a stage's watermark; with `Prefer: wait`, once it has changed or reached a time.

    Lags, counts, the processing and the percentile watermarks are computed at the request: they
    change without a new ETag, and may start over if the live store is lost.
    """
    aggregator, job, stage, request = call.aggregator, call.job, call.stage, call.request
    if not request.scope["query_string"] and "if-none-match" not in request.headers:
        state = await aggregator.reader.stage(job, stage)
        return answer(read_body(state), headers={"ETag": f'"{state.etag}"'})
    percentile = await _percentile(call)
    tags = entity_tags(request.headers.get("if-none-match"))
    at_least = moment(request, "at_least", is_event=True)
    until = _until(at_least, tags, percentile)
    wait_s = preferred_wait_s(request)
    headers = {} if at_least is None else {AT_LEAST: understood(at_least)}
    # Most polls find the ETag unchanged. A plain ETag follows from published values alone, but the ETag
    # of a percentile includes the percentile.
    if wait_s is None or until is None:
        state = await aggregator.reader.stage(job, stage, soft=percentile is not None)
    else:
        poll_s = None if percentile is None else _SOFT_POLL_S
        waited = aggregator.reader.wait(job, stage, until, wait_s, poll_s=poll_s)
        state = await call.wait_for(waited)
        call.confirm_key()
        headers["Preference-Applied"] = f"wait={wait_s}"
    etag = _etag(state, percentile)
    headers["ETag"] = f'"{etag}"'
    if tags is not None and _matches(state, percentile, tags):
        return Response(status_code=304, headers=headers)
    if percentile is None:
        state = (await aggregator.reader.complete({stage: state}))[stage]
    return answer(read_body(state, percentile), headers=headers)


async def _percentile(call: Call[None]) -> int | None:
    """Return the requested percentile. Raises `InvalidRequestError` if it is not declared."""
    percentile = integer(call.request, "percentile", 1, 99, None)
    if percentile is None:
        return None
    declared = (await call.aggregator.find_stage(call.job, call.stage)).policy.percentiles
    if percentile not in declared:
        raise InvalidRequestError(
            f"percentile is {percentile}, and stage {call.stage!r} declares {list(declared) or 'none'}:"
            ' add it to the stage\'s "percentiles"'
        )
    return percentile


def _etag(state: StageState, percentile: int | None) -> str:
    if percentile is None:
        return state.etag
    return f"{state.etag}-{percentile}-{state.percentile(percentile)}"


def _matches(state: StageState, percentile: int | None, tags: frozenset[str]) -> bool:
    """Return whether the client already has the answer."""
    named = {"*", _etag(state, percentile)}
    return not tags.isdisjoint(named if percentile is not None else named | {state.version_tag})


def _until(
    at_least: int | None, tags: frozenset[str] | None, percentile: int | None
) -> Callable[[StageState], bool] | None:
    """Return the condition to wait for; None: without a condition."""

    def output(state: StageState) -> int:
        return state.view.watermark.output if percentile is None else state.percentile(percentile)

    if at_least is not None:
        return lambda state: output(state) >= at_least
    if tags is not None:
        return lambda state: not _matches(state, percentile, tags)
    return None


@endpoints.get(
    "/v1/jobs/{job}/watermarks", role=Role.READ, gives=SnapshotBody, errors=(UnknownJobError,)
)
async def get_watermarks(call: Call[None]) -> SnapshotBody:
    """Show the watermarks of all stages of a job, each after its inputs, as one consistent snapshot."""
    states = await call.aggregator.reader.snapshot(call.job)
    first = next(iter(states.values())).job
    bodies = {stage: read_body(state) for stage, state in states.items()}
    return SnapshotBody(first.name, first.generation, bodies)


@endpoints.get(
    "/v1/jobs/{job}/events",
    role=Role.READ,
    about="Server-sent events. The data of `event: watermark` is a WatermarkBody",
    media_type="text/event-stream",
    errors=(UnknownJobError, OverloadedError),
    parameters=(header("Last-Event-ID", "The id of the last received event"),),
)
async def get_events(call: Call[None]) -> Response:
    """Stream the state of every stage, then each change, as server-sent events.

    `event: watermark` has the body of a stage's watermark. For a job with a throttle, `event: throttle`
    has the body of `GET …/throttle`. After a removal, `event: stages` lists the remaining stages.
    """
    await call.aggregator.reader.snapshot(call.job)
    # Entered here, so that a rejection is a problem, and left when the stream ends.
    waiting = call.waiting()
    return EventStream(_events(call, call.request.headers.get("last-event-id")), waiting)


async def _events(call: Call[None], cursor: str | None) -> AsyncIterator[bytes]:
    # A first comment sends the headers at once, even if nothing has changed since the cursor.
    yield b": tidegauge\n\n"
    async for changes in call.aggregator.reader.changes(call.job, cursor):
        try:
            call.confirm_key()
        except (UnauthenticatedError, UnavailableError):
            # The stream ends; the answer to the client's reconnect has the reason.
            return
        yield changes.written(_write)


def _write(changes: Changes) -> bytes:
    if not changes:
        return b": still here\n\n"
    pieces = [
        b"event: watermark\n%sdata: %s\n\n"
        % (
            b"" if change.cursor is None else b"id: %s\n" % change.cursor.encode(),
            encode(read_body(change.state)),
        )
        for change in changes.changes
    ]
    if changes.stages is not None:
        pieces.append(b"event: stages\ndata: %s\n\n" % encode({"stages": changes.stages}))
    if changes.throttle is not None:
        pieces.append(b"event: throttle\ndata: %s\n\n" % encode(throttle_body(changes.throttle)))
    return b"".join(pieces)


@endpoints.get(
    "/v1/jobs/{job}/stages/{stage}/ranges",
    role=Role.READ,
    gives=RangesBody,
    errors=(UnknownJobError, UnknownStageError, OverloadedError),
    parameters=(
        query(
            "limit",
            "Number of ranges",
            {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
        ),
        query(
            "order",
            "`range`, or `promise`: the lowest promise first",
            {"type": "string", "enum": ["range", "promise"], "default": "range"},
        ),
    ),
)
async def get_ranges(call: Call[None]) -> Response:
    """Show ranges: their promises, holds and holders."""
    aggregator, job, stage, request = call.aggregator, call.job, call.stage, call.request
    limit = integer(request, "limit", 1, MAX_LIMIT, DEFAULT_LIMIT) or DEFAULT_LIMIT
    order = request.query_params.get("order", "range")
    if order != "range" and order != "promise":  # noqa: PLR1714  (narrows the type)
        raise InvalidRequestError(f"order is {order!r}: it must be range or promise")
    layout = (await aggregator.find_stage(job, stage)).layout
    keyed = is_keyed(layout)
    async with call.turn() if limit > _AT_ONCE else nullcontext():
        views = await aggregator.reader.ranges(job, stage, limit=limit, order=order)
        head = encode(RangesBody(job, stage, 0 if layout is None else len(layout), []))
        slices: list[bytes] = []
        stalled = await aggregator.examiner.stalled(job, stage, views)
        for start in range(0, len(views), _AT_ONCE):
            await asyncio.sleep(0)
            bodies = [
                range_body(view, _bounds(view.name) if keyed else None, view.name in stalled)
                for view in views[start : start + _AT_ONCE]
            ]
            # Without the brackets.
            slices.append(encode(bodies)[1:-1])
    return JsonResponse(b"%b%b]}" % (head[:-2], b",".join(slices)))


def _bounds(name: str) -> tuple[int, int]:
    key_range = KeyRange.parse(name)
    return key_range.start, key_range.end

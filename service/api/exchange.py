"""Reading requests and writing responses, for all endpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from service.aggregator import Aggregator
from service.api.bodies import BodyBudget, Reservation
from service.api.body_times import Times
from service.api.repeated_members import repeated_member
from service.api.turns import Pace, Turns, WaitLimit
from service.api.web import JSON, AllowedHosts, RawHeaders
from service.errors import (
    ClientGoneError,
    InvalidReportError,
    InvalidRequestError,
    MalformedJsonError,
    PayloadTooLargeError,
    ProblemError,
)
from service.frontier.timestamps import EARLIEST, LATEST, MAX, from_iso, iso
from service.model.pipeline_spec import NAME_PATTERN
from service.telemetry.metrics import Metrics

MAX_BODY = 16 * 2**20
MAX_PIPELINE_BODY = 128 * 2**20

_EXPLAINED: Final = 256 * 2**10
"""The largest body that is searched for an invalid value, or for times in RFC 3339: that takes long."""

T = TypeVar("T")
Body = bytes | bytearray
_name = re.compile(NAME_PATTERN)
_encoder = msgspec.json.Encoder()

NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for text that is not JSON. JSON is UTF-8."""


@dataclass(frozen=True, slots=True)
class ServiceState:
    """Dependencies of the endpoints. The application's lifespan makes them."""

    aggregator: Aggregator
    metrics: Metrics
    hosts: AllowedHosts
    bodies: BodyBudget
    responses: BodyBudget
    """Likewise, for large responses that are being sent."""
    waits: WaitLimit
    turns: Turns
    """Turns for making answers that may be large."""
    pace: Pace
    """Turns for sending the pieces of large answers."""


def state(request: Request) -> ServiceState:
    """Return the running service."""
    return cast("ServiceState", request.app.state.service)


def check_name(
    member: str,
    value: str,
    error: type[InvalidRequestError | InvalidReportError] = InvalidRequestError,
) -> None:
    """Raise an error unless a value is a name."""
    if _name.fullmatch(value) is None:
        raise error(f"invalid {member} {value!r}: it must match {NAME_PATTERN}")


class JsonResponse(Response):
    """A response with JSON. It sets its own headers: in Starlette, finding the missing ones takes longer
    than writing the body.
    """

    media_type = "application/json"

    def __init__(self, body: bytes, status_code: int = 200, headers: RawHeaders = ()) -> None:
        self.status_code = status_code
        self.background = None
        self.body = body
        self.raw_headers = [(b"content-length", b"%d" % len(body)), JSON, *headers]


def answer(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Make a response."""
    own = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    return JsonResponse(_encoder.encode(body), status, own)


def encode(body: object) -> bytes:
    """Encode a body as JSON."""
    return _encoder.encode(body)


def declared_bytes(length: bytes, limit: int) -> int | None:
    """Return the size of the body from its header; None: not declared.

    Raises `PayloadTooLargeError`.
    """
    if not length.isdigit():
        return None
    # A valid size has fewer digits, and Python takes long for thousands of digits.
    if len(length) > 18 or int(length) > limit:
        raise PayloadTooLargeError(
            f"the body has {length[:18].decode()} bytes, and the limit is {limit}"
        )
    return int(length)


async def read_small(request: Request) -> Body:
    """Read a small body: usually one piece. Raises `ClientGoneError`."""
    message = await request.receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        return message.get("body", b"")
    body = bytearray()
    while message["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body
        message = await request.receive()
    raise _gone()


async def read_large(
    request: Request, limit: int, declared: int | None, reservation: Reservation
) -> Body:
    """Read a body, and reserve its size in the budget: all at once, if it is declared.

    Raises `OverloadedError`, `PayloadTooLargeError` or `ClientGoneError`.
    """
    reservation.take(declared or 0)
    body = bytearray()
    try:
        async for chunk in request.stream():
            if declared is None:
                reservation.take(len(chunk))
            body += chunk
            if len(body) > limit:
                raise PayloadTooLargeError(f"the body has more than {limit} bytes")
    except ClientDisconnect:
        raise _gone() from None
    return body


def _gone() -> ClientGoneError:
    # The client does not receive this response, but it must not be logged as an error of the service.
    return ClientGoneError("the client disconnected before its request was read")


def decode(
    decoder: msgspec.json.Decoder[T],
    body: Body,
    refusal: type[ProblemError] = InvalidRequestError,
    times: Times | None = None,
) -> T:
    """Decode JSON into a body's type. Raises `MalformedJsonError`, or `refusal` if it is invalid.

    A member that an object has twice is invalid, too.

    `times`: a body may have times in RFC 3339, unless it is large.
    """
    try:
        read = decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
    except NOT_JSON as error:
        raise _malformed(error) from None
    else:
        check_members(body, refusal)
        return read
    try:
        # Decoding ended at the first invalid value: the rest may not even be JSON.
        members: Any = msgspec.json.decode(body) if len(body) <= _EXPLAINED else _skim(body)
        # First, since a place that msgspec names may be in an object that was dropped.
        if len(body) <= _EXPLAINED:
            check_members(body, refusal)
    except NOT_JSON as error:
        raise _malformed(error) from None
    in_ms = members if times is None else _in_ms(times, members, refusal)
    if in_ms != members:
        return decode(decoder, _encoder.encode(in_ms), refusal)
    raise refusal(_explain(decoder.type, members, message))


def check_members(body: Body, refusal: type[ProblemError]) -> None:
    """Raise `refusal` if an object has a member twice."""
    repeated = repeated_member(body)
    if repeated is not None:
        raise refusal(f"{repeated[:200]!r} is there twice in one object: send each member once")


def _in_ms(times: Times, members: object, refusal: type[ProblemError]) -> object:
    if not isinstance(members, dict):
        return members
    try:
        return times(cast("dict[str, Any]", members))
    except ValueError as error:
        raise refusal(str(error)) from None


_skim = msgspec.json.Decoder(msgspec.Raw).decode
"""Check that the text is JSON, without making objects: 16 MiB take 10 ms and not 200."""


def _malformed(error: Exception) -> MalformedJsonError:
    return MalformedJsonError(f"the body is not JSON: {error}")


def _explain(body_type: type, members: object, message: str) -> str:
    """Name the invalid entry: for a key of a mapping, msgspec only writes `[...]`."""
    if "[...]" not in message or not isinstance(members, dict):
        return message
    entry = _COLUMN_ENTRY.search(message)
    if entry is not None:
        return _explain_entry(cast("dict[str, Any]", members), entry, message)
    for field in msgspec.structs.fields(body_type):
        found: Any = cast("dict[str, Any]", members).get(field.encode_name)
        if not isinstance(found, dict):
            continue
        for key, value in cast("dict[str, Any]", found).items():
            try:
                msgspec.convert({key: value}, field.type)
            except msgspec.ValidationError as error:
                text = msgspec.json.encode(value).decode()[:200]
                return f"{field.encode_name}.{key} is {text}: {error}"
    return message


_COLUMN_ENTRY = re.compile(r" - at `\$\.columns\.(\w+)\[\.\.\.\]\[(\d+)\]`$")
"""Place that msgspec names, for an entry of one of several columns."""


def _explain_entry(members: dict[str, Any], entry: re.Match[str], message: str) -> str:
    """Name the column and the value of an entry that is not a number, among several columns."""
    of, k = entry[1], int(entry[2])
    for name, column in members["columns"][of].items():
        value: Any = column[k] if k < len(column) else None
        if value is not None and type(value) is not int:
            text = msgspec.json.encode(value).decode()[:200]
            return f"columns.{of}.{name}, entry {k}, is {text}: {message[: entry.start()]}"
    return message


# ---- headers


def entity_tags(value: str | None) -> frozenset[str] | None:
    """Read If-Match or If-None-Match: the tags without quotes or weakness; None: without the header.

    >>> sorted(entity_tags('"1-57", W/"1-58"') or ())
    ['1-57', '1-58']
    """
    if value is None:
        return None
    return frozenset(part.strip().removeprefix("W/").strip('"') for part in value.split(","))


def preferred_wait_s(request: Request, at_most: int = 60) -> int | None:
    """Read `Prefer: wait=N` (RFC 7240); None: no wait, or an unreadable one.

    An unreadable preference is ignored, by the RFC.
    """
    for value in request.headers.getlist("prefer"):
        for preference in value.split(","):
            key, _, seconds = preference.partition(";")[0].partition("=")
            seconds = seconds.strip().strip('"')
            if key.strip().lower() == "wait" and seconds.isdecimal():
                return min(int(seconds[:9]), at_most)
    return None


def integer(request: Request, name: str, low: int, high: int, default: int | None) -> int | None:
    """Read a whole number from the query. Raises `InvalidRequestError`."""
    value = request.query_params.get(name)
    return default if value is None else whole_number(name, value, low, high)


def moment(
    request: Request, name: str, *, is_event: bool, default: int | None = None
) -> int | None:
    """Read a time from the query, in ms or in RFC 3339. Raises `InvalidRequestError`.

    `is_event`: it may be the end of time, too.
    """
    value = request.query_params.get(name)
    if value is None:
        return default
    end = f", or {MAX}" if is_event else ""
    try:
        # In a query, a plus sign that is not escaped is a space.
        at = int(value) if _WHOLE.fullmatch(value) else from_iso(value.replace(" ", "+"))
    except ValueError as error:
        raise InvalidRequestError(
            f"{name} is {value[:40]!r}: it must be ms or RFC 3339, and {error}"
        ) from None
    if EARLIEST <= at <= LATEST or (is_event and at == MAX):
        return at
    raise InvalidRequestError(
        f"{name} is {at}: it must be ms or RFC 3339, {EARLIEST} to {LATEST}{end}"
    )


def span(request: Request, now_ms: int, default_ms: int | None = None) -> tuple[int, int]:
    """Read `from` and `to`, two moments of the wall clock. Raises `InvalidRequestError`.

    `default_ms`: the length by default; None: from the beginning of time.
    """
    until_ms = moment(request, "to", is_event=False)
    until_ms = now_ms if until_ms is None else until_ms
    from_ms = moment(request, "from", is_event=False)
    if from_ms is None:
        from_ms = EARLIEST if default_ms is None else max(until_ms - default_ms, EARLIEST)
    if from_ms > until_ms:
        raise InvalidRequestError(
            f"from is {iso(from_ms)}, which is after to, {iso(until_ms)}: it must not be later"
        )
    return from_ms, until_ms


_WHOLE: Final = re.compile(r"-?[0-9]{1,19}")


def whole_number(name: str, value: str, low: int, high: int) -> int:
    """Read a whole number. Raises `InvalidRequestError`."""
    if _WHOLE.fullmatch(value) is None or not low <= int(value) <= high:
        raise InvalidRequestError(
            f"{name} is {value!r}: it must be a whole number, {low} to {high}"
        )
    return int(value)

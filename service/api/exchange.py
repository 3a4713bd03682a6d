"""Reading requests and writing responses: what all endpoints share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, cast

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from service.aggregator import Aggregator
from service.errors import (
    ClientGoneError,
    InvalidRequestError,
    MalformedJsonError,
    PayloadTooLargeError,
    ProblemError,
)
from service.metrics import Metrics
from service.spec import NAME_PATTERN

MAX_BODY = 16 * 2**20
MAX_PIPELINE_BODY = 128 * 2**20

T = TypeVar("T")
_name = re.compile(NAME_PATTERN)
_encoder = msgspec.json.Encoder()


class ServiceState(Protocol):
    """The application's state, which its lifespan sets and the endpoints use."""

    aggregator: Aggregator
    metrics: Metrics


def state(request: Request) -> ServiceState:
    """Return the running service."""
    return cast("ServiceState", request.app.state)


def check_name(member: str, value: str) -> None:
    """Check a name in the path. Raises `InvalidRequestError`."""
    if _name.match(value) is None:
        raise InvalidRequestError(f"{member} {value!r} is not a name: it must match {NAME_PATTERN}")


def answer(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Make a response."""
    return Response(_encoder.encode(body), status, headers, "application/json")


def encode(body: object) -> bytes:
    """Write JSON."""
    return _encoder.encode(body)


async def read(request: Request, limit: int = MAX_BODY) -> bytes:
    """Read a body of at most `limit` bytes. Raises `PayloadTooLargeError`."""
    try:
        return await _read(request, limit)
    except ClientDisconnect:
        # Nobody receives this response, but it must not be logged as an error of the service.
        raise ClientGoneError("the client went away before its request was read") from None


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) <= limit:
        return await request.body()
    if declared.isdecimal():
        raise PayloadTooLargeError(f"the body has {declared} bytes, at most {limit} are read")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise PayloadTooLargeError(f"the body has more than {limit} bytes")
    return bytes(body)


def decode(
    decoder: msgspec.json.Decoder[T],
    body: bytes,
    refusal: type[ProblemError] = InvalidRequestError,
) -> T:
    """Read JSON into a body's type. Raises `MalformedJsonError`, or `refusal` if it does not fit."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _malformed(error) from None
    try:
        # Decoding ended at the first value that does not fit: what follows may not even be JSON.
        members: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _malformed(error) from None
    raise refusal(_explain(decoder.type, members, message))


def _malformed(error: Exception) -> MalformedJsonError:
    return MalformedJsonError(f"the body is not JSON: {error}")


def _explain(body_type: type, members: object, message: str) -> str:
    """Name the entry that does not fit: for a key of a mapping, msgspec only writes `[...]`."""
    if "[...]" not in message or not isinstance(members, dict):
        return message
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


# ---- headers


def entity_tags(value: str | None) -> frozenset[str] | None:
    """Read If-Match or If-None-Match: the tags without quotes or weakness; None: no such header.

    >>> sorted(entity_tags('"1-57", W/"1-58"') or ())
    ['1-57', '1-58']
    """
    if value is None:
        return None
    return frozenset(part.strip().removeprefix("W/").strip('"') for part in value.split(","))


def preferred_wait_s(request: Request, at_most: int = 60) -> int | None:
    """Read `Prefer: wait=N` (RFC 7240); None: no wait, or none that can be read.

    An unreadable preference is ignored, as the RFC says.
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
    if value is None:
        return default
    if re.fullmatch(r"-?[0-9]{1,19}", value) is None or not low <= int(value) <= high:
        raise InvalidRequestError(
            f"{name} is {value!r}: it must be a whole number, {low} to {high}"
        )
    return int(value)

"""The description of an endpoint, and its part of the OpenAPI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypedDict

from fastapi import Response

from service.api.problems import MEDIA_TYPE
from service.api.responses.common import ProblemBody
from service.api.routing import HOT
from service.api.web import SAFE_METHODS
from service.errors import (
    CrossSiteError,
    ForbiddenError,
    InvalidRequestError,
    MalformedJsonError,
    OverloadedError,
    PayloadTooLargeError,
    ProblemError,
    UnauthenticatedError,
    UnknownHostError,
    UnsupportedMediaTypeError,
)
from service.frontier.timestamps import EARLIEST, LATEST, MAX
from service.model.keys import Role
from service.model.pipeline_spec import NAME_PATTERN
from service.model.runs import MAX_NUMBER

_PATH_DOCS = {
    "job": "The job",
    "stage": "The stage",
    "run": "The number of the run",
    "range": "The shard, or the key range by its bounds",
    "key": "The name of the key",
}
_NUMBERS = frozenset({"run"})

BEARER: Final = "key"
"""Name of the key's security scheme in the OpenAPI."""


class Description(TypedDict, total=False):
    """The description of an endpoint, without its path and its request's body."""

    gives: type | None
    """The type of the response's body."""
    about: str
    """A description of the response, if it has no body type with a docstring."""
    status: int
    """Status of the response: 200 by default."""
    also: Mapping[int, str]
    """Other responses that are not errors."""
    errors: tuple[type[ProblemError], ...]
    parameters: tuple[Mapping[str, Any], ...]
    """In the query and in headers: see `query` and `header`."""
    media_type: str
    """Media type of a response that is text, not JSON."""
    headers: Mapping[str, str]
    """Headers of the response."""
    hot: bool
    """True if a running pipeline calls the endpoint all the time."""


def document(
    method: str,
    names: tuple[str, ...],
    types: tuple[type, ...],
    role: Role | None,
    described: Description,
) -> dict[str, Any]:
    """Return the arguments of a route that make its part of the OpenAPI."""
    extra: dict[str, Any] = {
        "parameters": [*map(_path_parameter, names), *map(dict, described.get("parameters", ()))],
        "security": [] if role is None else [{BEARER: []}],
    }
    if role is not None:
        extra["x-role"] = role.value
    if described.get("hot", False):
        extra[HOT] = True
    if types:
        schemas = [_reference(body_type)["schema"] for body_type in types]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        extra["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    responses = _answers(described)
    common: tuple[type[ProblemError], ...] = (UnknownHostError,)
    if method not in SAFE_METHODS:
        common += (CrossSiteError, UnsupportedMediaTypeError)
    if names or types:
        common += (InvalidRequestError,)
    if types:
        common += (MalformedJsonError, PayloadTooLargeError, OverloadedError)
    if role is not None:
        common += (UnauthenticatedError, ForbiddenError)
    for error in (*common, *described.get("errors", ())):
        _add_error(responses, error)
    return {
        "responses": responses,
        "openapi_extra": extra,
        "status_code": described.get("status", 200),
        # The default class would add `application/json` to every media type.
        "response_class": Response,
    }


def _answers(described: Description) -> dict[int | str, dict[str, Any]]:
    gives = described.get("gives")
    about = described.get("about", "Done") if gives is None else (gives.__doc__ or "").strip()
    response: dict[str, Any] = {"description": about}
    if "media_type" in described:
        response["content"] = {described["media_type"]: {"schema": {"type": "string"}}}
    elif gives is not None:
        response["content"] = {"application/json": _reference(gives)}
    if "headers" in described:
        response["headers"] = {
            name: {"description": text, "schema": {"type": "string"}}
            for name, text in described["headers"].items()
        }
    answers: dict[int | str, dict[str, Any]] = {described.get("status", 200): response}
    for code, text in described.get("also", {}).items():
        answers[code] = {"description": text}
        if code == 201 and gives is not None:
            answers[code]["content"] = response["content"]
    return answers


def _add_error(responses: dict[int | str, dict[str, Any]], error: type[ProblemError]) -> None:
    listed = responses.setdefault(error.status, {"description": ""})
    line = f"`{error.slug}`: {error.title()}"
    if line not in listed["description"]:
        listed["description"] = " ".join(filter(None, [listed["description"], line]))
    listed["content"] = {MEDIA_TYPE: _reference(ProblemBody)}


def _reference(body_type: type) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{body_type.__name__}"}}


def _path_parameter(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": _PATH_DOCS[name],
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_NUMBER}
        if name in _NUMBERS
        else {"type": "string", "pattern": NAME_PATTERN},
    }


def event_time() -> Mapping[str, Any]:
    """Return the schema of an event time in the query."""
    return _time(MAX, "Event time")


def wall_clock() -> Mapping[str, Any]:
    """Return the schema of a moment of the wall clock in the query."""
    return _time(LATEST, "Moment of the wall clock")


def _time(latest: int, kind: str) -> Mapping[str, Any]:
    return {
        "description": f"{kind}: in ms since the Unix epoch, or in RFC 3339",
        "anyOf": [
            {"type": "integer", "minimum": EARLIEST, "maximum": latest},
            {"type": "string", "format": "date-time"},
        ],
    }


def query(name: str, text: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Describe a query parameter."""
    return {"name": name, "in": "query", "description": text, "schema": dict(schema)}


def header(name: str, text: str) -> Mapping[str, Any]:
    """Describe a request header."""
    return {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}

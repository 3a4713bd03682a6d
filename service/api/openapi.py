"""The OpenAPI document: routes from the routers, bodies from the types that decode them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from inspect import cleandoc
from typing import Any, Final, cast

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service.api.descriptions import BEARER
from service.api.requests import REQUESTS
from service.api.responses import RESPONSES
from service.model.pipeline_spec import ONLY_AT_THE_END, PipelineSpec

LICENSE: Final = {"name": "Apache License 2.0", "identifier": "Apache-2.0"}

_SUMMARY: Final = "A central watermark aggregator for Apache Spark"

_DESCRIPTION: Final = """\
Workers lease ranges of a stage and report their promises. The service publishes one monotone watermark
for each stage, and carries the watermarks along the graph of stages.

- Event times are whole milliseconds since the Unix epoch, UTC. `null` means that there is not a
  watermark yet, and 9223372036854775807 is the end of time.
- Moments of the wall clock are RFC 3339. The exceptions are in ms: `oldest_work` and
  `processing_watermark`, `at` of the history, and `now` of `whoami`.
- Requests take times in both forms; bodies above 256 KiB take ms alone.
- Lists that grow take `limit` and `cursor`. The cursor of the next page is `next`.
- Errors are RFC 9457 problems: the address in `type` is a page of the service. A rejected request
  changes nothing.
- With keys, each request needs `Authorization: Bearer`; `x-role` is the role that its key needs.
- Clients must ignore members that they do not use: later releases add some.
"""

_TAGS: Final = {
    "reports": "Promises of ranges, at once or as of the commit of an epoch",
    "watermarks": "Watermarks: present, past, expected, and by range",
    "explanations": "The ranges that hold a watermark back, and the advice to throttle sources",
    "problems": "Root causes of stages that stand still",
    "leases": "Rights of workers to report for ranges, until a deadline",
    "runs": "Executions of programs, their stages and their commits",
    "pipelines": "Specifications of jobs",
    "keys": "Keys, their rights and the audit of changes",
    "operations": "Health and metrics of the service",
}

_KEY: Final = {
    "type": "http",
    "scheme": "bearer",
    "description": "A key, `tg_…`: `tidegauge keys create`",
}


def document_of(app: FastAPI) -> dict[str, Any]:
    """Return the document of a service with keys."""
    schema = get_openapi(
        title=app.title,
        version=app.version,
        summary=_SUMMARY,
        description=_DESCRIPTION,
        license_info=dict[str, Any](LICENSE),
        tags=[{"name": name, "description": text} for name, text in _TAGS.items()],
        routes=app.routes,
        # Relative to the document, so that requests from `/docs` pass a proxy's path.
        servers=[{"url": ".", "description": "The service that this document is from"}],
    )
    _, components = msgspec.json.schema_components(
        (PipelineSpec, *REQUESTS, *RESPONSES), ref_template="#/components/schemas/{name}"
    )
    schema["components"] = {"schemas": components, "securitySchemes": {BEARER: _KEY}}
    return portable(schema)


def without_keys(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of a service that has no keys, and serves every request."""
    found = deepcopy(dict(document))
    del found["components"]["securitySchemes"]
    for operations in found["paths"].values():
        for operation in operations.values():
            operation.pop("security", None)
    return found


def portable(schema: Any) -> Any:  # noqa: ANN401  (JSON)
    r"""Return a schema with patterns that RE2, Go and JavaScript compile, too, and in plain terms.

    There `$` matches at the end alone, so the addition for Python is not needed. Descriptions lose the
    indentation of their docstrings. Marked integers may be RFC 3339.

    >>> portable({"items": [{"type": "string", "pattern": r"^a+$(?!\n)"}]})
    {'items': [{'type': 'string', 'pattern': '^a+$'}]}
    >>> portable({"description": "A name.\n\n    Of a job."})
    {'description': 'A name.\n\nOf a job.'}
    >>> portable({"type": "integer", "x-rfc-3339": True})
    {'anyOf': [{'type': 'integer'}, {'type': 'string', 'format': 'date-time'}]}
    """
    match schema:
        case {"x-rfc-3339": _, "type": kind, **rest}:
            text = {"type": "string", "format": "date-time"}
            return {**cast("dict[str, Any]", rest), "anyOf": [{"type": kind}, text]}
        case dict():
            members = cast("dict[str, Any]", schema)
            return {name: _portable_member(name, value) for name, value in members.items()}
        case list():
            return [portable(each) for each in cast("list[Any]", schema)]
        case _:
            return schema


def _portable_member(name: str, value: Any) -> Any:  # noqa: ANN401  (JSON)
    if name == "pattern" and isinstance(value, str):
        return value.removesuffix(ONLY_AT_THE_END)
    if name == "description" and isinstance(value, str):
        return cleandoc(value)
    return portable(value)

"""Pipelines: defining, listing, resetting and deleting them."""

from __future__ import annotations

from fastapi import Response

from service.aggregator import Precondition
from service.api.descriptions import header, query
from service.api.endpoints import NO_BODY, Call, Endpoints, json_body
from service.api.exchange import MAX_PIPELINE_BODY, entity_tags, integer
from service.api.paging import PAGE_BY_NAME, page_by_name
from service.api.responses.jobs import (
    GraphBody,
    JobBody,
    JobLine,
    JobsBody,
    graph_body,
    written_job,
)
from service.api.responses.summaries import OverviewBody, overview_body
from service.errors import (
    InvalidPipelineSpecError,
    InvalidRequestError,
    LimitReachedError,
    OverloadedError,
    PreconditionFailedError,
    PreconditionRequiredError,
    UnavailableError,
    UnknownJobError,
)
from service.model.jobs import Specification
from service.model.keys import Role
from service.model.pipeline_spec import PipelineSpec

endpoints = Endpoints("pipelines")

DEFAULT_JOBS, MAX_JOBS = 200, 10_000

_etag = {"ETag": "The version of this specification, for If-Match"}


def _show(found: Specification, status: int) -> Response:
    headers = {"ETag": f'"{found.etag}"'}
    return Response(written_job(found), status, headers, "application/json")


@endpoints.put(
    "/v1/jobs/{job}",
    json_body(PipelineSpec, limit=MAX_PIPELINE_BODY, refusal=InvalidPipelineSpecError),
    role=Role.ADMIN,
    gives=JobBody,
    also={201: "The job is new"},
    errors=(
        InvalidPipelineSpecError,
        LimitReachedError,
        PreconditionRequiredError,
        PreconditionFailedError,
        UnavailableError,
    ),
    parameters=(
        header("If-Match", "The ETag of the specification to replace, or *"),
        header("If-None-Match", "*: only if the job does not exist yet"),
    ),
    headers=_etag,
)
async def put_pipeline(call: Call[PipelineSpec]) -> Response:
    """Define a pipeline, or change it: with If-Match, if it differs from the stored one."""
    headers = call.request.headers
    precondition = Precondition(
        entity_tags(headers.get("if-match")), entity_tags(headers.get("if-none-match"))
    )
    stored, new = await call.aggregator.definitions.define(
        call.job, call.body, precondition, call.by
    )
    return _show(stored.specification, 201 if new else 200)


@endpoints.post(
    "/v1/jobs/{job}/check",
    json_body(PipelineSpec, limit=MAX_PIPELINE_BODY, refusal=InvalidPipelineSpecError),
    role=Role.ADMIN,
    status=204,
    errors=(InvalidPipelineSpecError, LimitReachedError, UnavailableError),
)
async def check_pipeline(call: Call[PipelineSpec]) -> Response:
    """Check whether a pipeline would be accepted in place of the job's, without changing it."""
    await call.aggregator.definitions.check(call.job, call.body)
    return Response(status_code=204)


@endpoints.get(
    "/v1/jobs",
    role=Role.READ,
    gives=JobsBody,
    errors=(InvalidRequestError,),
    parameters=PAGE_BY_NAME,
)
async def list_pipelines(call: Call[None]) -> JobsBody:
    """List the jobs that the key may read, by name."""
    jobs = await call.aggregator.definitions.jobs()
    readable = (job for job in jobs if call.may_read(job.name))
    page, following = page_by_name(call.request, readable, lambda job: job.name)
    lines = [JobLine(j.name, j.generation, j.layout_version, list(j.pipeline.stages)) for j in page]
    return JobsBody(lines, following)


@endpoints.get(
    "/v1/overview",
    role=Role.READ,
    gives=OverviewBody,
    errors=(InvalidRequestError, UnavailableError, OverloadedError),
    parameters=(
        query("search", "Only jobs with this in their name", {"type": "string", "maxLength": 128}),
        query(
            "limit",
            "Number of jobs",
            {"type": "integer", "minimum": 1, "maximum": MAX_JOBS, "default": DEFAULT_JOBS},
        ),
    ),
)
async def get_overview(call: Call[None]) -> OverviewBody:
    """Show the jobs that the key may read, each with its health and its slowest stage: worst first."""
    limit = integer(call.request, "limit", 1, MAX_JOBS, DEFAULT_JOBS) or DEFAULT_JOBS
    search = call.request.query_params.get("search", "")
    if len(search) > 128:
        raise InvalidRequestError(f"search has {len(search)} characters, and the limit is 128")
    async with call.turn():
        found = await call.aggregator.overviews.read(call.may_read, search, limit)
        return overview_body(found, call.aggregator.now_ms())


@endpoints.get(
    "/v1/jobs/{job}",
    role=Role.READ,
    gives=JobBody,
    errors=(UnknownJobError, UnavailableError, OverloadedError),
    headers=_etag,
)
async def get_pipeline(call: Call[None]) -> Response:
    """Show a job's stored pipeline, and the health of each stage.

    The health is not part of the specification: it changes without a new ETag.
    """
    async with call.turn():
        found = await call.aggregator.definitions.get(call.job)
        headers = {"ETag": f'"{found.etag}"'}
        body = written_job(found, await call.aggregator.reader.healths(call.job))
        return Response(body, 200, headers, "application/json")


@endpoints.get(
    "/v1/jobs/{job}/graph",
    role=Role.READ,
    gives=GraphBody,
    errors=(UnknownJobError, UnavailableError, OverloadedError),
)
async def get_graph(call: Call[None]) -> GraphBody:
    """Show the graph of stages, without their shards, which may be very many."""
    async with call.turn():
        return graph_body(await call.aggregator.reader.job(call.job))


@endpoints.delete(
    "/v1/jobs/{job}", role=Role.ADMIN, status=204, errors=(UnknownJobError, UnavailableError)
)
async def delete_pipeline(call: Call[None]) -> Response:
    """Delete a job, and all its state."""
    await call.aggregator.definitions.delete(call.job, call.by)
    return Response(status_code=204)


@endpoints.post(
    "/v1/jobs/{job}/reset",
    NO_BODY,
    role=Role.ADMIN,
    gives=JobBody,
    errors=(UnknownJobError, UnavailableError),
    headers=_etag,
)
async def reset_pipeline(call: Call[None]) -> Response:
    """Begin the next generation: watermarks, promises, leases, runs and epochs start over."""
    stored = await call.aggregator.definitions.reset(call.job, call.by)
    return _show(stored.specification, 200)

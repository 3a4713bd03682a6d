"""Pipelines: what there is to aggregate."""

from __future__ import annotations

import msgspec
from fastapi import Request, Response

from service.aggregator import Precondition, layout_etag
from service.api import routing
from service.api.bodies import JobBody, JobLine, JobsBody, job_body
from service.api.exchange import (
    MAX_PIPELINE_BODY,
    aggregator,
    answer,
    decode,
    describe,
    entity_tags,
    header,
    name,
    read,
)
from service.errors import (
    InvalidPipelineSpecError,
    PreconditionFailedError,
    PreconditionRequiredError,
    UnavailableError,
    UnknownJobError,
)
from service.model.jobs import StoredJob
from service.spec import PipelineSpec

router = routing.router("pipelines")
_decoder = msgspec.json.Decoder(PipelineSpec)
_etag = {"ETag": "Names this specification, for If-Match"}


def _shown(stored: StoredJob, status: int = 200) -> Response:
    return answer(job_body(stored), status, {"ETag": f'"{layout_etag(stored)}"'})


@router.put(
    "/v1/jobs/{job}",
    **describe(
        path=("job",),
        body=(PipelineSpec,),
        gives=JobBody,
        also={201: "The job is new"},
        errors=(
            InvalidPipelineSpecError,
            PreconditionRequiredError,
            PreconditionFailedError,
            UnavailableError,
        ),
        parameters=(
            header("If-Match", "The ETag of the specification to be replaced, or *"),
            header("If-None-Match", "*: only if there is no such job yet"),
        ),
        headers=_etag,
    ),
)
async def put_pipeline(request: Request) -> Response:
    """Define a pipeline, or change it: with If-Match, if it differs from the stored one."""
    job = name(request, "job")
    body = await read(request, MAX_PIPELINE_BODY)
    spec = decode(_decoder, body, InvalidPipelineSpecError)
    precondition = Precondition(
        entity_tags(request.headers.get("if-match")),
        entity_tags(request.headers.get("if-none-match")),
    )
    stored, new = await aggregator(request).define(job, spec, precondition)
    return _shown(stored, 201 if new else 200)


@router.get("/v1/jobs", **describe(gives=JobsBody))
async def list_pipelines(request: Request) -> Response:
    """List the jobs."""
    jobs = await aggregator(request).jobs()
    return answer(
        JobsBody(
            [JobLine(j.name, j.generation, j.layout_version, list(j.pipeline.stages)) for j in jobs]
        )
    )


@router.get(
    "/v1/jobs/{job}",
    **describe(
        path=("job",), gives=JobBody, errors=(UnknownJobError, UnavailableError), headers=_etag
    ),
)
async def get_pipeline(request: Request) -> Response:
    """Show a job's pipeline as it is stored."""
    return _shown(await aggregator(request).definition(name(request, "job")))


@router.delete(
    "/v1/jobs/{job}",
    **describe(path=("job",), status=204, errors=(UnknownJobError, UnavailableError)),
)
async def delete_pipeline(request: Request) -> Response:
    """Delete a job, with all that is known of it."""
    await aggregator(request).delete(name(request, "job"))
    return Response(status_code=204)


@router.post(
    "/v1/jobs/{job}/reset",
    **describe(
        path=("job",), gives=JobBody, errors=(UnknownJobError, UnavailableError), headers=_etag
    ),
)
async def reset_pipeline(request: Request) -> Response:
    """Begin the next generation: watermarks, promises, leases, runs and epochs start over."""
    return _shown(await aggregator(request).reset(name(request, "job")))

"""Runs: which incarnation of a program speaks for which stages."""

from __future__ import annotations

import msgspec
from fastapi import Request, Response

from service.api import routing
from service.api.bodies import OpenRun, RunBody
from service.api.exchange import aggregator, answer, decode, describe, name, read
from service.errors import UnavailableError, UnknownJobError, UnknownStageError

router = routing.router("runs")
_decoder = msgspec.json.Decoder(OpenRun)


@router.post(
    "/v1/jobs/{job}/runs",
    **describe(
        path=("job",),
        body=(OpenRun,),
        gives=RunBody,
        status=201,
        errors=(UnknownJobError, UnknownStageError, UnavailableError),
    ),
)
async def open_run(request: Request) -> Response:
    """Open a run for some stages. From then on, older runs of them are fenced."""
    job = name(request, "job")
    body = decode(_decoder, await read(request))
    return answer(RunBody(await aggregator(request).open_run(job, body.stages)), 201)

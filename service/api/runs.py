"""Runs: which execution of a program reports for which stages, and what it has committed."""

from __future__ import annotations

from service.api.endpoints import Call, Endpoints, json_body
from service.api.requests import OpenRun
from service.api.responses.jobs import CommitsBody, RunBody
from service.errors import UnavailableError, UnknownJobError, UnknownStageError
from service.model.keys import Role

endpoints = Endpoints("runs")


@endpoints.post(
    "/v1/jobs/{job}/runs",
    json_body(OpenRun),
    role=Role.DRIVE,
    gives=RunBody,
    status=201,
    errors=(UnknownJobError, UnknownStageError, UnavailableError),
)
async def open_run(call: Call[OpenRun]) -> RunBody:
    """Open a run for some stages. From then on, older runs of them are fenced."""
    body = call.body
    run = await call.aggregator.open_run(call.job, body.stages, body.holder, call.by)
    return RunBody(run)


@endpoints.get(
    "/v1/jobs/{job}/stages/{stage}/commits",
    role=Role.READ,
    gives=CommitsBody,
    errors=(UnknownJobError, UnknownStageError, UnavailableError),
)
async def get_commits(call: Call[None]) -> CommitsBody:
    """Show which run a stage belongs to, and its last committed epoch."""
    generation, progress = await call.aggregator.reader.progress(call.job, call.stage)
    return CommitsBody(call.job, call.stage, generation, progress.run or None, progress.epoch)

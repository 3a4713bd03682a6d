"""Runs: the executions of programs, their stages, and their commits."""

from __future__ import annotations

from service.api.descriptions import query
from service.api.endpoints import Call, Endpoints, json_body
from service.api.exchange import check_name, integer
from service.api.paging import cursor_parameter, first_page
from service.api.responses.jobs import CommitsBody
from service.api.responses.runs import EndedBody, RunBody, RunsBody, ended_body, runs_body
from service.api.run_requests import EndRun, OpenRun
from service.errors import (
    InvalidRequestError,
    StaleRunError,
    UnavailableError,
    UnknownJobError,
    UnknownRunError,
    UnknownStageError,
)
from service.model.keys import Role
from service.model.pipeline_spec import NAME_PATTERN
from service.model.runs import MAX_NUMBER, MAX_RUNS, NewRun

endpoints = Endpoints("runs")

DEFAULT_RUNS = 20


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
    run = NewRun(body.stages, body.holder, body.program, body.links or {})
    return RunBody(await call.aggregator.open_run(call.job, run, call.by))


@endpoints.get(
    "/v1/jobs/{job}/runs",
    role=Role.READ,
    gives=RunsBody,
    errors=(UnknownJobError, UnknownStageError, InvalidRequestError, UnavailableError),
    parameters=(
        query(
            "limit",
            "Number of runs",
            {"type": "integer", "minimum": 1, "maximum": MAX_RUNS, "default": DEFAULT_RUNS},
        ),
        cursor_parameter({"type": "string", "pattern": "^[1-9][0-9]{0,15}$"}),
        query(
            "stage",
            "Only runs that were opened for this stage",
            {"type": "string", "pattern": NAME_PATTERN},
        ),
    ),
)
async def get_runs(call: Call[None]) -> RunsBody:
    """Show the runs of a job and their ends, newest first."""
    limit = integer(call.request, "limit", 1, MAX_RUNS, DEFAULT_RUNS) or DEFAULT_RUNS
    before = integer(call.request, "cursor", 1, MAX_NUMBER, None)
    stage = call.request.query_params.get("stage")
    if stage is not None:
        check_name("stage", stage)
    # One more shows that there is another page.
    found = await call.aggregator.runs(call.job, limit + 1, before, stage)
    if stage is not None and before is None and not found:
        await call.aggregator.check_filter(call.job, stage)
    return runs_body(*first_page(list(found), limit, lambda each: str(each.run)))


@endpoints.post(
    "/v1/jobs/{job}/runs/{run}/end",
    json_body(EndRun),
    role=Role.DRIVE,
    gives=EndedBody,
    errors=(UnknownJobError, UnknownRunError, StaleRunError, InvalidRequestError, UnavailableError),
)
async def end_run(call: Call[EndRun]) -> EndedBody:
    """End a run with its outcome. Its leases are released, and its watermarks stay.

    A second end with the same outcome changes nothing. A later commit of the run still counts. A run
    that has lost all its stages is fenced: 409, as for another outcome.
    """
    body, because = call.body, call.body.because or ""
    ended = await call.aggregator.end_run(call.job, call.run, body.outcome, because, call.by)
    return ended_body(ended)


@endpoints.get(
    "/v1/jobs/{job}/stages/{stage}/commits",
    role=Role.READ,
    gives=CommitsBody,
    errors=(UnknownJobError, UnknownStageError, UnavailableError),
)
async def get_commits(call: Call[None]) -> CommitsBody:
    """Show the run that a stage belongs to, and its last committed epoch."""
    generation, progress = await call.aggregator.reader.progress(call.job, call.stage)
    return CommitsBody(call.job, call.stage, generation, progress.run or None, progress.epoch)

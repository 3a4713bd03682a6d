"""No check is left out: one that would not run cannot be added, and all ways in run the same."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Request

from service.api.counting import Responses
from service.api.endpoints import Call, Endpoints
from service.api.fast_lane import Application
from service.api.problems import install_handlers
from service.api.responses.common import HealthBody
from service.api.routing import DirectRoute, hot_routes, mount
from service.api.web import AllowedHosts
from service.errors import UnavailableError, UnknownJobError
from service.telemetry.metrics import Metrics


def check() -> None:
    """A check."""


async def endpoint(request: Request) -> None:
    """An endpoint as it should be."""


async def with_parameter(request: Request, limit: int) -> None:
    """An endpoint that FastAPI would have to find a parameter for."""


def router() -> APIRouter:
    return APIRouter(route_class=DirectRoute)


def test_the_request_alone_is_taken() -> None:
    made = router()
    made.get("/things")(endpoint)
    assert len(made.routes) == 1


def test_another_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="/things: a direct route takes only the request"):
        router().get("/things")(with_parameter)


def test_dependencies_are_refused_wherever_they_are_declared() -> None:
    with pytest.raises(TypeError, match="never run"):
        router().get("/things", dependencies=[Depends(check)])(endpoint)
    guarded = APIRouter(route_class=DirectRoute, dependencies=[Depends(check)])
    with pytest.raises(TypeError, match="never run"):
        guarded.get("/things")(endpoint)
    with pytest.raises(TypeError, match="of the application"):
        mount(FastAPI(dependencies=[Depends(check)]), router())


def test_an_endpoint_cannot_forget_to_say_which_role_it_needs() -> None:
    with pytest.raises(TypeError, match="role"):
        Endpoints("others").get("/others")  # pyright: ignore[reportCallIssue]


endpoints = Endpoints("things")


@endpoints.get("/things/{job}", role=None, gives=HealthBody, hot=True)
async def thing(call: Call[None]) -> HealthBody:
    """Give a thing, or what went wrong."""
    if call.job == "away":
        raise UnavailableError("a store is away")
    if call.job == "unknown":
        raise UnknownJobError("there is no such thing")
    if call.job == "broken":
        raise AssertionError("nobody expected this")
    return HealthBody()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "status", "logged"),
    [
        ("/things/a", 200, []),
        ("/things/unknown", 404, []),
        ("/things/%20", 422, []),
        ("/things/away", 503, ["GET /things/away: a store is away"]),
        ("/things/broken", 500, ["GET /things/broken failed"]),
    ],
)
async def test_the_short_way_in_answers_and_logs_as_the_usual_way(
    path: str, status: int, logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    usual, short = (Application(Responses(Metrics())) for _ in range(2))
    for app in (usual, short):
        install_handlers(app)
        mount(app, endpoints.router)
    short.open_lanes(hot_routes(endpoints.router))
    answers: list[httpx.Response] = []
    for app in (usual, short):
        app.state.service = SimpleNamespace(hosts=AllowedHosts(None))
        caplog.clear()
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://things"
        ) as client:
            answers.append(await client.get(path))
        assert [
            record.getMessage() for record in caplog.records if "service" in record.name
        ] == logged
    first, second = answers
    assert first.status_code == second.status_code == status
    assert first.content == second.content
    assert first.headers == second.headers

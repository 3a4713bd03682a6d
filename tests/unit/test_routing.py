"""A check that would not run cannot be added to a direct route."""

from __future__ import annotations

import pytest
from fastapi import APIRouter, Depends, FastAPI, Request

from service.api.routing import DirectRoute, mount, router


def check() -> None:
    """A check."""


async def endpoint(request: Request) -> None:
    """An endpoint as it should be."""


async def with_parameter(request: Request, limit: int) -> None:
    """An endpoint that FastAPI would have to find a parameter for."""


def test_the_request_alone_is_taken() -> None:
    made = router("things")
    made.get("/things")(endpoint)
    assert len(made.routes) == 1


def test_another_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="/things: a direct route takes the request alone"):
        router("things").get("/things")(with_parameter)


def test_dependencies_are_refused_wherever_they_are_declared() -> None:
    with pytest.raises(TypeError, match="never run"):
        router("things").get("/things", dependencies=[Depends(check)])(endpoint)
    guarded = APIRouter(route_class=DirectRoute, dependencies=[Depends(check)])
    with pytest.raises(TypeError, match="never run"):
        guarded.get("/things")(endpoint)
    with pytest.raises(TypeError, match="of the application"):
        mount(FastAPI(dependencies=[Depends(check)]), router("things"))

"""Routes with nothing between the request and its endpoint."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.routing import request_response

HOT: Final = "x-hot"
"""In a route's documentation: it is called at the rate at which a pipeline runs."""


class DirectRoute(APIRoute):
    """Runs an endpoint that takes the request and returns the response.

    FastAPI would work out its parameters and open two exit stacks for each request: here that is half
    of what a report costs. The endpoints read their requests themselves (`service.api.exchange`), so
    only the documentation is left for FastAPI to do, and errors go to its handlers as ever.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (APIRoute's own)
        super().__init__(*args, **kwargs)
        self.app = request_response(self.endpoint)


def router(tag: str) -> APIRouter:
    """Make a resource's router."""
    return APIRouter(tags=[tag], route_class=DirectRoute)


def hot_routes(*routers: APIRouter) -> list[DirectRoute]:
    """Return those routes that are marked as hot."""
    routes = [route for one in routers for route in one.routes]
    return [r for r in routes if isinstance(r, DirectRoute) and HOT in (r.openapi_extra or {})]


def mount(app: FastAPI, *routers: APIRouter) -> None:
    """Serve these routers' routes, in this order: the hot ones should come first.

    Put into the application one by one: an included router would be searched as a whole, for each
    request, before the next one is.
    """
    for one in routers:
        app.router.routes.extend(one.routes)

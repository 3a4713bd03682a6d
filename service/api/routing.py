"""Routes that call their endpoint directly."""

from __future__ import annotations

from inspect import signature
from typing import Any, Final, get_type_hints

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.routing import request_response

HOT: Final = "x-hot"
"""Extension in a route's documentation: the route is called at the rate of the pipeline."""


class DirectRoute(APIRoute):
    """A route to an endpoint that takes the request and returns the response.

    FastAPI would resolve its parameters and open two exit stacks for each request: half of the cost of a
    report. The endpoints read their requests themselves (`service.api.exchange`), so FastAPI only
    documents the route, and handles errors as usual.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (APIRoute's own)
        super().__init__(*args, **kwargs)
        types = get_type_hints(self.endpoint)
        parameters = [types.get(name) for name in signature(self.endpoint).parameters]
        if self.dependencies or parameters != [Request]:
            raise TypeError(
                f"{self.path}: a direct route takes only the request. Other parameters and"
                " dependencies would be documented, but never run: check them in the endpoint"
            )
        self.app = request_response(self.endpoint)


def hot_routes(*routers: APIRouter) -> list[DirectRoute]:
    """Return the hot routes."""
    routes = [route for one in routers for route in one.routes]
    return [r for r in routes if isinstance(r, DirectRoute) and HOT in (r.openapi_extra or {})]


def mount(app: FastAPI, *routers: APIRouter) -> None:
    """Serve these routers' routes, in this order: hot routes should come first.

    Each route is added singly: FastAPI searches an included router as a whole before the next router.
    """
    if app.router.dependencies:
        raise TypeError("direct routes run no dependencies of the application")
    for one in routers:
        app.router.routes.extend(one.routes)

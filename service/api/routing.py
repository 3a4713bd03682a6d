"""Routes with nothing between the request and its endpoint."""

from __future__ import annotations

from inspect import signature
from typing import Any, Final, get_type_hints

from fastapi import APIRouter, FastAPI, Request
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
        types = get_type_hints(self.endpoint)
        parameters = [types.get(name) for name in signature(self.endpoint).parameters]
        if self.dependencies or parameters != [Request]:
            raise TypeError(
                f"{self.path}: a direct route takes the request alone. What FastAPI works out from"
                " other parameters, or from dependencies, would be documented and never run: check it"
                " in the endpoint"
            )
        self.app = request_response(self.endpoint)


def hot_routes(*routers: APIRouter) -> list[DirectRoute]:
    """Return those routes that are marked as hot."""
    routes = [route for one in routers for route in one.routes]
    return [r for r in routes if isinstance(r, DirectRoute) and HOT in (r.openapi_extra or {})]


def mount(app: FastAPI, *routers: APIRouter) -> None:
    """Serve these routers' routes, in this order: the hot ones should come first.

    Put into the application one by one: an included router would be searched as a whole, for each
    request, before the next one is.
    """
    if app.router.dependencies:
        raise TypeError("direct routes run no dependencies of the application")
    for one in routers:
        app.router.routes.extend(one.routes)

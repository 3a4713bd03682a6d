"""Routes that call their endpoint directly."""

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

    FastAPI would resolve its parameters and open two exit stacks for each request: half of the cost of a
    report. The endpoints read their requests themselves (`service.api.exchange`), so FastAPI only does
    the documentation, and handles errors as usual.
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
    """Return those routes that are marked as hot."""
    routes = [route for one in routers for route in one.routes]
    return [r for r in routes if isinstance(r, DirectRoute) and HOT in (r.openapi_extra or {})]


def mount(app: FastAPI, *routers: APIRouter) -> None:
    """Serve these routers' routes, in this order: the hot ones should come first.

    Added one by one: of an included router, all routes would be searched for each request before those
    of the next one.
    """
    if app.router.dependencies:
        raise TypeError("direct routes run no dependencies of the application")
    for one in routers:
        app.router.routes.extend(one.routes)

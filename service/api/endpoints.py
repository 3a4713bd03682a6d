"""Endpoints, each described once: it is read, run, answered and documented by its description.

A check that every request must pass (its key, its names, its size) stands in `_run`, and nowhere
else: no endpoint can forget it, and the short way in (`service.api.fast_lane`) cannot leave it out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, ExitStack, closing
from dataclasses import dataclass
from ipaddress import ip_address
from string import Formatter
from typing import Any, Final, Generic, TypeVar, Unpack

import msgspec
from fastapi import APIRouter, Request, Response

from service.aggregator import Aggregator
from service.api.bodies import FREE_BYTES
from service.api.body_times import Times
from service.api.bulk import Bulk
from service.api.counting import WAITS
from service.api.descriptions import Description, document
from service.api.exchange import (
    MAX_BODY,
    Body,
    ServiceState,
    answer,
    check_name,
    declared_bytes,
    decode,
    read_large,
    read_small,
    state,
    whole_number,
)
from service.api.leaving import cancel_on_disconnect
from service.api.routing import DirectRoute
from service.api.web import check_browser, checked_headers
from service.errors import (
    InvalidRequestError,
    ProblemError,
)
from service.model.audit import Actor
from service.model.keys import Key, Role
from service.model.runs import MAX_NUMBER
from service.telemetry.metrics import Metrics
from service.telemetry.tracing import SWITCH

B = TypeVar("B")
T = TypeVar("T")


@dataclass(frozen=True)
class Reads(Generic[B]):
    """Description of the body that an endpoint reads."""

    types: tuple[type, ...]
    """For the documentation: the body has one of these types."""
    limit: int
    parse: Callable[[Body], B]


def json_body(
    body_type: type[B],
    *,
    limit: int = MAX_BODY,
    refusal: type[ProblemError] = InvalidRequestError,
    times: Times | None = None,
) -> Reads[B]:
    """Read JSON of this type, of at most `limit` bytes. What does not fit is refused with `refusal`."""
    decoder = msgspec.json.Decoder(body_type)
    return Reads((body_type,), limit, lambda body: decode(decoder, body, refusal, times))


def raw_body(*types: type) -> Reads[Body]:
    """Leave the reading to the endpoint: which of these it is depends on more than the body."""
    return Reads(types, MAX_BODY, lambda body: body)


NO_BODY: Final = Reads[None]((), 0, lambda _: None)


class Call(Generic[B]):
    """One request to an endpoint, with its key and the names in its path checked, and its body read."""

    __slots__ = ("_names", "_service", "body", "key", "request")

    def __init__(self, service: ServiceState, request: Request, body: B, key: Key | None) -> None:
        self._service = service
        self._names = request.path_params
        self.request = request
        self.body = body
        self.key = key
        """None: the endpoint is open to everyone."""

    @property
    def job(self) -> str:
        """The job that the path names."""
        return self._names["job"]

    @property
    def stage(self) -> str:
        """The stage that the path names."""
        return self._names["stage"]

    @property
    def run(self) -> int:
        """The run that the path names. Raises `InvalidRequestError`."""
        return whole_number("run", self._names["run"], 1, MAX_NUMBER)

    def may_read(self, job: str) -> bool:
        """Return whether its key may read this job."""
        return self.key is None or self.key.permits(Role.READ, job)

    @property
    def by(self) -> Actor:
        """Sender of the request, for the audit."""
        client = self.request.client
        host = "" if client is None else client.host
        try:
            # A proxy forwards any text of its client.
            ip_address(host)
        except ValueError:
            host = "unknown"
        return Actor("" if self.key is None else self.key.name, host)

    def confirm_key(self) -> None:
        """Check its key again, for responses that take long. Raises `UnauthenticatedError`."""
        if self.key is not None:
            self._service.aggregator.keys.confirm(self.key)

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Return the turn to take for making a large answer. See `Turns.take`."""
        return self._service.turns.take(self.request)

    def waiting(self) -> ExitStack:
        """Return what ends this client's wait. Raises `OverloadedError`. See `WaitLimit.enter`."""
        self.request.scope[WAITS] = True
        return self._service.waits.enter(self.request)

    async def wait_for(self, change: Coroutine[Any, Any, T]) -> T:
        """Wait for a change while the client is there. Raises `OverloadedError`, `ClientGoneError`."""
        with closing(change), self.waiting():
            return await cancel_on_disconnect(self.request.receive, change)

    @property
    def aggregator(self) -> Aggregator:
        """The use cases."""
        return self._service.aggregator

    @property
    def metrics(self) -> Metrics:
        """Metrics of the service."""
        return self._service.metrics


Handler = Callable[[Call[B]], Awaitable[Response | msgspec.Struct]]
"""Answers a call: with a body, which is written with the endpoint's status, or with a whole response."""


class Endpoints:
    """The endpoints of one resource."""

    def __init__(self, tag: str) -> None:
        self.router = APIRouter(tags=[tag], route_class=DirectRoute)

    def get(
        self, path: str, *, role: Role | None, **described: Unpack[Description]
    ) -> Callable[[Handler[None]], Handler[None]]:
        """Add an endpoint that needs a key with this role. None: it is open to everyone."""
        return self._add("GET", path, NO_BODY, role, described)

    def delete(
        self, path: str, *, role: Role | None, **described: Unpack[Description]
    ) -> Callable[[Handler[None]], Handler[None]]:
        """Add an endpoint that needs a key with this role. None: it is open to everyone."""
        return self._add("DELETE", path, NO_BODY, role, described)

    def post(
        self, path: str, reads: Reads[B], *, role: Role | None, **described: Unpack[Description]
    ) -> Callable[[Handler[B]], Handler[B]]:
        """Add an endpoint that needs a key with this role. None: it is open to everyone."""
        return self._add("POST", path, reads, role, described)

    def put(
        self, path: str, reads: Reads[B], *, role: Role | None, **described: Unpack[Description]
    ) -> Callable[[Handler[B]], Handler[B]]:
        """Add an endpoint that needs a key with this role. None: it is open to everyone."""
        return self._add("PUT", path, reads, role, described)

    def _add(
        self,
        method: str,
        path: str,
        reads: Reads[B],
        role: Role | None,
        described: Description,
    ) -> Callable[[Handler[B]], Handler[B]]:
        names = tuple(name for _, name, _, _ in Formatter().parse(path) if name)

        def add(handler: Handler[B]) -> Handler[B]:
            self.router.add_api_route(
                path,
                _run(handler, names, reads, role, described.get("status", 200)),
                methods=[method],
                name=handler.__name__,
                operation_id=handler.__name__,
                description=handler.__doc__,
                **document(method, names, reads.types, role, described),
            )
            return handler

        return add


def _run(
    handler: Handler[B],
    names: tuple[str, ...],
    reads: Reads[B],
    role: Role | None,
    status: int,
) -> Callable[[Request], Awaitable[Response]]:
    async def respond(
        service: ServiceState, request: Request, body: Body, key: Key | None, version: int
    ) -> Response:
        if reads.types and key is not None and not service.aggregator.keys.stands(version):
            # To read a body may take minutes, in which the key may have been revoked.
            service.aggregator.keys.confirm(key)
        answered = await handler(Call(service, request, reads.parse(body), key))
        response = answered if isinstance(answered, Response) else answer(answered, status)
        return response if len(response.body) <= FREE_BYTES else Bulk(request, response)

    async def run(request: Request) -> Response:
        tracing = SWITCH.tracing
        if tracing is None:
            return await check_and_run(request)
        named = {name: request.path_params[name] for name in names}
        with tracing.request(handler.__name__, request.method, request.headers, named) as span:
            response = await check_and_run(request)
            span.set_attribute("http.response.status_code", response.status_code)
            return response

    async def check_and_run(request: Request) -> Response:
        service = state(request)
        headers = checked_headers(request.scope)
        check_browser(request.method, headers, service.hosts)
        named = request.path_params
        key, version = None, 0
        if role is not None:
            # Before any other check, so a refusal does not disclose which resources exist.
            keys = service.aggregator.keys
            version = keys.version
            key = keys.authorize(headers.get(b"authorization"), role, named.get("job"))
        for name in names:
            check_name(name, named[name])
        body: Body = b""
        if reads.types:
            declared = declared_bytes(headers.get(b"content-length", b""), reads.limit)
            if declared is None or declared > FREE_BYTES:
                # Held until it is answered: what is made of a body may be larger than the body.
                with service.bodies.reserve() as reservation:
                    large = await read_large(request, reads.limit, declared, reservation)
                    return await respond(service, request, large, key, version)
            body = await read_small(request)
        return await respond(service, request, body, key, version)

    return run

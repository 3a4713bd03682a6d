"""The application: stores, use cases and routers put together, for as long as the service runs."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service.aggregator import Aggregator, Retention
from service.api import leases, operations, pipelines, reports, runs, watermarks
from service.api.bodies import ANSWERS, REQUESTS
from service.api.counting import CountRequests
from service.api.fast_lane import FastLane
from service.api.problems import install_handlers
from service.api.routing import hot_routes, mount
from service.clock import Clock, SystemClock
from service.errors import ProblemError, StoreRefusedError
from service.ledger.port import Ledger
from service.ledger.sql import SqlLedger
from service.live.memory import MemoryLiveStore
from service.live.port import LiveStore
from service.metrics import Metrics
from service.settings import Settings
from service.spec import PipelineSpec

log = logging.getLogger(__name__)

SUPERVISOR = "TIDEGAUGE_SUPERVISOR"
"""The environment variable with the process that started this one as one of several."""

_SUPERVISOR_POLL_S = 1.0

_SYSTEM_CLOCK = SystemClock()

_SWITCH_INTERVAL_S = 0.000_1
"""How long SQLite's thread waits for the interpreter before it insists.

A busy event loop lets go of the interpreter for an instant in each turn and takes it back before any
other thread has woken up; and each time, the other's patience starts anew. With Python's 5 ms, which no
turn lasts, it never insists: the ledger would starve, and watermarks stand still, just when reports
come fastest.
"""


def open_live_store(url: str, clock: Clock) -> LiveStore:
    """Choose the live store by its URL."""
    if url.startswith("memory:"):
        return MemoryLiveStore(clock)
    if not url.startswith(("redis", "rediss")):
        raise StoreRefusedError(
            f"TIDEGAUGE_LIVE_URL {url!r} is not known: use memory:// or redis://host:6379/0"
        )
    try:
        # Only who uses it needs it, and its import takes time.
        from service.live.redis.store import RedisLiveStore  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise StoreRefusedError(
            f"redis:// needs the package {error.name}: pip install 'tidegauge[production]'"
        ) from error
    return RedisLiveStore(url, clock)


def open_ledger(url: str) -> Ledger:
    """Choose the ledger by its URL."""
    return SqlLedger(url)


def create_app(settings: Settings | None = None, *, clock: Clock = _SYSTEM_CLOCK) -> FastAPI:
    """Make the application. Its stores are opened when it starts, and closed when it ends.

    If they cannot be, the start fails and the reason is `app.state.refusal`.
    """
    settings = settings or Settings()
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        # A report of a thousand ranges makes as many objects, all of which are gone with its answer:
        # with the default threshold the collector would walk through everything for each of them.
        gc.set_threshold(100_000, 20, 100)
        try:
            aggregator = Aggregator(
                open_live_store(settings.live_url, clock),
                open_ledger(settings.ledger_url),
                clock=clock,
                metrics=metrics,
                checkpoint_interval_ms=settings.checkpoint_interval_ms,
                retention=Retention(settings.history_fine_ms, settings.history_retention_ms),
            )
            await aggregator.open()
        except ProblemError as error:
            app.state.refusal = error
            raise
        app.state.aggregator = aggregator
        app.state.metrics = metrics
        orphaned = asyncio.create_task(_end_with_supervisor(), name="end with supervisor")
        try:
            with _readers_let_go_on_signal(aggregator):
                yield
        finally:
            orphaned.cancel()
            await aggregator.close()

    modules = (reports, watermarks, leases, runs, pipelines, operations)
    resources = [module.endpoints for module in modules]
    app = FastAPI(title="tidegauge", version="1", lifespan=lifespan, redoc_url=None)
    app.add_middleware(FastLane, routes=hot_routes(*(each.router for each in resources)))
    app.add_middleware(CountRequests, metrics=metrics)
    install_handlers(app)
    mount(app, *(each.router for each in resources))
    app.openapi = lambda: _openapi(app)
    return app


async def _end_with_supervisor() -> None:
    """End once the process that started this one is gone, if it is one of several on a port.

    Nobody would replace or stop it any more, and it would keep the port from those who come next.
    """
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor is None:
        return
    while os.getppid() == int(supervisor):  # noqa: ASYNC110 - the kernel tells nobody
        await asyncio.sleep(_SUPERVISOR_POLL_S)
    log.warning("the process that started this one is gone: ending")
    signal.raise_signal(signal.SIGTERM)


@contextmanager
def _readers_let_go_on_signal(aggregator: Aggregator) -> Generator[None]:
    """Let waiting readers go when the server is told to end.

    The server waits for open connections before it ends the lifespan, and a stream of events would
    never end by itself; so its signal handlers are wrapped while it serves.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(aggregator.let_readers_go)
        before = previous[signal.Signals(number)]
        if callable(before):
            before(number, frame)

    wrapped = [number for number, before in previous.items() if callable(before)]
    for number in wrapped:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in wrapped:
            signal.signal(number, previous[number])


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Describe the service: routes from the routers, bodies from the very types that decode them."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, components = msgspec.json.schema_components(
            (PipelineSpec, *REQUESTS, *ANSWERS), ref_template="#/components/schemas/{name}"
        )
        schema["components"] = {"schemas": components}
        app.openapi_schema = schema
    return app.openapi_schema

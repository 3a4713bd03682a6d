"""The application: the stores, the use cases and the routers, assembled."""

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

from fastapi import FastAPI

from service.aggregator import Aggregator, Limits, Retention
from service.api import (
    changes,
    diagnoses,
    docs,
    explanations,
    history,
    keys,
    leases,
    operations,
    page,
    pipelines,
    problem_pages,
    range_summaries,
    reports,
    retirements,
    runs,
    watermarks,
)
from service.api.bodies import BodyBudget
from service.api.counting import Responses
from service.api.exchange import ServiceState
from service.api.fast_lane import Application
from service.api.openapi import document_of
from service.api.problems import install_handlers
from service.api.routing import hot_routes, mount
from service.api.turns import Pace, Turns, WaitLimit
from service.api.web import AllowedHosts
from service.clock import Clock, SystemClock
from service.errors import ProblemError, StoreRefusedError
from service.ledger.port import Ledger
from service.ledger.sql import SqlLedger
from service.live.memory import MemoryLiveStore
from service.live.port import LiveStore
from service.server.bootstrap_keys import (
    check_not_exposed,
    may_be_open,
    operator_keys,
)
from service.server.connection_limits import Guard
from service.settings import Settings
from service.telemetry import tracing
from service.telemetry.metrics import Metrics
from service.telemetry.redaction import shown

log = logging.getLogger(__name__)

SUPERVISOR = "TIDEGAUGE_SUPERVISOR"
"""The environment variable with the id of the process that has started this and other ones."""

_SUPERVISOR_POLL_S = 1.0

_LARGE_ANSWERS = 4
"""Number of large responses that are made at once."""

_WAITING_ANSWERS = 1_000
"""Number of requests that wait for a turn. Each takes milliseconds: more would outlast their clients."""

_SYSTEM_CLOCK = SystemClock()

_SWITCH_INTERVAL_S = 0.000_1
"""Wait of SQLite's thread for the interpreter lock before it requests a switch.

A busy event loop releases the lock for an instant in each iteration, and takes it back before any other
thread has woken up; each time, the other thread's wait starts again. Python's default of 5 ms is longer
than an iteration, so the thread would never request a switch: the ledger would starve, and watermarks
would stand still, at the highest rate of reports.
"""


def open_live_store(url: str, clock: Clock) -> LiveStore:
    """Choose the live store by its URL."""
    if url.startswith("memory:"):
        return MemoryLiveStore(clock)
    if not url.startswith(("redis", "rediss")):
        raise StoreRefusedError(
            f"invalid TIDEGAUGE_LIVE_URL {shown(url)}: use memory:// or redis://host:6379/0"
        )
    try:
        # Imported only for Redis: the package is optional, and slow to import.
        from service.live.redis.store import RedisLiveStore  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise StoreRefusedError(
            f"redis:// needs the package {error.name}: pip install 'tidegauge[production]'"
        ) from error
    return RedisLiveStore(url, clock)


def open_ledger(url: str) -> Ledger:
    """Choose the ledger by its URL."""
    return SqlLedger(url)


def create_app(settings: Settings | None = None, *, clock: Clock = _SYSTEM_CLOCK) -> Application:
    """Make the application. Its stores are opened when it starts, and closed when it ends.

    If they cannot be opened, the start fails with the error in `app.state.refusal`.
    """
    settings = settings or Settings()
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[dict[str, Guard]]:
        tracing.start()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        # A report of a thousand ranges makes as many objects, which are all freed after its response.
        # With the default threshold, the collector would run for each such report.
        gc.set_threshold(100_000, 20, 100)
        try:
            aggregator = Aggregator(
                open_live_store(settings.live_url, clock),
                open_ledger(settings.ledger_url),
                clock=clock,
                metrics=metrics,
                checkpoint_interval_ms=settings.checkpoint_interval_ms,
                retention=Retention(
                    settings.history_fine_ms,
                    settings.history_retention_ms,
                    settings.audit_retention_ms,
                ),
                limits=Limits(settings.max_jobs, settings.max_ranges_per_job, settings.max_ranges),
                metrics_stages=settings.metrics_stages,
                operator_keys=operator_keys(settings),
                open_without_keys=may_be_open(settings),
            )
            await aggregator.open()
            try:
                check_not_exposed(settings, protected=aggregator.keys.any)
            except ProblemError:
                await aggregator.close()
                raise
        except ProblemError as error:
            app.state.refusal = error
            raise
        app.state.guard = guard = Guard(settings, metrics, clock)
        app.state.service = ServiceState(
            aggregator,
            metrics,
            AllowedHosts.of(settings.allowed_hosts, settings.host),
            bodies=BodyBudget(settings.max_bodies_bytes),
            responses=BodyBudget(settings.max_bodies_bytes, "responses being sent"),
            waits=WaitLimit(settings.max_readers_per_client or guard.max_connections // 2),
            turns=Turns(_LARGE_ANSWERS, _WAITING_ANSWERS),
            pace=Pace(),
        )
        orphaned = asyncio.create_task(_end_with_supervisor(), name="end with supervisor")
        watching = asyncio.create_task(guard.watch(), name="watch connections")
        try:
            with _end_waits_on_signal(aggregator):
                yield {"guard": guard}
        finally:
            orphaned.cancel()
            watching.cancel()
            await aggregator.close()
            await asyncio.to_thread(tracing.stop)

    modules = (
        reports, watermarks, history, explanations, diagnoses, range_summaries, retirements, leases,
        runs, changes, pipelines, keys, operations,
    )  # fmt: skip
    resources = [module.endpoints for module in modules]
    app = Application(
        Responses(metrics),
        title="tidegauge",
        version="1",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # A redirect would go to the name in the request's Host.
        redirect_slashes=False,
        # `service.api.endpoints` traces requests, including those of hot routes.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.open_lanes(hot_routes(*(each.router for each in resources)))
    install_handlers(app)
    mount(app, *(each.router for each in resources))
    docs.mount(app)
    problem_pages.mount(app)
    page.mount(app)
    app.openapi = lambda: _openapi(app)
    return app


async def _end_with_supervisor() -> None:
    """End the process once its supervisor has ended, if it has one.

    Otherwise the process would run on without a way to stop it, and keep the port from its successors.
    """
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor is None:
        return
    while os.getppid() == int(supervisor):  # noqa: ASYNC110 - the kernel does not notify
        await asyncio.sleep(_SUPERVISOR_POLL_S)
    log.warning("the supervisor process has ended: ending")
    signal.raise_signal(signal.SIGTERM)


@contextmanager
def _end_waits_on_signal(aggregator: Aggregator) -> Generator[None]:
    """Answer waiting requests when a signal ends the server.

    The server waits for open connections before it ends the lifespan, and a stream of events does not
    end by itself. So its signal handlers are wrapped while it serves.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(aggregator.reader.release)
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
    if app.openapi_schema is None:
        app.openapi_schema = document_of(app)
    return app.openapi_schema

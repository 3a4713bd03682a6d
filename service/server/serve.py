"""The commands `tidegauge serve` and `tidegauge migrate`, which need the service's packages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import logging.config
import os
import socket
from collections.abc import Collection
from functools import partial
from typing import Any, Final

import typer
import uvicorn
from pydantic import ValidationError
from uvicorn.supervisors import Multiprocess

from service.clock import SystemClock
from service.errors import CannotStartError, ProblemError
from service.server.app import (
    SUPERVISOR,
    create_app,
    open_ledger,
    open_live_store,
)
from service.server.bootstrap_keys import check_not_exposed, operator_keys
from service.server.http_protocol import GuardedProtocol
from service.server.tls import make_context, tls_files
from service.settings import Settings
from service.telemetry.redaction import redact

_URLS: Final = frozenset({"ledger_url", "live_url"})
"""The settings that may come from files."""

_WORKER_ANSWERS_S: Final = 20
"""Time in which a process answers its supervisor. On a busy machine the imports of a new process alone
take longer than uvicorn's five seconds: it would be killed, and another one started, without end."""


def serve(workers: int, **options: object) -> None:
    """Serve until stopped. Raises `ProblemError`."""
    given = {name: value for name, value in options.items() if value is not None}
    settings = read_settings(**given)
    embedded = settings.live_url.startswith("memory:"), settings.ledger_url.startswith("sqlite")
    if workers > 1 and any(embedded):
        raise CannotStartError(
            f"--workers {workers} needs stores that processes can share, but memory:// and SQLite are"
            " for one process: use --workers 1, or --live-url redis://… with --ledger-url "
            "postgresql+psycopg://…"
        )
    logging.config.dictConfig(_logging(settings))
    files = tls_files(settings)
    if files is not None:
        # Once here, so that an error is reported in a line, and not by each process.
        files.load()
    listeners = _listen(settings)
    if workers > 1:
        _serve_many(settings, listeners, workers, given)
    else:
        _serve_one(settings, listeners)


def _serve_one(settings: Settings, listeners: list[socket.socket]) -> None:
    application = create_app(settings)
    server = _Server(uvicorn.Config(application, log_config=None, **_server(settings)))
    # uvicorn calls exit() itself when it cannot start.
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        server.run(sockets=listeners)
    if not server.started:
        refusal: ProblemError | None = getattr(application.state, "refusal", None)
        raise typer.Exit(2) if refusal is None else refusal


def migrate(**options: object) -> None:
    """Bring the ledger's schema up to date. Raises `ProblemError`."""
    asyncio.run(_migrate(read_settings(**options)))


def read_settings(**options: object) -> Settings:
    """Read the settings: from options, else the environment, else `.env`, else the defaults.

    Raises `CannotStartError`.
    """
    given = {name: value for name, value in options.items() if value is not None}
    # An option comes before a file that the environment names.
    given |= {f"{name}_file": None for name in _URLS if name in given}
    try:
        return Settings(**given)  # type: ignore[arg-type]
    except UnicodeDecodeError:
        raise CannotStartError("the file .env cannot be read: it is not UTF-8") from None
    except ValidationError as error:
        first = error.errors()[0]
        member = "_".join(str(part) for part in first["loc"]).upper()
        raise CannotStartError(
            redact(f"TIDEGAUGE_{member} is {first['input']!r}: {first['msg']}")
            if member
            else redact(first["msg"])
        ) from None


def _server(settings: Settings) -> dict[str, Any]:
    files = tls_files(settings)
    return {
        "loop": "uvloop" if files is None else "service.server.tls:HandshakeLoop",
        "http": GuardedProtocol,
        "ws": "none",
        "lifespan": "on",
        "access_log": False,
        "timeout_keep_alive": settings.idle_timeout_ms / 1_000,
        "timeout_graceful_shutdown": 10,
        "server_header": False,
        # Not even from loopback, unless the operator names trusted proxies: the audit shows addresses.
        "proxy_headers": "FORWARDED_ALLOW_IPS" in os.environ,
        "ssl_context_factory": None if files is None else partial(make_context, files),
    }


def _serve_many(
    settings: Settings,
    listeners: list[socket.socket],
    workers: int,
    options: Collection[str],
) -> None:
    """Serve with several processes on one port. A dead process is replaced."""
    # Once, before the processes start: else each would fail, again and again.
    asyncio.run(_migrate(settings))
    asyncio.run(_check_not_exposed(settings))
    asyncio.run(_check_live_store(settings))
    # The processes are spawned, and read the settings from the environment, `.env` and files for
    # themselves, since these may have passwords. Only options are handed on.
    for name, value in settings.model_dump(include=set(options)).items():
        os.environ[f"TIDEGAUGE_{name.upper()}"] = str(value)
    # A file that the environment or `.env` names would come before them.
    for name in _URLS.intersection(options):
        os.environ[f"TIDEGAUGE_{name.upper()}_FILE"] = ""
    os.environ[SUPERVISOR] = str(os.getpid())
    config = uvicorn.Config(
        "service.server.app:create_app",
        factory=True,
        workers=workers,
        log_config=_logging(settings),
        **_server(settings),
        timeout_worker_healthcheck=_WORKER_ANSWERS_S,
    )
    _print_address(listeners[0], secure=config.is_ssl)
    with contextlib.suppress(KeyboardInterrupt):
        Multiprocess(config, sockets=listeners).run()


async def _migrate(settings: Settings) -> None:
    ledger = open_ledger(settings.ledger_url)
    try:
        await ledger.open(exclusive=False)
    finally:
        await ledger.close()


async def _check_not_exposed(settings: Settings) -> None:
    ledger = open_ledger(settings.ledger_url)
    try:
        protected = bool(operator_keys(settings) or await ledger.keys())
    finally:
        await ledger.close()
    check_not_exposed(settings, protected=protected)


async def _check_live_store(settings: Settings) -> None:
    """Raise `StoreRefusedError` if the live store cannot be used. An unavailable one may return."""
    store = open_live_store(settings.live_url, SystemClock())
    try:
        await store.open()
    finally:
        await store.close()


class _Server(uvicorn.Server):
    """Prints its address once it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        await super().startup(sockets)
        for listener in (sockets or ())[:1]:
            _print_address(listener, secure=self.config.is_ssl)


def _print_address(listener: socket.socket, *, secure: bool) -> None:
    scheme = "https" if secure else "http"
    host, port = listener.getsockname()[:2]
    typer.echo(f"tidegauge listens on {scheme}://{f'[{host}]' if ':' in host else host}:{port}")


_ACCEPTED_AT_ONCE = 4


def _listen(settings: Settings) -> list[socket.socket]:
    """Bind the port before anything else, so that a taken one is reported in a line, not a traceback.

    Return the listener under several descriptors. libuv accepts one connection for each of them in
    an iteration of the event loop, and the kernel keeps new clients in order. With one descriptor,
    a client after a burst of a thousand clients would wait for as many iterations, each with its
    requests. With many, one iteration may have to read from all of them: with sixteen, a client
    that sends pipelined requests on one connection after the other keeps others waiting for 200 ms.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise CannotStartError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror};"
            " choose another --host or --port (0: any free one)"
        ) from None
    return [listener, *(listener.dup() for _ in range(_ACCEPTED_AT_ONCE - 1))]


class _NoTracebackAtStart(logging.Filter):
    """Filter of uvicorn's traceback of a failed start: `serve` reports the error in a line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        message = record.getMessage()
        refusals = (
            *("StoreRefusedError", "UnavailableError", "CannotStartError"),
            "Application startup failed",
        )
        return not any(refusal in message for refusal in refusals)


class TextFormatter(logging.Formatter):
    """A line of text for each record, without the passwords that a library's error may quote."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return redact(super().format(record))


class JsonFormatter(logging.Formatter):
    """A line of JSON for each record, without passwords."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line: dict[str, Any] = {
            "at_ms": int(record.created * 1_000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({k: redact(v) if isinstance(v, str) else v for k, v in line.items()})


def _logging(settings: Settings) -> dict[str, Any]:
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "text": {
                "()": TextFormatter,
                "fmt": "%(asctime)s %(levelname)-7s %(name)s %(message)s",
            },
            "json": {"()": JsonFormatter},
        },
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": settings.log_format,
                "filters": ["no traceback at start"],
            }
        },
        "filters": {"no traceback at start": {"()": _NoTracebackAtStart}},
        "root": {"level": settings.log_level.upper(), "handlers": ["stderr"]},
        "loggers": {"alembic": {"level": "WARNING"}, "aiosqlite": {"level": "WARNING"}},
    }

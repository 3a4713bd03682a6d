"""What `tidegauge serve` and `tidegauge migrate` do. Needs the service's packages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import logging.config
import os
import socket
from collections.abc import Iterable
from typing import Any

import typer
import uvicorn
from pydantic import ValidationError
from uvicorn.supervisors import Multiprocess

from service.app import SUPERVISOR, create_app, open_ledger
from service.errors import CannotStartError, ProblemError
from service.guard import GuardedProtocol
from service.settings import Settings


def serve(workers: int, **options: object) -> None:
    """Serve until stopped. Raises `ProblemError`."""
    settings = read_settings(**options)
    embedded = settings.live_url.startswith("memory:"), settings.ledger_url.startswith("sqlite")
    if workers > 1 and any(embedded):
        raise CannotStartError(
            f"--workers {workers} needs stores that processes can share, but memory:// and SQLite are"
            " for one process: use --workers 1, or --live-url redis://… with --ledger-url postgresql+psycopg://…"
        )
    logging.config.dictConfig(_logging(settings))
    listener = _listen(settings)
    if workers > 1:
        _serve_many(settings, listener, workers)
    else:
        _serve_one(settings, listener)


def _serve_one(settings: Settings, listener: socket.socket) -> None:
    application = create_app(settings)
    server = _Server(uvicorn.Config(application, log_config=None, **_SERVER))
    # uvicorn calls exit() itself when it cannot start.
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        server.run(sockets=[listener])
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
    try:
        return Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        member = "_".join(str(part) for part in first["loc"]).upper()
        raise CannotStartError(
            f"TIDEGAUGE_{member} is {first['input']!r}: {first['msg']}"
        ) from None


_SERVER: dict[str, Any] = {
    "loop": "uvloop",
    "http": GuardedProtocol,
    "ws": "none",
    "lifespan": "on",
    "access_log": False,
    "timeout_graceful_shutdown": 10,
    "server_header": False,
}


def _serve_many(settings: Settings, listener: socket.socket, workers: int) -> None:
    """Serve with several processes on one port. One that dies is replaced."""
    # Once, before the processes start: else each would fail, again and again.
    asyncio.run(_migrate(settings))
    # The processes are spawned, and read their settings from the environment.
    for name, value in settings.model_dump().items():
        os.environ[f"TIDEGAUGE_{name.upper()}"] = str(value)
    os.environ[SUPERVISOR] = str(os.getpid())
    config = uvicorn.Config(
        "service.app:create_app",
        factory=True,
        workers=workers,
        log_config=_logging(settings),
        **_SERVER,
    )
    _print_address([listener])
    with contextlib.suppress(KeyboardInterrupt):
        Multiprocess(config, sockets=[listener]).run()


async def _migrate(settings: Settings) -> None:
    ledger = open_ledger(settings.ledger_url)
    try:
        await ledger.open(exclusive=False)
    finally:
        await ledger.close()


class _Server(uvicorn.Server):
    """Prints its address once it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        await super().startup(sockets)
        _print_address(sockets or ())


def _print_address(sockets: Iterable[socket.socket]) -> None:
    for listener in sockets:
        host, port = listener.getsockname()[:2]
        typer.echo(f"tidegauge listens on http://{f'[{host}]' if ':' in host else host}:{port}")


def _listen(settings: Settings) -> socket.socket:
    """Bind the port before anything else, so that a taken one is reported in a line, not a traceback."""
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
    return listener


class _NoTracebackAtStart(logging.Filter):
    """Drops uvicorn's traceback of a failed start: `serve` reports the error in a line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        message = record.getMessage()
        return "StoreRefusedError" not in message and "UnavailableError" not in message


class JsonFormatter(logging.Formatter):
    """A line of JSON for each record."""

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
        return json.dumps(line)


def _logging(settings: Settings) -> dict[str, Any]:
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "text": {"format": "%(asctime)s %(levelname)-7s %(name)s %(message)s"},
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

"""The command `tidegauge`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import logging.config
import os
import socket
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points, version
from typing import Annotated, Any

import typer
import uvicorn
from pydantic import ValidationError
from rich.console import Console
from uvicorn.supervisors import Multiprocess

from service.app import SUPERVISOR, create_app, open_ledger
from service.errors import ProblemError
from service.settings import Settings

app = typer.Typer(
    name="tidegauge",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="A central watermark aggregator for Apache Spark: *is everything before this moment in?*",
)
errors = Console(stderr=True, soft_wrap=True)


def fail(message: str) -> typer.Exit:
    """Say in a line what is wrong and what to do; the exit code is 2."""
    errors.print(f"tidegauge: {message}", style="red", markup=False, highlight=False)
    return typer.Exit(2)


def _settings(**options: object) -> Settings:
    """Options where they are given, else the environment, else `.env`, else the defaults."""
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        member = "_".join(str(part) for part in first["loc"]).upper()
        raise fail(f"TIDEGAUGE_{member} is {first['input']!r}: {first['msg']}") from None


LedgerUrl = Annotated[str | None, typer.Option(help="Where the hard state is.", show_default=False)]


@app.command(
    name="serve",
    epilog="Example: `tidegauge serve --port 8000 --ledger-url sqlite+aiosqlite:///tidegauge.db`",
)
def serve(
    ledger_url: LedgerUrl = None,
    live_url: Annotated[str | None, typer.Option(help="Where the soft state is.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0: any free one.")] = None,
    checkpoint_interval_ms: Annotated[
        int | None, typer.Option(help="How often promises are saved.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes; more than one needs redis://.")] = 1,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json.")] = None,
) -> None:
    """Serve. Each option is also an environment variable, `TIDEGAUGE_PORT` and so on."""
    settings = _settings(
        ledger_url=ledger_url,
        live_url=live_url,
        host=host,
        port=port,
        checkpoint_interval_ms=checkpoint_interval_ms,
        log_level=log_level,
        log_format=log_format,
    )
    embedded = settings.live_url.startswith("memory:"), settings.ledger_url.startswith("sqlite")
    if workers > 1 and any(embedded):
        raise fail(
            f"--workers {workers} needs stores that processes can share, and memory:// and SQLite are"
            " for one: use --workers 1, or --live-url redis://… with --ledger-url postgresql+psycopg://…"
        )
    logging.config.dictConfig(_logging(settings))
    listener = _listen(settings)
    if workers > 1:
        _serve_many(settings, listener, workers)
        return
    application = create_app(settings)
    config = uvicorn.Config(
        application,
        log_config=None,
        **_SERVER,
    )
    server = _Server(config)
    # It exits by itself when it could not start.
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        server.run(sockets=[listener])
    if not server.started:
        refusal: ProblemError | None = getattr(application.state, "refusal", None)
        raise typer.Exit(2) if refusal is None else fail(refusal.detail)


_SERVER: dict[str, Any] = {
    "loop": "uvloop",
    "http": "httptools",
    "lifespan": "on",
    "access_log": False,
    "timeout_graceful_shutdown": 10,
    "server_header": False,
}


def _serve_many(settings: Settings, listener: socket.socket, workers: int) -> None:
    """Serve with several processes on one port. One that dies is replaced."""
    try:
        # Once, before all of them try: a refusal is one line, not one for each start of each.
        asyncio.run(_migrate(settings))
    except ProblemError as error:
        raise fail(error.detail) from None
    # The processes are started afresh, and read their settings as any process does.
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
    _say_where([listener])
    with contextlib.suppress(KeyboardInterrupt):
        Multiprocess(config, sockets=[listener]).run()


async def _migrate(settings: Settings) -> None:
    ledger = open_ledger(settings.ledger_url)
    try:
        await ledger.open(exclusive=False)
    finally:
        await ledger.close()


class _Server(uvicorn.Server):
    """Says where it listens once it does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        await super().startup(sockets)
        _say_where(sockets or ())


def _say_where(sockets: Iterable[socket.socket]) -> None:
    for listener in sockets:
        host, port = listener.getsockname()[:2]
        typer.echo(f"tidegauge listens on http://{f'[{host}]' if ':' in host else host}:{port}")


def _listen(settings: Settings) -> socket.socket:
    """Take the port before anything else, so that a taken one is one line and not a stack."""
    listener = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise fail(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror};"
            " choose another --host or --port (0: any free one)"
        ) from None
    return listener


@app.command(
    name="migrate", epilog="Example: `tidegauge migrate --ledger-url postgresql+psycopg://…`"
)
def migrate(
    ledger_url: LedgerUrl = None,
) -> None:
    """Bring the ledger's schema up to date. `serve` does so by itself when it starts."""
    settings = _settings(ledger_url=ledger_url)

    try:
        asyncio.run(_migrate(settings))
    except ProblemError as error:
        raise fail(error.detail) from None
    typer.echo("the ledger's schema is up to date")


@app.command(name="version")
def show_version() -> None:
    """Show the version."""
    typer.echo(version("tidegauge"))


class _NoTracebackAtStart(logging.Filter):
    """Drops uvicorn's traceback of a start that was refused: `serve` says in a line what is wrong."""

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


def main() -> None:
    """Run the command, with those that other packages add."""
    ours = {command.name for command in app.registered_commands}
    if not ours.intersection(sys.argv[1:2]):
        for found in entry_points(group="tidegauge.commands"):
            # An installation that only serves has no PySpark, and needs none.
            with contextlib.suppress(ImportError):
                app.command(found.name)(found.load())
    app()


if __name__ == "__main__":
    main()

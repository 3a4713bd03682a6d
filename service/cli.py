"""The command `tidegauge`."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable, Generator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import typer
from rich.console import Console
from typer.core import TyperCommand
from typing_extensions import override

from service import __version__
from service.errors import ProblemError
from service.telemetry.redaction import redact

app = typer.Typer(
    name="tidegauge",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="A central watermark aggregator for Apache Spark: *is everything before this moment in?*",
    # Commands inherit the names.
    context_settings={"help_option_names": ["-h", "--help"]},
)
errors = Console(stderr=True, soft_wrap=True)


def fail(message: str) -> typer.Exit:
    """Print an error with its remedy in a line; return the exit, with code 2."""
    errors.print(f"tidegauge: {redact(message)}", style="red", markup=False, highlight=False)
    return typer.Exit(2)


@contextlib.contextmanager
def _in_a_line() -> Generator[None]:
    """Print errors in a line, also if only the agent is installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise fail(
            f"the service needs {error.name}, which is not installed: pip install 'tidegauge[service]'"
        ) from None
    except ProblemError as error:
        raise fail(error.detail) from None


LedgerUrl = Annotated[
    str | None, typer.Option(help="The store of the durable state.", show_default=False)
]


@app.command(
    name="serve",
    epilog="Example: `tidegauge serve --port 8000 --ledger-url sqlite+aiosqlite:///tidegauge.db`",
)
def serve(
    ledger_url: LedgerUrl = None,
    live_url: Annotated[str | None, typer.Option(help="The store of the live state.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0: any free one.")] = None,
    checkpoint_interval_ms: Annotated[
        int | None, typer.Option(help="Interval at which promises are saved.")
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(help="A file with a key with every right, of at least 32 characters."),
    ] = None,
    scrape_key_file: Annotated[
        Path | None, typer.Option(help="A file with a key for the metrics alone.")
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option(
            "--insecure", help="Serve everyone on any address, while the service has no key."
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes; more than one needs redis://.")
    ] = 1,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(help="Names of the service, separated by commas; *: any."),
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="Certificate chain, in PEM format.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its key.")] = None,
    tls_client_ca: Annotated[
        str | None, typer.Option(help="Authority of the certificates that clients must present.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json.")] = None,
) -> None:
    """Run the service. Each option is also an environment variable, `TIDEGAUGE_PORT` and so on."""
    with _in_a_line():
        from service.server import serve as serving  # noqa: PLC0415

        serving.serve(
            workers,
            ledger_url=ledger_url,
            live_url=live_url,
            host=host,
            port=port,
            checkpoint_interval_ms=checkpoint_interval_ms,
            admin_key_file=admin_key_file,
            scrape_key_file=scrape_key_file,
            insecure=insecure,
            allowed_hosts=allowed_hosts,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_client_ca=tls_client_ca,
            log_level=log_level,
            log_format=log_format,
        )


@app.command(
    name="migrate", epilog="Example: `tidegauge migrate --ledger-url postgresql+psycopg://…`"
)
def migrate(
    ledger_url: LedgerUrl = None,
) -> None:
    """Bring the ledger's schema up to date. `serve` does so at its start."""
    with _in_a_line():
        from service.server import serve as serving  # noqa: PLC0415

        serving.migrate(ledger_url=ledger_url)
    typer.echo("the ledger's schema is up to date")


@app.command(
    name="doctor",
    epilog="Example: `tidegauge doctor --live-url redis://redis:6379/0 --json`",
)
def doctor(
    ledger_url: LedgerUrl = None,
    live_url: Annotated[str | None, typer.Option(help="The store of the live state.")] = None,
    form: Annotated[
        Literal["table", "wide", "json", "yaml"],
        typer.Option("--output", "-o", help="The form of the output. wide: does not wrap lines."),
    ] = "table",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: a short form of -o json.")
    ] = False,
) -> None:
    """Check settings, stores, versions, clocks and disk, and print remedies.

    The settings are those of this machine: run the command where the service runs. It changes nothing.
    The exit code is 1 for a fault.
    """
    if as_json and form not in {"table", "json"}:
        raise typer.BadParameter("--json is a short form of -o json: leave one of the two out")
    with _in_a_line():
        from service.server import doctor as examination  # noqa: PLC0415

        examination.doctor("json" if as_json else form, ledger_url=ledger_url, live_url=live_url)


@app.command(name="version")
def show_version() -> None:
    """Show the version."""
    typer.echo(__version__)


def _show_version(*, is_wanted: bool) -> None:
    if is_wanted:
        show_version()
        raise typer.Exit


_WITHOUT_URL: Final = frozenset({"serve", "migrate", "doctor", "version"})
"""Commands that work on this machine. An option of theirs that is ignored would mislead."""


@app.callback()
def common(
    context: typer.Context,
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version, and exit."
        ),
    ] = False,
    _url: Annotated[
        str | None,
        typer.Option("--url", help="The URL of the service, for commands that send requests."),
    ] = None,
    _profile: Annotated[
        str | None, typer.Option("--profile", help="The profile with the URL and the key.")
    ] = None,
) -> None:
    """Take the options of all commands. A command reads `--url` and `--profile` from its context."""
    if (_url or _profile) and context.invoked_subcommand in _WITHOUT_URL:
        raise typer.BadParameter(
            f"tidegauge {context.invoked_subcommand} works on this machine, and does not send requests:"
            " leave out --url and --profile"
        )


_USAGE_EXIT_CODES = {"status": 3}
"""Exit codes of wrong usage, of commands for which 2 is a result."""


_WITH_TIMES = {"eta"}
"""Commands with an argument that may begin with a minus, as `-2h` does."""


def with_times_last(args: list[str]) -> list[str]:
    """Return the arguments with those that begin with a minus and a digit behind `--`.

    >>> with_times_last(["scores", "average", "-2h", "--json"])
    ['scores', 'average', '--json', '--', '-2h']
    >>> with_times_last(["scores", "--", "-2h"])
    ['scores', '--', '-2h']
    """
    if "--" in args:
        return args
    times = [each for each in args if re.match(r"-\d", each)]
    return [*(each for each in args if each not in times), "--", *times] if times else args


_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
"""Click's error of wrong usage, whose module depends on the version of Typer."""


class _Command(TyperCommand):
    """A command whose wrong usage has an exit code of its own."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with self._usage():
            return super().parse_args(
                ctx, with_times_last(args) if self.name in _WITH_TIMES else args
            )

    @override
    def invoke(self, ctx: Any) -> Any:
        with self._usage():
            return super().invoke(ctx)

    @contextlib.contextmanager
    def _usage(self) -> Generator[None]:
        try:
            yield
        except _UsageError as error:
            error.exit_code = _USAGE_EXIT_CODES.get(self.name or "", error.exit_code)
            raise


def _add(name: str, command: typer.Typer | Callable[..., object]) -> None:
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name, cls=_Command)(command)


def main() -> None:
    """Run the command, including the commands of other packages."""
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        # The shell has closed the output (`>&-`): there is not a stream to write to.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  (until the end of the process)
    ours = {command.name for command in app.registered_commands}
    if not ours.intersection(sys.argv[1:2]):
        for found in entry_points(group="tidegauge.commands"):
            # An installation of the service alone works without PySpark.
            with contextlib.suppress(ImportError):
                _add(found.name, found.load())
    try:
        app()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # Else Python would write what is left, and print the error once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(fail(f"the output cannot be written: {error.strerror}").exit_code)


if __name__ == "__main__":
    main()

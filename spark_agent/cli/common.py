"""Options, output and errors that all commands share. Does not import Spark."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spark_agent.cli.profile import read_profile
from spark_agent.client.client import Client
from spark_agent.client.credentials import FILE_VARIABLE, KEY_VARIABLE
from spark_agent.client.errors import (
    Forbidden,
    NoUsableKey,
    Refused,
    Unauthenticated,
    UnknownJob,
    UnknownRange,
    UnknownStage,
)
from spark_agent.client.watermark_wait import WaitOutcome
from spark_agent.exceptions import (
    AggregatorError,
    NotServing,
    WrongAddress,
)

EXIT_NOT_IN_TIME: Final = 3
EXIT_UNAVAILABLE: Final = 4
EXIT_WRONG: Final = 5
EXIT_NOT_INSTALLED: Final = 6
"""The command needs a package that is missing."""
EXIT_NO_ESTIMATE: Final = 7
"""The history permits no estimate."""
# 1 is of the interpreter and of a refused confirmation, 2 of a typing error.

EXIT_CODES: Final = {
    WaitOutcome.REACHED: 0,
    WaitOutcome.NOT_IN_TIME: EXIT_NOT_IN_TIME,
    WaitOutcome.UNAVAILABLE: EXIT_UNAVAILABLE,
    WaitOutcome.WRONG: EXIT_WRONG,
}

_PIPE_WIDTH: Final = 2_000
_ADMIN_KEY_VARIABLE: Final = "TIDEGAUGE_ADMIN_KEY"
_ADMIN_FILE_VARIABLE: Final = "TIDEGAUGE_ADMIN_KEY_FILE"

DEFAULT_URL: Final = "http://127.0.0.1:8000"
READER: Final = "a key that may read"


def _url(context: typer.Context, value: str) -> str:
    """Return the URL of the option or the environment, else the profile's."""
    source = context.get_parameter_source("url")
    if source is not None and source.name != "DEFAULT":
        return value
    try:
        return read_profile().url or value
    except ValueError as error:
        raise exit_with(context.info_name or "", str(error)) from None


def complete_job(context: typer.Context, incomplete: str) -> list[str]:
    """Return the jobs that begin like this. The shell waits, so after a second the list is empty."""
    return [each for each in _names(context, None) if each.startswith(incomplete)]


def complete_stage(context: typer.Context, incomplete: str) -> list[str]:
    """Return the stages of the job on the command line that begin like this."""
    job = context.params.get("job")
    return [each for each in _names(context, job) if job and each.startswith(incomplete)]


def _names(context: typer.Context, job: str | None) -> Sequence[str]:
    try:
        url = context.params.get("url")
        url = url or os.environ.get("TIDEGAUGE_URL") or read_profile().url or DEFAULT_URL
        client = client_of(url, context.params.get("key_file"), timeout_ms=1_000)
        lines = client.jobs()["jobs"]
    except (ValueError, AggregatorError):
        return ()
    if job is None:
        return [each["job"] for each in lines]
    return [stage for each in lines if each["job"] == job for stage in each["stages"]]


Url = Annotated[
    str,
    typer.Option(
        envvar="TIDEGAUGE_URL",
        callback=_url,
        help="The URL of the service; by default the profile's.",
    ),
]
Job = Annotated[str, typer.Argument(help="The job.", autocompletion=complete_job)]
Stage = Annotated[str, typer.Argument(help="The stage.", autocompletion=complete_stage)]
# An option for the key itself does not exist: the list of processes would show the key to every user.
KeyFile = Annotated[
    str | None,
    typer.Option(
        help=f"A file with the key; else {FILE_VARIABLE}, {KEY_VARIABLE},"
        f" {_ADMIN_FILE_VARIABLE}, {_ADMIN_KEY_VARIABLE}, or the profile's.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def client_of(url: str, key_file: str | None, *, timeout_ms: int = 2_000) -> Client:
    """Make a client with the caller's key, or with the operator's where the service is configured."""
    make = partial(Client, timeout_ms=timeout_ms, patience_ms=timeout_ms)
    agents = os.environ.get(KEY_VARIABLE) or os.environ.get(FILE_VARIABLE)
    if key_file is None and not agents:
        key_file = os.environ.get(_ADMIN_FILE_VARIABLE)
        key = None if key_file else os.environ.get(_ADMIN_KEY_VARIABLE)
        if not key and not key_file:
            key_file = _key_file_of(url)
        return make(url, key=key or None, key_file=key_file or None)
    return make(url, key_file=key_file)


def _key_file_of(url: str) -> str | None:
    """Return the profile's key, if the URL is the profile's: the key is sent to its own service only."""
    profile = read_profile()
    same = profile.url is not None and profile.url.rstrip("/") == url.rstrip("/")
    return profile.key_file if same else None


@contextmanager
def explained(
    command: str, url: str, key: str = "an admin key", *, job: str | None = None
) -> Generator[None]:
    """Print an error as one line with its remedy. `key` is the kind of key that the command needs."""
    try:
        yield
    except (ValueError, Forbidden) as error:
        raise exit_with(command, str(error)) from None
    except NoUsableKey as error:
        raise exit_with(
            command, f"{error}. Name a file with {key}: --key-file or {FILE_VARIABLE}"
        ) from None
    except Unauthenticated as error:
        detail = error.problem.get("detail", error)
        raise exit_with(
            command, f"{detail}. Name a file with {key}: --key-file or {FILE_VARIABLE}"
        ) from None
    except UnknownJob as error:
        raise exit_with(
            command, f"{error.problem.get('detail', error)} at {url}: see `tidegauge show`"
        ) from None
    except (UnknownStage, UnknownRange) as error:
        listing = "show" if isinstance(error, UnknownStage) else "ranges"
        detail = error.problem.get("detail", error)
        raise exit_with(command, f"{detail}: see `tidegauge {listing} {job or 'JOB'}`") from None
    except Refused as error:
        raise exit_with(command, str(error.problem.get("detail", error))) from None
    except WrongAddress as error:
        raise exit_with(command, str(error)) from None
    except NotServing as error:
        raise exit_with(command, f"{str(error).rstrip('.')}. Retry", EXIT_UNAVAILABLE) from None
    except AggregatorError as error:
        raise exit_with(
            command,
            f"{error}: is tidegauge at {url}? Choose another with --url",
            EXIT_UNAVAILABLE,
        ) from None


def exit_with(command: str, message: str, code: int = EXIT_WRONG) -> typer.Exit:
    """Print the reason of a failure; return the exit to raise, by default that of a wrong request."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"tidegauge {command}: {message}", markup=False, highlight=False)
    return typer.Exit(code)


def output() -> Console:
    """Return the console for results. Lines are cut to the width of a terminal, but not in a pipe."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def plain(cell: object) -> Text:
    """Return a foreign name as text that neither is markup nor controls a terminal."""
    return Text("".join(each if each.isprintable() else "\ufffd" for each in str(cell)))


def print_table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Print a table."""
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(plain(cell) for cell in row))
    output().print(table)

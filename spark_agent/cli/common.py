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
    UnknownStage,
)
from spark_agent.client.watermark_wait import WaitOutcome
from spark_agent.exceptions import (
    AggregatorError,
    NotServing,
    WrongAddress,
)

EXIT_NOT_IN_TIME: Final = 3
EXIT_CANNOT_BE_ASKED: Final = 4
EXIT_WRONG: Final = 5
EXIT_NOT_INSTALLED: Final = 6
"""A package is missing that the command needs."""
# 1 is left to the interpreter and to a refused confirmation, 2 to a typing error.

EXIT_CODES: Final = {
    WaitOutcome.REACHED: 0,
    WaitOutcome.NOT_IN_TIME: EXIT_NOT_IN_TIME,
    WaitOutcome.CANNOT_BE_ASKED: EXIT_CANNOT_BE_ASKED,
    WaitOutcome.WRONG: EXIT_WRONG,
}

_PIPE_WIDTH: Final = 2_000
_ADMIN_KEY_VARIABLE: Final = "TIDEGAUGE_ADMIN_KEY"
_ADMIN_FILE_VARIABLE: Final = "TIDEGAUGE_ADMIN_KEY_FILE"

DEFAULT_URL: Final = "http://127.0.0.1:8000"
READER: Final = "a key that may read"


def _url(context: typer.Context, value: str) -> str:
    """Return the URL: as it is given, else that of the profile."""
    source = context.get_parameter_source("url")
    if source is not None and source.name != "DEFAULT":
        return value
    try:
        return read_profile().url or value
    except ValueError as error:
        raise exit_with(context.info_name or "", str(error)) from None


def complete_job(context: typer.Context, incomplete: str) -> list[str]:
    """Return the jobs that begin like this. A shell waits for it, so it is quick or returns nothing."""
    return [each for each in _known(context, None) if each.startswith(incomplete)]


def complete_stage(context: typer.Context, incomplete: str) -> list[str]:
    """Return the stages of the job before it that begin like this."""
    job = context.params.get("job")
    return [each for each in _known(context, job) if job and each.startswith(incomplete)]


def _known(context: typer.Context, job: str | None) -> Sequence[str]:
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
        envvar="TIDEGAUGE_URL", callback=_url, help="Where tidegauge is; else as the profile says."
    ),
]
Job = Annotated[str, typer.Argument(help="The job.", autocompletion=complete_job)]
Stage = Annotated[str, typer.Argument(help="The stage.", autocompletion=complete_stage)]
# There is no option for the key itself: everybody on the machine could see it in the list of processes.
KeyFile = Annotated[
    str | None,
    typer.Option(
        help=f"A file with the key; else {FILE_VARIABLE}, {KEY_VARIABLE},"
        f" {_ADMIN_FILE_VARIABLE}, {_ADMIN_KEY_VARIABLE}, or as the profile says.",
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
    """Return the profile's key for its own service: no other one is shown it."""
    profile = read_profile()
    same = profile.url is not None and profile.url.rstrip("/") == url.rstrip("/")
    return profile.key_file if same else None


@contextmanager
def explained(command: str, url: str, key: str = "an admin key") -> Generator[None]:
    """Print what goes wrong in a line that says what to do. `key` is what the command needs."""
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
    except UnknownStage as error:
        raise exit_with(
            command, f"{error.problem.get('detail', error)}: see `tidegauge show JOB`"
        ) from None
    except Refused as error:
        raise exit_with(command, str(error.problem.get("detail", error))) from None
    except WrongAddress as error:
        raise exit_with(command, str(error)) from None
    except NotServing as error:
        raise exit_with(command, f"{str(error).rstrip('.')}. Retry", EXIT_CANNOT_BE_ASKED) from None
    except AggregatorError as error:
        raise exit_with(
            command,
            f"{error}: is tidegauge at {url}? Choose another with --url",
            EXIT_CANNOT_BE_ASKED,
        ) from None


def exit_with(command: str, message: str, code: int = EXIT_WRONG) -> typer.Exit:
    """Print why a command cannot run; return the exit to raise, by default that of a wrong request."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"tidegauge {command}: {message}", markup=False, highlight=False)
    return typer.Exit(code)


def output() -> Console:
    """Return where results are printed. Lines are cut to the width of a terminal; a pipe has none."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def plain(cell: object) -> Text:
    """Return what somebody else has named as text that neither is markup nor controls a terminal."""
    return Text("".join(each if each.isprintable() else "\ufffd" for each in str(cell)))


def print_table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Print a table."""
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(plain(cell) for cell in row))
    output().print(table)

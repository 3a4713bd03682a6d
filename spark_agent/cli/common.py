"""Options, output and errors that all commands share. Does not import Spark."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console

from spark_agent.cli.profile import PROFILE_VARIABLE, Profile, read_profile
from spark_agent.cli.tables import Column, left_out, table_lines
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

_PIPE_WIDTH: Final = 1_000_000
_ADMIN_KEY_VARIABLE: Final = "TIDEGAUGE_ADMIN_KEY"
_ADMIN_FILE_VARIABLE: Final = "TIDEGAUGE_ADMIN_KEY_FILE"

URL_VARIABLE: Final = "TIDEGAUGE_URL"
DEFAULT_URL: Final = "http://127.0.0.1:8000"
READER: Final = "a key that may read"


def _url(context: typer.Context, value: str) -> str:
    """Return the URL of the command line, else that of the environment, else the profile's.

    A profile in the command line comes before the environment.
    """
    source = context.get_parameter_source("url")
    if source is not None and source.name == "COMMANDLINE":
        return value
    if before := _before(context, "_url"):
        return before
    profile = _profile_name(context)
    if profile is None and source is not None and source.name != "DEFAULT":
        return value
    return _read_profile(context, profile).url or value


def _key_file(context: typer.Context, value: str | None) -> str | None:
    """Return the key file of the option, else that of a profile in the command line."""
    profile = _profile_name(context)
    if value is not None or profile is None:
        return value
    return _key_file_of(context.params["url"], _read_profile(context, profile))


def _before(context: typer.Context, name: str) -> str | None:
    """Return an option that stands before the command, as `--url` may."""
    found = None
    parent = context.parent
    while found is None and parent is not None:
        found, parent = parent.params.get(name), parent.parent
    return found


def _profile_name(context: typer.Context) -> str | None:
    return context.params.get("_profile") or _before(context, "_profile")


def _read_profile(context: typer.Context, name: str | None) -> Profile:
    try:
        return read_profile(name=name)
    except ValueError as error:
        raise exit_with(_command_of(context), str(error)) from None


def _command_of(context: typer.Context) -> str:
    """Return the words of a command, such as `keys list`, without the program's name."""
    names = [context.info_name or ""]
    above = context.parent
    while above is not None and above.parent is not None:
        names.insert(0, above.info_name or "")
        above = above.parent
    return " ".join(names)


def complete_job(context: typer.Context, incomplete: str) -> list[str]:
    """Return the jobs that begin like this. The shell waits, so after a second the list is empty."""
    return [each for each in _names(context, None) if each.startswith(incomplete)]


def complete_stage(context: typer.Context, incomplete: str) -> list[str]:
    """Return the stages of the job on the command line that begin like this."""
    job = context.params.get("job")
    return [each for each in _names(context, job) if job and each.startswith(incomplete)]


def _names(context: typer.Context, job: str | None) -> Sequence[str]:
    try:
        profile = read_profile(name=_profile_name(context))
        url = context.params.get("url") or _before(context, "_url")
        url = url or os.environ.get(URL_VARIABLE) or profile.url or DEFAULT_URL
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
        envvar=URL_VARIABLE,
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
        callback=_key_file,
        help=f"A file with the key; else {FILE_VARIABLE}, {KEY_VARIABLE},"
        f" {_ADMIN_FILE_VARIABLE}, {_ADMIN_KEY_VARIABLE}, or the profile's.",
        show_default=False,
    ),
]
ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile",
        is_eager=True,
        help=f"The profile with the URL and the key, before the environment; else {PROFILE_VARIABLE}.",
        show_default=False,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", is_eager=True, help="Print JSON: a short form of -o json.")
]
Format = Literal["table", "wide", "json", "yaml"]
"""`wide` is a table with all columns, also in a narrow terminal."""


def _form(context: typer.Context, value: Format) -> Format:
    if not context.params.get("_json"):
        return value
    source = context.get_parameter_source("form")
    if value != "json" and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("--json is a short form of -o json: leave one of the two out")
    return "json"


Form = Annotated[
    Format,
    typer.Option(
        "--output",
        "-o",
        callback=_form,
        help="The form of the output. wide: a table with all columns.",
    ),
]
DataForm = Annotated[
    Literal["yaml", "json"],
    typer.Option("--output", "-o", callback=_form, help="The form of the output."),
]


def client_of(url: str, key_file: str | None, *, timeout_ms: int = 2_000) -> Client:
    """Make a client with the caller's key, or with the operator's where the service is configured."""
    make = partial(Client, timeout_ms=timeout_ms, patience_ms=timeout_ms)
    agents = os.environ.get(KEY_VARIABLE) or os.environ.get(FILE_VARIABLE)
    if key_file is None and not agents:
        key_file = os.environ.get(_ADMIN_FILE_VARIABLE)
        key = None if key_file else os.environ.get(_ADMIN_KEY_VARIABLE)
        if not key and not key_file:
            key_file = _key_file_of(url, read_profile())
        return make(url, key=key or None, key_file=key_file or None)
    return make(url, key_file=key_file)


def _key_file_of(url: str, profile: Profile) -> str | None:
    """Return the profile's key, if the URL is the profile's: the key is sent to its own service only."""
    same = profile.url is not None and profile.url.rstrip("/") == url.rstrip("/")
    return profile.key_file if same else None


@contextmanager
def explained(
    command: str,
    url: str,
    key: str = "an admin key",
    *,
    job: str | None = None,
    stage: str | None = None,
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
        of = job or "JOB"
        is_stage = isinstance(error, UnknownStage)
        listing = f"show {of}" if is_stage else f"ranges {of} {stage or 'STAGE'}"
        detail = error.problem.get("detail", error)
        raise exit_with(command, f"{detail}: see `tidegauge {listing}`") from None
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
    """Return the console for results. Lines are wrapped in a terminal, but not in a pipe or a file."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def print_data(form: Format, data: object) -> bool:
    """Print JSON or YAML and return True, if this is the form of the output."""
    if form == "json":
        typer.echo(json.dumps(data))
    elif form == "yaml":
        typer.echo(yaml_text(data), nl=False)
    return form in {"json", "yaml"}


def yaml_text(data: object) -> str:
    """Write YAML, in the order of the members."""
    # Slow to import, and few commands need it.
    from ruamel.yaml import YAML  # noqa: PLC0415

    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = _PIPE_WIDTH
    yaml.sort_base_mapping_type_on_output = False
    text = io.StringIO()
    # Plain dictionaries, each of its own: YAML has names for objects that occur twice.
    yaml.dump(json.loads(json.dumps(data)), text)
    return text.getvalue()


def table_width() -> int | None:
    """Return the width of the terminal that shows the results; None: a pipe or a file takes them."""
    return output().width if sys.stdout.isatty() else None


def print_table(
    columns: Sequence[Column], rows: Iterable[Sequence[object]], *, wide: bool = False
) -> None:
    """Print a table that fits the terminal, and the headings of the columns that do not fit.

    `wide`, and in a pipe or a file: the whole table.
    """
    width, kept = None if wide else table_width(), list(rows)
    for line in table_lines(columns, kept, width):
        output().print(line, soft_wrap=True)
    if not kept and width is not None:
        output().print("none", style="dim")
    hidden = left_out(columns, kept, width) if kept else ()
    if hidden:
        output().print(f"-o wide also shows: {', '.join(hidden)}", style="dim", markup=False)

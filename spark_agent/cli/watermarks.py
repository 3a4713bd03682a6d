"""Commands that show a job's watermarks: the present, the past, the reasons and an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer

from spark_agent.cli.common import (
    DEFAULT_URL,
    EXIT_NO_ESTIMATE,
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
    complete_job,
    complete_stage,
    explained,
    output,
    print_data,
    print_table,
)
from spark_agent.cli.explanation import explanation_tree
from spark_agent.cli.health import problem_lines, problems_of, throttled_shards
from spark_agent.cli.stage_tables import input_text, print_held_by, print_stages, stages_data
from spark_agent.cli.tables import Column, plain
from spark_agent.client.client import Client
from spark_agent.client.responses import (
    AdviceAnswer,
    HeldByAnswer,
    JobsAnswer,
    PastWatermark,
    ProblemLine,
)
from spark_agent.client.watermark_wait import eta_text
from spark_agent.times import (
    INSTANT_FORMS,
    MAX_MS,
    duration_text,
    instant_text,
    read_instant_ms,
)

_RANGES: Final = 10
_JOBS: Final = (
    Column("job", kind="name"),
    Column("generation", right=True),
    Column("stages", kind="sentence", least=30),
)
_HISTORY: Final = (
    Column("at"),
    Column("input watermark", 1, usual="none"),
    Column("output watermark"),
    Column("advance", 2, right=True),
    Column("status"),
)
_GROUPS: Final = (
    Column("group", kind="text"),
    Column("limit"),
    Column("held by", kind="name"),
)
_SHARDS: Final = (
    Column("stage", kind="name"),
    Column("shard", kind="name"),
    Column("throttle"),
    Column("beyond", 1),
)


def show(
    job: Annotated[
        str | None, typer.Argument(help="The job; all if left out.", autocompletion=complete_job)
    ] = None,
    stage: Annotated[
        str | None,
        typer.Argument(help="The stage; all if left out.", autocompletion=complete_stage),
    ] = None,
    *,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Show the jobs; or the watermarks of a job; or a stage with its slowest ranges.

    Examples: `tidegauge show`, `tidegauge show scores`, `tidegauge show scores average --json`
    """
    with explained("show", url, READER, job=job):
        client = client_of(url, key_file)
        if job is None:
            _show_jobs(client.jobs(), form)
        elif stage is None:
            _show_stages(client, job, form)
        else:
            _show_stage(client, job, stage, form)


def _show_jobs(found: JobsAnswer, form: Format) -> None:
    if print_data(form, found):
        return
    rows = [(each["job"], each["generation"], ", ".join(each["stages"])) for each in found["jobs"]]
    print_table(_JOBS, rows, wide=form == "wide")


def _show_stages(client: Client, job: str, form: Format) -> None:
    found = client.snapshot(job)
    problems = problems_of(client, job)
    throttled = throttled_shards(client, job)
    if print_data(form, stages_data(found, problems, throttled)):
        return
    print_stages(found["watermarks"], throttled, wide=form == "wide")
    _print_problems(problems)


def _print_problems(problems: Sequence[ProblemLine]) -> None:
    if problems:
        typer.echo()
    for line in problem_lines(problems):
        output().print(line)


def _show_stage(client: Client, job: str, stage: str, form: Format) -> None:
    watermark = client.show(job, stage)
    # Nothing holds a final stage, also if late ranges report.
    is_final = watermark["status"] == "final"
    ranges = () if is_final else client.ranges(job, stage, limit=_RANGES)["ranges"]
    problems = [
        each
        for each in problems_of(client, job)
        if stage in {each["stage"], *each["holds_back"], *each.get("holds_back_next", ())}
    ]
    promise = client.job(job)[0]["stages"].get(stage, {}).get("watermark")
    throttled = throttled_shards(client, job)
    shown = {
        "watermark": watermark,
        "held_by": ranges,
        "problems": problems,
        "throttled": len(throttled.get(stage, ())),
    }
    if print_data(form, {**shown, "promise": promise}):
        return
    print_stages({stage: watermark}, throttled, wide=form == "wide")
    if promise is not None:
        typer.echo(f"\npromise of a shard: {promise}")
    _print_problems(problems)
    if ranges:
        typer.echo()
        of_stage = throttled.get(stage, frozenset())
        print_held_by(ranges, watermark.get("health"), of_stage, wide=form == "wide")


def history(
    job: Job,
    stage: Stage,
    *,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="T",
            help=f"The begin, in wall-clock time: {INSTANT_FORMS}, or -2h; an hour before --to if"
            " left out.",
        ),
    ] = None,
    to: Annotated[str | None, typer.Option(metavar="T", help="The end; now if left out.")] = None,
    points: Annotated[int, typer.Option(min=1, max=10_000, help="Number of changes at most.")] = 20,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Show a stage's past watermarks over wall-clock time, since the job was last reset.

    The first line is the state at the beginning, or at the creation of the job; the others are the last
    change of each interval.

    Examples: `tidegauge history scores average`,
    `tidegauge history scores average --from 2026-01-01T00:00Z --points 500 --json`
    """
    with explained("history", url, READER, job=job):
        from_ms = None if from_ is None else read_instant_ms(from_, name="--from")
        until_ms = None if to is None else read_instant_ms(to, name="--to")
        found = client_of(url, key_file).history(
            job, stage, from_ms=from_ms, until_ms=until_ms, points=points
        )
        understood = {
            name: instant_text(given_ms)
            for name, given_ms in (("from", from_ms), ("to", until_ms))
            if given_ms is not None
        }
        if print_data(form, {**found, "understood": understood}):
            return
        if understood:
            typer.echo(", ".join(f"{name} {at}" for name, at in understood.items()), err=True)
        points_before = [None, *found["points"]]
        print_table(
            _HISTORY,
            [
                (
                    instant_text(each["at"]),
                    input_text(each["input_watermark"]),
                    instant_text(each["output_watermark"]),
                    "" if before is None else _advance(before, each),
                    each["status"],
                )
                for before, each in zip(points_before, found["points"], strict=False)
            ],
            wide=form == "wide",
        )
        if len(found["points"]) >= points:
            typer.echo(f"at most {points:,} changes, the last of each interval: --points")


def _advance(before: PastWatermark, after: PastWatermark) -> str:
    """Write the advance of an output watermark. A first watermark has not advanced from anything."""
    old, new = before["output_watermark"], after["output_watermark"]
    if new is None or new in {old, MAX_MS}:
        return ""
    return "at first" if old is None else duration_text(new - old)


def eta(
    job: Job,
    stage: Stage,
    time: Annotated[
        str,
        typer.Argument(metavar="T", help=f"The event time: {INSTANT_FORMS}."),
    ],
    *,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Estimate when a stage's output watermark reaches T, from its history.

    The exit code is 7 if the history permits no estimate.

    Examples: `tidegauge eta scores average 2026-01-01T00:00:00Z`,
    `tidegauge eta scores average 1767225600000 --json`, `tidegauge eta scores average -2h`
    """
    with explained("eta", url, READER, job=job):
        at_ms = read_instant_ms(time, name="T")
        client = client_of(url, key_file)
        found = client.eta(job, stage, f"{at_ms}ms")
        is_impossible = not found["reached"] and found["expected_at"] is None
        if not print_data(form, {**found, "understood": instant_text(at_ms)}):
            output().print(plain(f"{stage} {eta_text(found)}: {found['because']}"))
            if is_impossible:
                output().print(plain(client.explain(job, stage, limit=1)["because"]))
    if is_impossible:
        raise typer.Exit(EXIT_NO_ESTIMATE)


def explain(
    job: Job,
    stage: Stage,
    *,
    limit: Annotated[
        int, typer.Option(min=1, max=1_000, help="Number of ranges at most.")
    ] = _RANGES,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Explain a stage's watermark: the ranges that hold it back, and the stages in between.

    Examples: `tidegauge explain scores average`, `tidegauge explain scores average --limit 3 --json`
    """
    with explained("explain", url, READER, job=job):
        found = client_of(url, key_file).explain(job, stage, limit=limit)
        if not print_data(form, found):
            output().print(explanation_tree(found))


def throttle(
    job: Job,
    *,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Show the throttle advice for a job's sources: shards that should pause or slow down, and why.

    Examples: `tidegauge throttle scores`, `tidegauge throttle scores --json`
    """
    with explained("throttle", url, READER):
        found = client_of(url, key_file).throttle(job)
        advised = [
            (stage, shard, advice)
            for stage, shards in found["shards"].items()
            for shard, advice in shards.items()
        ]
        data = [{"stage": stage, "shard": shard, **advice} for stage, shard, advice in advised]
        if print_data(form, {**found, "shards": data}):
            return
        if found["groups"]:
            print_table(
                _GROUPS,
                [
                    (", ".join(each["stages"]), _limit(each["limit"]), _holder(each["held_by"]))
                    for each in found["groups"]
                ],
                wide=form == "wide",
            )
            typer.echo()
        rows = [
            (stage, shard, _throttle(advice), _beyond(advice["until"]))
            for stage, shard, advice in advised
        ]
        if not rows:
            typer.echo(f"no shard of job {job} is throttled")
            return
        print_table(_SHARDS, rows, wide=form == "wide")
        typer.echo()
        # As lines, which are wrapped and not cut: the reason is the answer.
        for stage, shard, advice in advised:
            output().print(plain(f"{shard} of {stage}: {advice['because']}"))


def _throttle(advice: AdviceAnswer) -> str:
    return "pause" if advice["pause"] else f"read at {100 * advice['rate']:.0f} %"


def _beyond(until_ms: int | None) -> str:
    """Write the furthest event time that a shard may run to; empty: a rate alone does not limit it."""
    return "" if until_ms is None else instant_text(until_ms)


def _limit(at_ms: int | None) -> str:
    return "no limit" if at_ms is None else instant_text(at_ms)


def _holder(held_by: HeldByAnswer | None) -> str:
    return f"{held_by['stage']} {held_by['range']}" if held_by else ""

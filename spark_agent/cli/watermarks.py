"""Commands that show a job's watermarks: the present, the past, the reasons and an estimate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import typer
from rich.text import Text
from rich.tree import Tree

from spark_agent.cli.common import (
    DEFAULT_URL,
    EXIT_NO_ESTIMATE,
    READER,
    AsJson,
    Job,
    KeyFile,
    Stage,
    Url,
    client_of,
    complete_job,
    complete_stage,
    explained,
    output,
    print_table,
)
from spark_agent.cli.health import (
    health_text,
    problem_lines,
    problems_of,
    range_text,
    stage_text,
    style_of,
)
from spark_agent.client.client import Client
from spark_agent.client.responses import (
    ExplainAnswer,
    HeldByAnswer,
    HolderAnswer,
    JobsAnswer,
    ProblemLine,
    WatermarkAnswer,
)
from spark_agent.client.watermark_wait import eta_text
from spark_agent.times import (
    INSTANT_FORMS,
    instant_text,
    read_instant_ms,
)

_RANGES: Final = 10
_WAITS_FOR: Final = {"input": "waits for its input", "ranges": "waits for its ranges"}


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
    json_: AsJson = False,
) -> None:
    """Show the jobs; or the watermarks of a job; or a stage with the ranges that hold it back most.

    Examples: `tidegauge show`, `tidegauge show scores`, `tidegauge show scores average --json`
    """
    with explained("show", url, READER, job=job):
        client = client_of(url, key_file)
        if job is None:
            _show_jobs(client.jobs(), json_=json_)
        elif stage is None:
            _show_stages(client, job, json_=json_)
        else:
            _show_stage(client, job, stage, json_=json_)


def _show_jobs(found: JobsAnswer, *, json_: bool) -> None:
    if json_:
        typer.echo(json.dumps(found))
        return
    rows = [(each["job"], each["generation"], ", ".join(each["stages"])) for each in found["jobs"]]
    print_table(("job", "generation", "stages"), rows)


def _show_stages(client: Client, job: str, *, json_: bool) -> None:
    found = client.snapshot(job)
    problems = problems_of(client, job)
    if json_:
        typer.echo(json.dumps({**found, "problems": problems}))
        return
    _print_stages(found["watermarks"])
    _print_problems(problems)


def _print_problems(problems: Sequence[ProblemLine]) -> None:
    if problems:
        typer.echo()
    for line in problem_lines(problems):
        output().print(line)


def _show_stage(client: Client, job: str, stage: str, *, json_: bool) -> None:
    watermark = client.show(job, stage)
    ranges = client.ranges(job, stage, limit=_RANGES)["ranges"]
    problems = [each for each in problems_of(client, job) if each["stage"] == stage]
    promise = client.job(job)[0]["stages"].get(stage, {}).get("watermark")
    if json_:
        shown = {"watermark": watermark, "held_by": ranges, "problems": problems}
        typer.echo(json.dumps({**shown, "promise": promise}))
        return
    _print_stages({stage: watermark})
    if promise is not None:
        typer.echo(f"\npromise of a shard: {promise}")
    _print_problems(problems)
    if ranges:
        typer.echo()
        print_table(
            ("held by", "health", "promise", "holds", "holder", "reported at"),
            [
                (
                    each["range"],
                    range_text(each, watermark.get("health")),
                    instant_text(each["promise"]),
                    ", ".join(f"{name} {instant_text(at)}" for name, at in each["holds"].items()),
                    each["holder"] or "none",
                    each["reported_at"] or "never",
                )
                for each in ranges
            ],
        )


def _print_stages(watermarks: Mapping[str, WatermarkAnswer]) -> None:
    print_table(
        ("stage", "health", "input watermark", "output watermark", "reported", "leased", "since"),
        [
            (
                name,
                stage_text(each),
                instant_text(each["input_watermark"]),
                instant_text(each["output_watermark"]),
                f"{each['ranges']['reported']}/{each['ranges']['total']}",
                f"{each['ranges']['leased']}/{each['ranges']['total']}",
                each["updated_at"],
            )
            for name, each in watermarks.items()
        ],
    )


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
    json_: AsJson = False,
) -> None:
    """Show a stage's past watermarks over wall-clock time, since the job was last reset.

    The first line is the state at the beginning; the others are the last change of each interval.

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
        if json_:
            typer.echo(json.dumps({**found, "understood": understood}))
            return
        if understood:
            typer.echo(", ".join(f"{name} {at}" for name, at in understood.items()), err=True)
        print_table(
            ("at", "input watermark", "output watermark", "status"),
            [
                (
                    instant_text(each["at"]),
                    instant_text(each["input_watermark"]),
                    instant_text(each["output_watermark"]),
                    each["status"],
                )
                for each in found["points"]
            ],
        )


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
    json_: AsJson = False,
) -> None:
    """Estimate when a stage's output watermark reaches T, from its history.

    The exit code is 7 if the history permits no estimate.

    Examples: `tidegauge eta scores average 2026-01-01T00:00:00Z`,
    `tidegauge eta scores average 1767225600000 --json`
    """
    with explained("eta", url, READER, job=job):
        at_ms = read_instant_ms(time, name="T")
        found = client_of(url, key_file).eta(job, stage, f"{at_ms}ms")
        understood = {**found, "understood": instant_text(at_ms)}
        typer.echo(
            json.dumps(understood) if json_ else f"{stage} {eta_text(found)}: {found['because']}"
        )
    if not found["reached"] and found["expected_at"] is None:
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
    json_: AsJson = False,
) -> None:
    """Explain a stage's watermark: the ranges that hold it back, and the stages in between.

    Examples: `tidegauge explain scores average`, `tidegauge explain scores average --limit 3 --json`
    """
    with explained("explain", url, READER, job=job):
        found = client_of(url, key_file).explain(job, stage, limit=limit)
        if json_:
            typer.echo(json.dumps(found))
        else:
            output().print(_tree(found))


def _tree(found: ExplainAnswer) -> Tree:
    since = f", since {found['since']}" if found["since"] else ""
    where = instant_text(found["output_watermark"])
    # As plain text throughout: names may contain markup.
    stands = found.get("health", "ok")
    shown = found["status"] if stands == "ok" else health_text(stands)
    root = Tree(Text(f"{found['stage']}: {where} ({shown}{since})", style=style_of(stands) or ""))
    root.add(Text(found["because"]))
    branch = root
    for step in found["path"]:
        branch = branch.add(
            Text(f"{step['stage']} {_WAITS_FOR.get(step['reason'], step['reason'])}")
        )
    for holder in found["holders"]:
        leaf = branch.add(Text(f"{holder['range']}: {_reason(holder)}"))
        for line in _facts(holder):
            leaf.add(Text(line))
    more = found["holders_total"] - len(found["holders"])
    if more > 0:
        branch.add(Text(f"and {more:,} more: --limit"))
    return root


def _reason(holder: HolderAnswer) -> str:
    component = holder.get("component")
    since = f", since {holder['since']}" if holder["since"] else ""
    named = f" by {component!r}" if component else ""
    return f"{holder['reason'].replace('_', ' ')}{named}{since}"


def _facts(holder: HolderAnswer) -> list[str]:
    would_be = holder["would_be"]
    without = "" if would_be is None else f"; without it, {instant_text(would_be)}"
    reported = f", reported at {holder['reported_at']}" if holder["reported_at"] else ""
    left = holder["expires_in_ms"]
    lease = "" if left is None else f" (fence {holder['fence']}, {left / 1_000:.1f} s left)"
    return [
        f"promise {instant_text(holder['promise'])}{without}",
        f"holder {holder['holder'] or 'none'}{lease}{reported}",
    ]


def throttle(
    job: Job, *, url: Url = DEFAULT_URL, key_file: KeyFile = None, json_: AsJson = False
) -> None:
    """Show the throttle advice for a job's sources: shards that should pause or slow down, and why.

    Examples: `tidegauge throttle scores`, `tidegauge throttle scores --json`
    """
    with explained("throttle", url, READER):
        found = client_of(url, key_file).throttle(job)
        if json_:
            typer.echo(json.dumps(found))
            return
        if found["groups"]:
            print_table(
                ("group", "limit", "held by"),
                [
                    (", ".join(each["stages"]), _limit(each["limit"]), _holder(each["held_by"]))
                    for each in found["groups"]
                ],
            )
        rows = [
            (stage, shard, "yes" if advice["pause"] else "no", _limit(advice["until"]),
             f"{advice['rate']:g}", advice["because"])
            for stage, shards in found["shards"].items()
            for shard, advice in shards.items()
        ]  # fmt: skip
        if rows:
            print_table(("stage", "shard", "pause", "until", "rate", "because"), rows)
        else:
            typer.echo(f"no shard of job {job} is throttled")


def _limit(at_ms: int | None) -> str:
    return "no limit" if at_ms is None else instant_text(at_ms)


def _holder(held_by: HeldByAnswer | None) -> str:
    return f"{held_by['stage']} {held_by['range']}" if held_by else ""

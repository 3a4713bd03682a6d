"""The command that retires a range. Does not import Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from spark_agent.cli.common import (
    DEFAULT_URL,
    AsJson,
    Form,
    Job,
    KeyFile,
    ProfileName,
    Stage,
    Url,
    client_of,
    explained,
    print_data,
)
from spark_agent.client.responses import MoveAnswer, RetireAnswer
from spark_agent.times import MAX_MS, instant_text


def retire(
    job: Job,
    stage: Stage,
    range_name: Annotated[
        str, typer.Argument(metavar="RANGE", help="The shard, or the key range by its bounds.")
    ],
    *,
    because: Annotated[str, typer.Option(help="The reason, for the audit and explanations.")],
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the watermarks that would move, and change nothing."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Skip the confirmation.")] = False,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Retire a shard or key range that is gone for good: its stage does not wait for it any longer.

    The range counts as final until its next report, and then holds the stage from where it is. First the
    command shows which watermarks move at once, and how far. Rows that the range may still have behind
    the new watermark are late.

    Examples: `tidegauge retire water taps taps-3 --because "the site is closed" --dry-run`,
    `tidegauge retire water taps taps-3 --because "the site is closed" --yes`
    """
    with explained("retire", url, job=job, stage=stage):
        client = client_of(url, key_file)
        found = client.retire(job, stage, range_name, because, dry_run=True)
        is_text = form in {"table", "wide"}
        for line in _lines(found) if is_text else ():
            typer.echo(line)
        if not (dry_run or _stays(found)):
            if not yes:
                typer.confirm(f"Retire {range_name} of {stage}?", abort=True, err=True)
            found = client.retire(job, stage, range_name, because)
            if is_text:
                typer.echo(f"{range_name} of {stage} is retired until its next report")
        print_data(form, found)


def _stays(found: RetireAnswer) -> bool:
    """Return whether the range is retired or final already."""
    return found["retired"] or found["promise"] == MAX_MS


def _lines(found: RetireAnswer) -> Iterator[str]:
    name = f"{found['range']} of {found['stage']}"
    if _stays(found):
        yield f"{name} is {'retired' if found['retired'] else 'final'} already"
        return
    promise = found["promise"]
    yield f"{name} has {'never promised' if promise is None else f'promised {instant_text(promise)}'}"
    if found["holder"]:
        yield f"{found['holder']} holds a lease on it: its next report ends the retirement"
    if not found["moves"]:
        yield "all watermarks stay where they are: another range, or another input, holds them"
    for move in found["moves"]:
        yield from _move_lines(move)
    if held_by := found.get("held_by"):
        yield f"without {found['range']}, the lowest range of {found['stage']} is {held_by}"


def _move_lines(move: MoveAnswer) -> Iterator[str]:
    before, after = move["before"], move["after"]
    for side, old, new in (
        ("input", before["input_watermark"], after["input_watermark"]),
        ("output", before["output_watermark"], after["output_watermark"]),
    ):
        if old != new:
            yield f"{move['stage']}: {side} {instant_text(old)} -> {instant_text(new)}"
    if before["status"] != after["status"] == "final":
        yield f"{move['stage']} becomes final, which cannot be taken back"
    elif before["status"] != after["status"]:
        yield f"{move['stage']}: {before['status']} -> {after['status']}"

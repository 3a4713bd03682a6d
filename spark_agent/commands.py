"""Commands that the agent adds to `tidegauge`. Does not import Spark."""

from __future__ import annotations

import json
from typing import Annotated, Final

import typer

from spark_agent.admin import DEFAULT_URL, Job, KeyFile, Url, client_of, explained
from spark_agent.client import Client

_MOST_RESETS: Final = 1_000
"""A typing error must not begin millions of generations, which nobody can take back."""


def reset(
    job: Job,
    *,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    generation: Annotated[
        int | None,
        typer.Option(min=2, help="Begin this generation, not the next: that of the checkpoints."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Start a job over: its next generation has no watermarks, and no source is final.

    Stop its queries first, and give every query a new checkpoint and an empty output.

    After the service's ledger was lost, or restored from a backup from before a reset, queries say
    which generation their checkpoints are of. Begin that one with --generation: the queries go on from
    their checkpoints, and the watermarks catch up with them.

    Examples: `tidegauge reset nyc-flights`, `tidegauge reset nyc-flights --yes --json`,
    `tidegauge reset nyc-flights --generation 3`
    """
    if not yes:
        typer.confirm(f"Every watermark of job {job} starts over. Go on?", abort=True)
    with explained("reset", url):
        client = client_of(url, key_file)
        begun = _reset(client, job, generation)
    if json_:
        typer.echo(json.dumps({"job": job, "generation": begun}))
    else:
        typer.echo(f"job {job} starts over, in generation {begun}")


def _reset(client: Client, job: str, generation: int | None) -> int:
    """Begin a generation; None: the next. Return its number. Raises `ValueError`."""
    if generation is None:
        client.reset(job)
        return client.generation(job)
    now = client.generation(job)
    if generation > now + _MOST_RESETS:
        raise ValueError(
            f"job {job} is in generation {now}, and {generation} is more than {_MOST_RESETS:,} resets "
            f"away: which generation do the queries name when they are refused?"
        )
    if generation <= now:
        raise ValueError(
            f"job {job} is in generation {now}, so {generation} has begun before: leave out "
            f"--generation to begin the next one"
        )
    while now < generation:
        client.reset(job)
        now = client.generation(job)
    return now

"""Commands that the agent adds to `tidegauge`. Does not import Spark."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from spark_agent.admin import DEFAULT_URL, Job, KeyFile, Url, client_of, explained


def reset(
    job: Job,
    *,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Start a job over: its next generation has no watermarks, and no source is final.

    Stop its queries first. Spark's checkpoints know nothing of it: give every query a new one, and
    an empty output.

    Examples: `tidegauge reset nyc-flights`, `tidegauge reset nyc-flights --yes --json`
    """
    if not yes:
        typer.confirm(f"Every watermark of job {job} starts over. Go on?", abort=True)
    with explained("reset", url):
        client = client_of(url, key_file)
        client.reset(job)
        generation = client.generation(job)
    if json_:
        typer.echo(json.dumps({"job": job, "generation": generation}))
    else:
        typer.echo(f"job {job} starts over, in generation {generation}")

"""The command that shows who executes a job's stages, since when, and how the last runs ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import typer

from spark_agent.cli.common import (
    DEFAULT_URL,
    READER,
    AsJson,
    Form,
    Job,
    KeyFile,
    ProfileName,
    Url,
    client_of,
    complete_stage,
    explained,
    print_data,
    print_table,
)
from spark_agent.cli.tables import Column
from spark_agent.client.client import Client
from spark_agent.client.responses import RunLine

_RUNS: Final = (
    Column("run", right=True),
    Column("outcome"),
    Column("started at"),
    Column("ended at", 1),
    Column("last epoch", 2, right=True),
    Column("holder", 3, kind="sentence", least=30),
    Column("stages", 4, kind="sentence", least=30),
    Column("program", 6, kind="sentence", least=30),
    Column("reason", 5, kind="sentence", least=30),
    Column("links", 7, kind="sentence", least=50),
)


def runs(
    job: Job,
    stage: Annotated[
        str | None,
        typer.Argument(help="The stage; all if left out.", autocompletion=complete_stage),
    ] = None,
    *,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Number of runs at most.")] = 10,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Show who executes a job's stages, since when, and how the last runs ended; the newest first.

    Examples: `tidegauge runs scores`, `tidegauge runs scores average --limit 3 --json`
    """
    with explained("runs", url, READER, job=job):
        client = client_of(url, key_file)
        found = client.runs(job, stage=stage, limit=limit)
        if stage is not None and not found["runs"]:
            # Rejects an unknown stage. A removed one may have runs.
            client.commits(job, stage)
        if print_data(form, found):
            return
        current = _current(client, job, found["runs"], stage)
    if not found["runs"]:
        typer.echo(f"{f'stage {stage} of ' if stage else ''}job {job} does not have a run")
        return
    print_table(_RUNS, [_row(each, current, stage) for each in found["runs"]], wide=form == "wide")


def _current(
    client: Client, job: str, found: Sequence[RunLine], stage: str | None
) -> Mapping[str, int | None]:
    """Return the run that each stage belongs to, of the runs that have not ended; or of one stage."""
    stages = {name for each in found if each["outcome"] is None for name in each["stages"]}
    wanted = stages if stage is None else stages & {stage}
    present = wanted.intersection(client.job(job)[0]["stages"]) if wanted else ()
    return {name: client.commits(job, name)["run"] for name in sorted(present)}


def _row(of: RunLine, current: Mapping[str, int | None], stage: str | None) -> Sequence[str]:
    held = [name for name in of["stages"] if current.get(name) == of["run"]]
    left = [name for name in of["stages"] if name not in held] if held and stage is None else []
    fenced = f" (without {', '.join(left)})" if left else ""
    goes_on = f"goes on{fenced}" if held else "fenced"
    return (
        str(of["run"]),
        of["outcome"] or goes_on,
        of["started_at"] or "",
        of["ended_at"] or "",
        "" if of["epoch"] is None else str(of["epoch"]),
        of["holder"],
        ", ".join(of["stages"]),
        of["program"] or "",
        of["because"] or "",
        ", ".join(f"{name} {address}" for name, address in of["links"].items()),
    )

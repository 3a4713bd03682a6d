"""Commands that declare, change, reset and delete jobs. Does not import Spark."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from spark_agent.cli.common import (
    DEFAULT_URL,
    READER,
    AsJson,
    DataForm,
    Form,
    Job,
    KeyFile,
    ProfileName,
    Url,
    client_of,
    explained,
    output,
    print_data,
)
from spark_agent.cli.differences import differences
from spark_agent.cli.effects import effects, few, removals
from spark_agent.client.client import Client
from spark_agent.client.credentials import read_text
from spark_agent.client.errors import ChangedMeanwhile, UnknownJob
from spark_agent.client.responses import JobAnswer

_PARTS: Final = ("stages", "throttle")
"""Members of a specification."""
_SHOWN_BESIDE: Final = ("generation", "layout_version", "health")
"""Members that the service shows beside a job's specification, and does not take."""


def apply(
    file: Annotated[
        str, typer.Argument(help="The specification, in YAML or JSON; -: standard input.")
    ],
    *,
    job: Annotated[
        str | None, typer.Option(help="The job, unless the file names it.", show_default=False)
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show what would change, and change nothing."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Skip the confirmation, also if stages are removed.")
    ] = False,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Declare a job, or change its specification to a file's, and show the changes.

    The file has `job`, `stages` and optionally `throttle`, in the service's format. It may also have
    `generation`, `layout_version` and `health`, as `GET /v1/jobs/JOB` shows them: they are ignored. If
    the job is changed by another request at the same time, the command changes nothing.

    Examples: `tidegauge apply scores.yaml --dry-run`, `tidegauge apply scores.yaml --yes`,
    `tidegauge export scores | tidegauge --profile production apply -`
    """
    with explained("apply", url):
        name, wanted = _read(file, job)
        client = client_of(url, key_file)
        before, etag = _stored(client, name)
        changes = list(differences(before, wanted))
        if changes:
            # Before a change is shown that the service rejects.
            client.check(name, wanted)
        caused = list(
            effects(
                before,
                wanted,
                lambda stage: _retired(client, name, stage),
                lambda stage: client.watermark(name, stage).final,
            )
        )
        if form in {"table", "wide"}:
            for line in changes or ["nothing changes"]:
                output().print(line, style=_STYLES.get(line[0]), markup=False)
            for line in caused:
                output().print(line, markup=False)
        if changes and not dry_run:
            removed = list(removals(before, wanted))
            if removed and not yes:
                them = "them" if len(removed) > 1 else "it"
                typer.confirm(
                    f"{few(removed)} of job {name} will be removed: the watermark no longer waits for"
                    f" {them}. Continue?",
                    abort=True,
                    err=True,
                )
            _apply(client, name, wanted, etag)
        done = bool(changes) and not dry_run
        outcome = {"job": name, "changes": changes, "effects": caused, "applied": done}
        created = {"created": True} if done and not before else {}
        if not print_data(form, outcome | created) and changes:
            typer.echo(f"job {name} is {_end(before, wanted, dry_run=dry_run)}")


def export(
    job: Job,
    *,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: DataForm = "yaml",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Print a job's specification, as `apply` takes it.

    Examples: `tidegauge export scores > scores.yaml`, `tidegauge export scores -o json`
    """
    with explained("export", url, READER):
        found, _ = client_of(url, key_file).job(job)
    print_data(form, {"job": job, **_specification(found)})


_STYLES = {"+": "green", "-": "red", "~": "yellow"}


def _end(before: Mapping[str, Any], wanted: Mapping[str, Any], *, dry_run: bool) -> str:
    """Write the end of a command, after the name of the job.

    >>> _end({}, {"stages": {"s": {}, "k": {}}}, dry_run=False)
    'created, with stages s, k'
    """
    if dry_run:
        return f"not {'changed' if before else 'created'}: --dry-run"
    return "as in the file" if before else f"created, with stages {few([*wanted['stages']])}"


def _apply(client: Client, job: str, wanted: Mapping[str, Any], etag: str | None) -> None:
    try:
        client.apply(job, wanted, etag=etag)
    except ChangedMeanwhile:
        raise ValueError(f"job {job} was changed at the same time: run the command again") from None


def _stored(client: Client, job: str) -> tuple[Mapping[str, Any], str | None]:
    try:
        found, etag = client.job(job)
    except UnknownJob:
        return {}, None
    return _specification(found), etag


def _specification(found: JobAnswer) -> Mapping[str, Any]:
    return {part: found.get(part) for part in _PARTS if found.get(part) is not None}


def _read(file: str, job: str | None) -> tuple[str, Mapping[str, Any]]:
    """Return the job's name, and its specification. Raises `ValueError`."""
    # Slow to import, and only this command needs it.
    from ruamel.yaml import YAML  # noqa: PLC0415
    from ruamel.yaml.error import YAMLError  # noqa: PLC0415

    try:
        text = sys.stdin.read() if file == "-" else read_text(Path(file))
        yaml: Any = YAML(typ="safe", pure=True)
        # JSON is YAML, too.
        content: Any = yaml.load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file {file} cannot be read: {error}") from None
    except YAMLError as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"the file {file} is neither YAML nor JSON: {problem}") from None
    spec = cast("dict[str, Any]", content if isinstance(content, dict) else {})
    try:
        json.dumps(spec)
    except TypeError as error:
        raise ValueError(
            f"the file {file} has a value that JSON does not have ({error}): write it in quotes"
        ) from None
    except ValueError:
        raise ValueError(
            f"in the file {file}, an alias (*name) is inside its own anchor (&name)"
        ) from None
    if not spec.get("stages") or not isinstance(spec["stages"], dict):
        raise ValueError(f"the file {file} has no stages: write 'stages:' and the stages below it")
    # Editors find their schema by the first, which is not a part of the specification.
    for member in ("$schema", *_SHOWN_BESIDE):
        spec.pop(member, None)
    named = spec.pop("job", None)
    if named is not None and job is not None and named != job:
        raise ValueError(f"--job is {job!r}, and the file {file} is for job {named!r}")
    if named is None and job is None:
        raise ValueError(f"the file {file} has no job: write 'job: NAME', or pass --job NAME")
    return str(named or job), spec


def _retired(client: Client, job: str, stage: str) -> Collection[str]:
    """Return the retired shards of a source."""
    retired = client.explain(job, stage, limit=1).get("retired", ())
    return {each["range"] for each in retired if each["stage"] == stage}


def delete(
    job: Job,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Skip the confirmation.")] = False,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Delete a job, with all its watermarks and their history.

    Examples: `tidegauge delete scores`, `tidegauge delete scores --yes --json`
    """
    if not yes:
        typer.confirm(f"Every watermark of job {job} is lost. Continue?", abort=True)
    with explained("delete", url):
        client_of(url, key_file).delete(job)
    if not print_data(form, {"job": job, "deleted": True}):
        typer.echo(f"job {job} is deleted")


_MOST_RESETS: Final = 1_000
"""Limit of resets by one command. Generations cannot be taken back, and a typing error must not begin
millions."""


def reset(
    job: Job,
    *,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    generation: Annotated[
        int | None,
        typer.Option(
            min=2, help="The generation to begin, that of the checkpoints; by default the next one."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Skip the confirmation.")] = False,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Start a job over. In the next generation all watermarks start over, also of final sources.

    Stop its queries first, and give every query a new checkpoint and an empty output.

    After the loss of the service's ledger, or a restore from a backup from before a reset, the errors
    of queries name the generation of their checkpoints. Begin that generation with --generation: the
    queries continue from their checkpoints, and the watermarks catch up with them.

    Examples: `tidegauge reset nyc-flights`, `tidegauge reset nyc-flights --yes --json`,
    `tidegauge reset nyc-flights --generation 3`
    """
    if not yes:
        typer.confirm(
            f"Stop the queries of job {job} first. Every watermark starts over, and each query needs a"
            " new checkpoint and an empty output. Continue?",
            abort=True,
        )
    with explained("reset", url):
        client = client_of(url, key_file)
        begun = _reset(client, job, generation)
    if not print_data(form, {"job": job, "generation": begun}):
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
            f"away: pass the generation that the errors of the queries name"
        )
    if generation <= now:
        raise ValueError(
            f"job {job} is in generation {now}, so {generation} cannot begin again: leave out "
            f"--generation to begin the next one"
        )
    while now < generation:
        client.reset(job)
        now = client.generation(job)
    return now

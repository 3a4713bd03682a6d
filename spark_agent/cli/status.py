"""The command that checks health, for monitoring and scripts. Does not import Spark."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.text import Text

from spark_agent.cli.common import (
    DEFAULT_URL,
    READER,
    AsJson,
    Form,
    KeyFile,
    ProfileName,
    Url,
    client_of,
    complete_job,
    explained,
    output,
    print_data,
)
from spark_agent.cli.health import health_text, late_text, problem_lines, style_of
from spark_agent.client.responses import JobProblemsAnswer, ProblemsAnswer

# The exit codes of plugins for Nagios, and for what has taken its place.
_EXIT_CODES: Final = {"warning": 1, "critical": 2}
_EXIT_UNKNOWN: Final = 3


def status(
    job: Annotated[
        str | None, typer.Argument(help="The job; all if left out.", autocompletion=complete_job)
    ] = None,
    *,
    limit: Annotated[
        int, typer.Option(min=1, max=10_000, help="Number of problems at most.")
    ] = 100,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Check the health of a job, or of all jobs: a line for each problem, the worst first.

    The exit code is 0 without problems, 1 for warnings, 2 if a problem is critical, 3 if the health is
    unknown.

    Examples: `tidegauge status`, `tidegauge status scores`, `tidegauge status scores --json`
    """
    try:
        with explained("status", url, READER):
            client = client_of(url, key_file)
            found = client.problems(limit=limit) if job is None else client.job_problems(job)
    except typer.Exit:
        raise typer.Exit(_EXIT_UNKNOWN) from None
    if not print_data(form, found):
        _print(found, limit)
    raise typer.Exit(max((_EXIT_CODES[each["severity"]] for each in found["problems"]), default=0))


def _print(found: JobProblemsAnswer | ProblemsAnswer, limit: int) -> None:
    problems = found["problems"][:limit]
    if "job" in found:
        total = len(found["problems"])
        health = found["health"]
        # As other commands write the status of a sound job.
        condition = "active" if health == "ok" else health_text(health)
        if late := found.get("late_ranges"):
            condition += f", {late_text(late)}"
        output().print(Text(f"{found['job']}: {condition}", style_of(health) or ""))
        lines = problem_lines(problems)
    else:
        total = found["total"]
        if not total:
            typer.echo("not a problem")
        lines = [
            Text(f"{each['job']}: ").append(line)
            for each, line in zip(problems, problem_lines(problems), strict=True)
        ]
        late_of = found.get("late_ranges", {})
        lines += [Text(f"{job}: {late_text(late)}") for job, late in late_of.items()]
    for line in lines:
        output().print(line)
    if len(problems) < total:
        typer.echo(f"{total - len(problems)} more: --limit {total}")

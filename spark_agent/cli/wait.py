"""The command `tidegauge wait`, for scripts that must not begin before everything has arrived."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.status import Status

from spark_agent.cli.common import (
    DEFAULT_URL,
    EXIT_CODES,
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
    print_data,
)
from spark_agent.client.client import Client
from spark_agent.client.watermark_wait import Show, WaitOutcome, WaitResult, WatermarkWait
from spark_agent.clock import SystemClock
from spark_agent.exceptions import AggregatorError
from spark_agent.times import (
    INSTANT_FORMS,
    duration_ms,
    instant_text,
    read_instant_ms,
)

_POLL_S: Final = 10
_SHOWN_POLL_S: Final = 2
"""The same for a terminal, which shows the progress."""


def wait(
    job: Job,
    stage: Stage,
    *,
    until: Annotated[
        str,
        typer.Option(metavar="T", help=f"The event time: {INSTANT_FORMS}."),
    ],
    timeout: Annotated[str, typer.Option(help="The longest wait.")] = "1h",
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    form: Form = "table",
    _json: AsJson = False,
    _profile: ProfileName = None,
) -> None:
    """Wait until a stage's output watermark has reached T: everything before T has arrived.

    Exit codes: 0: reached. 3: not in time. 4: the service is unavailable; retry. 5: the job, the stage,
    T, the key or the address is wrong; do not retry. 2: a typing error in the options.

    While the service is unavailable, also at the start, requests are retried until the timeout. The
    standard error shows T as understood.

    Examples: `tidegauge wait scores average --until 2026-01-01T00:00:00Z --timeout 1h && ./close-books`,
    `tidegauge wait scores average --until "$(date +%s)s"`,
    `tidegauge wait scores average --until 1767225600000 --json`
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    is_terminal = console.is_terminal
    poll_s = _SHOWN_POLL_S if is_terminal else _POLL_S
    with explained("wait", url, READER, job=job):
        target_ms = read_instant_ms(until, name="--until")
        timeout_ms = duration_ms(timeout, name="--timeout")
        client = client_of(url, key_file)

        def begin() -> None:
            console.print(
                f"tidegauge wait: {stage} is to reach {instant_text(target_ms)}, within {timeout}",
                markup=False,
            )

        waiting = WatermarkWait(client, SystemClock(), job, stage, target_ms, poll_s)
        if is_terminal:
            # This console wraps long lines, unlike the other one.
            with Console(stderr=True, highlight=False).status(f"{stage} …") as status:
                waited = waiting.wait(timeout_ms, _updates(status), estimates=True, begin=begin)
        else:
            waited = waiting.wait(
                timeout_ms, lambda text: console.print(text, markup=False), begin=begin
            )
    cause = _cause(client, job, stage) if waited.outcome is WaitOutcome.NOT_IN_TIME else None
    _end(job, stage, target_ms, timeout, waited, cause, console, form)


def _updates(status: Status) -> Show:
    def show(text: str) -> None:
        status.update(text.replace("[", r"\["))

    return show


def _end(
    job: str,
    stage: str,
    target_ms: int,
    timeout: str,
    waited: WaitResult,
    cause: str | None,
    console: Console,
    form: Format,
) -> None:
    output_ms = waited.seen["output_watermark"]
    outcome = {
        "job": job,
        "stage": stage,
        "until": target_ms,
        "understood": instant_text(target_ms),
        "reached": waited.reached,
        "outcome": str(waited.outcome),
        "output_watermark": output_ms,
        "waited_ms": waited.waited_ms,
        "because": cause,
    }
    if not print_data(form, outcome) and waited.reached:
        typer.echo(f"{stage} is at {instant_text(output_ms)}")
        console.print(
            f"tidegauge wait: {stage} has reached {instant_text(target_ms)}", markup=False
        )
    if waited.outcome is WaitOutcome.NOT_IN_TIME:
        console.print(
            f"tidegauge wait: after {timeout}, {stage} is {_where(output_ms)} and not at"
            f" {instant_text(target_ms)}: see `tidegauge explain {job} {stage}`",
            markup=False,
        )
        if cause is not None:
            console.print(f"tidegauge wait: {cause}", markup=False)
    elif not waited.reached:
        console.print(
            f"tidegauge wait: after {timeout}, the service does not answer; {stage} was"
            f" {_where(output_ms)} and not at {instant_text(target_ms)}: retry",
            markup=False,
        )
    if not waited.reached:
        raise typer.Exit(EXIT_CODES[waited.outcome])


def _cause(client: Client, job: str, stage: str) -> str | None:
    """Return the reason of the stage's watermark; None: the service does not answer any more."""
    with suppress(AggregatorError):
        return client.explain(job, stage, limit=1)["because"]
    return None


def _where(output_ms: int | None) -> str:
    return "without a watermark" if output_ms is None else f"at {instant_text(output_ms)}"

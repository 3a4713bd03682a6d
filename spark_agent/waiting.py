"""The command `tidegauge wait`: for scripts that must not begin before everything has arrived."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.status import Status

from spark_agent.admin import DEFAULT_URL, AsJson, KeyFile, Url, client_of, explained
from spark_agent.client import AggregatorError, Client, Json, Unavailable
from spark_agent.clock import Clock, SystemClock
from spark_agent.durations import duration_ms
from spark_agent.inspection import READER, Job, Stage, eta_text
from spark_agent.times import instant_text, read_instant_ms

_EXIT_NOT_IN_TIME: Final = 3
_POLL_S: Final = 10
_SHOWN_POLL_S: Final = 2
"""The same, where somebody watches."""
_PATIENCE_MS: Final = 5_000
"""How much longer than the service takes to answer: it may be on its way up again."""
_PAUSE_MS: Final = 500

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Waited:
    """What came of it."""

    reached: bool
    seen: Json
    """The stage's watermark when it was last read."""
    waited_ms: int


def wait(
    job: Job,
    stage: Stage,
    *,
    until: Annotated[
        str,
        typer.Option(metavar="T", help="The event time, such as 2026-01-01T00:00:00Z, or in ms."),
    ],
    timeout: Annotated[str, typer.Option(help="How long to wait.")] = "1h",
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    json_: AsJson = False,
) -> None:
    """Wait until a stage's output watermark has reached T: everything before T has arrived.

    Ends with 0 if it has, with 3 if it has not within the timeout, with 2 if it cannot be asked. A
    service that restarts meanwhile is waited for.

    Examples: `tidegauge wait scores average --until 2026-01-01T00:00:00Z --timeout 1h && ./close-books`,
    `tidegauge wait scores average --until 1767225600000 --json`
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    watched = console.is_terminal
    poll_s = _SHOWN_POLL_S if watched else _POLL_S
    with explained("wait", url, READER):
        target_ms = read_instant_ms(until, name="--until")
        timeout_ms = duration_ms(timeout, name="--timeout")
        patience_ms = min(1_000 * poll_s, timeout_ms) + _PATIENCE_MS
        client = client_of(url, key_file, timeout_ms=patience_ms)
        asking = Waiting(client, SystemClock(), job, stage, target_ms, poll_s)
        if watched:
            # Unlike the other console, it wraps what is longer than a line.
            with Console(stderr=True, highlight=False).status(f"{stage} …") as status:
                waited = asking.wait(timeout_ms, _updates(status), estimates=True)
        else:
            waited = asking.wait(timeout_ms, lambda text: console.print(text, markup=False))
    _end(job, stage, target_ms, timeout, waited, console, json_=json_)


class Waiting:
    """Asks for a watermark again and again."""

    def __init__(
        self, client: Client, clock: Clock, job: str, stage: str, target_ms: int, poll_s: int
    ) -> None:
        self._client = client
        self._clock = clock
        self._job = job
        self._stage = stage
        self._target_ms = target_ms
        self._poll_s = poll_s

    def wait(self, timeout_ms: int, show: Show, *, estimates: bool = False) -> Waited:
        """Return once the watermark is there, or after the timeout.

        Raises `AggregatorError` if the service refuses the question, or has never answered it.
        """
        began_ms = self._clock.steady_ms()
        deadline_ms = began_ms + timeout_ms
        seen: Json | None = None
        answers = True
        while True:
            left_ms = max(deadline_ms - self._clock.steady_ms(), 0)
            wait_s = min(self._poll_s, -(-left_ms // 1_000))
            try:
                seen = self._client.show(
                    self._job, self._stage, at_least_ms=self._target_ms, wait_s=wait_s
                )
                answers = True
            except Unavailable as error:
                if seen is None:
                    raise
                if answers:
                    show(f"{error}: waiting for it to come back")
                answers = False
                self._clock.pause(min(_PAUSE_MS, left_ms))
            now_ms = self._clock.steady_ms()
            output_ms = seen["output_watermark"]
            reached = answers and output_ms is not None and output_ms >= self._target_ms
            if reached or now_ms >= deadline_ms:
                return Waited(reached, seen, now_ms - began_ms)
            if answers and estimates:
                show(self._progress(seen))

    def _progress(self, seen: Json) -> str:
        where = f"{self._stage} is at {instant_text(seen['output_watermark'])} ({seen['status']})"
        with suppress(AggregatorError):
            return (
                f"{where} and {eta_text(self._client.eta(self._job, self._stage, self._target_ms))}"
            )
        return where


def _updates(status: Status) -> Show:
    def show(text: str) -> None:
        status.update(text.replace("[", r"\["))

    return show


def _end(
    job: str,
    stage: str,
    target_ms: int,
    timeout: str,
    waited: Waited,
    console: Console,
    *,
    json_: bool,
) -> None:
    output_ms = waited.seen["output_watermark"]
    if json_:
        outcome = {
            "job": job,
            "stage": stage,
            "until": target_ms,
            "reached": waited.reached,
            "output_watermark": output_ms,
            "waited_ms": waited.waited_ms,
        }
        typer.echo(json.dumps(outcome))
    elif waited.reached:
        typer.echo(f"{stage} is at {instant_text(output_ms)}")
    if not waited.reached:
        console.print(
            f"tidegauge wait: after {timeout}, {stage} is at {instant_text(output_ms)} and not at"
            f" {instant_text(target_ms)}: see `tidegauge explain {job} {stage}`",
            markup=False,
        )
        raise typer.Exit(_EXIT_NOT_IN_TIME)

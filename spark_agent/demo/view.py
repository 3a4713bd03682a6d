"""View of the running demonstration: each stage's watermarks, and the reason why each is held back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spark_agent.client.client import Client, StageWatermark
from spark_agent.exceptions import AggregatorError
from spark_agent.times import MAX_MS, duration_text

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class StageLine:
    """One stage at one moment. Watermarks and lag in ms of event time."""

    stage: str
    input_ms: int | None
    output_ms: int | None
    status: str
    lag_ms: int | None
    """Distance of the output watermark behind the newest event that the sources have read."""
    held_by: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All stages at one moment, and the progress of the whole pipeline (0 to 1)."""

    lines: Sequence[StageLine]
    done: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The range of event time (ms) to cover, and the bound (ms) of the sources' strategy."""

    job: str
    stages: Sequence[str]
    sources: Sequence[str]
    start_ms: int
    end_ms: int
    bound_ms: int

    def snapshot(self, client: Client) -> Snapshot | None:
        """Read all watermarks; None: the service does not answer."""
        try:
            watermarks = client.watermarks(self.job)
            held = {
                each: _lowest_range(client, self.job, each, watermarks[each])
                for each in self.stages
            }
        except AggregatorError:
            return None
        newest_ms = self._newest_ms(watermarks)
        lines = [
            StageLine(
                stage,
                watermarks[stage].input_ms,
                watermarks[stage].output_ms,
                watermarks[stage].status,
                _lag_ms(watermarks[stage].output_ms, newest_ms),
                held[stage],
            )
            for stage in self.stages
        ]
        parts = [self._part(line.output_ms) for line in lines]
        return Snapshot(lines, sum(parts) / len(parts))

    def _newest_ms(self, watermarks: Mapping[str, StageWatermark]) -> int | None:
        outputs = [watermarks[source].output_ms for source in self.sources]
        found = [output for output in outputs if output is not None]
        if not found:
            return None
        return min(max(found), self.end_ms - self.bound_ms) + self.bound_ms

    def _part(self, output_ms: int | None) -> float:
        if output_ms is None:
            return 0.0
        part = (output_ms - self.start_ms) / (self.end_ms - self.start_ms)
        # At the end of the last day the pipeline is not done: sessions are still open.
        return 1.0 if output_ms == MAX_MS else min(max(part, 0.0), 0.99)


def _lag_ms(output_ms: int | None, newest_ms: int | None) -> int | None:
    if output_ms is None or newest_ms is None:
        return None
    return max(newest_ms - output_ms, 0)


def _lowest_range(client: Client, job: str, stage: str, watermark: StageWatermark) -> str:
    """Return the range with the lowest promise: the stage waits for it."""
    if watermark.final:
        return ""
    lowest = client.lowest_range(job, stage)
    return str(lowest["range"]) if lowest else ""


class View(Protocol):
    """Display of snapshots."""

    def show(self, snapshot: Snapshot) -> None:
        """Show the latest snapshot."""
        ...

    def __enter__(self) -> View: ...

    def __exit__(self, *_: object) -> None: ...


class LiveView:
    """A table that is updated in place, for terminals."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def show(self, snapshot: Snapshot) -> None:
        """See `View`."""
        self._live.update(Group(_table(snapshot), ProgressBar(total=1.0, completed=snapshot.done)))

    def __enter__(self) -> View:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


class PlainView:
    """A line for every 10 %, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tenth = -1

    def show(self, snapshot: Snapshot) -> None:
        """See `View`."""
        tenth = int(snapshot.done * 10)
        if tenth > self._tenth:
            self._tenth = tenth
            where = ", ".join(f"{line.stage} {instant(line.output_ms)}" for line in snapshot.lines)
            self._console.print(f"{tenth * 10:3d} %  {where}", highlight=False, soft_wrap=True)

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        return


class NoView:
    """Shows nothing."""

    def show(self, snapshot: Snapshot) -> None:
        """See `View`."""

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        return


def _table(snapshot: Snapshot) -> Table:
    table = Table(expand=True)
    for title in ("stage", "input watermark", "output watermark", "status", "lag", "held by"):
        table.add_column(title, no_wrap=True)
    for line in snapshot.lines:
        style = {"final": "green", "unknown": "dim"}.get(line.status, "")
        table.add_row(
            line.stage,
            instant(line.input_ms),
            instant(line.output_ms),
            Text(line.status, style=style),
            duration_text(line.lag_ms) or "-",
            line.held_by,
        )
    return table


def instant(time_ms: int | None) -> str:
    """Write a watermark as text.

    >>> instant(None), instant(1_357_041_600_000), instant(MAX_MS)
    ('-', '2013-01-01 12:00', 'end of time')
    """
    if time_ms is None:
        return "-"
    if time_ms == MAX_MS:
        return "end of time"
    return f"{_EPOCH + timedelta(milliseconds=time_ms):%Y-%m-%d %H:%M}"

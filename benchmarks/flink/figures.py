"""From a report to the end of a chain of stages: this service against Flink, in the same run.

A source emits an event time at each tick, and each stage passes its watermark on through a shuffle.
Flink's watermark is visible where the last stage runs: in the same process, and on no disk. Outside, it
is a metric, which is measured besides. The service's watermark is in the ledger at every stage, and
visible to a reader in another process. Commits of SQLite alone show the part of the ledger.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.figures import FULL, Figure, Plan
from benchmarks.flink.chain import RANGES
from benchmarks.flink.commits import latencies_ms
from benchmarks.flink.process import (
    DEFAULT_FETCH_MS,
    Flink,
    FlinkUnavailableError,
    Job,
    Moments,
    flink,
)
from benchmarks.production import stores
from benchmarks.servers import ROOT, processor_seconds, service
from tests.support.server import Service

LENGTHS: Final = (1, 2, 4, 8)
RATE: Final = 50
"""Ticks a second."""
WARM: Final = RATE
"""Ticks at the start of each round that are not counted."""
REST: Final = RATE * 3 // 2
"""Ticks at the end: Flink's last watermark, which ends the job, comes after those that are counted."""
_SETTINGS: Final = ("default", "tuned")
_TUNED_FETCH_MS: Final = 1
_OUTSIDE_S: Final = 30
"""Duration of a chain that is read through the REST API: three of its intervals."""


def percentile(values: list[float], percent: int) -> float:
    """Return the smallest value that more than this share of the values does not exceed."""
    if not values:
        raise ValueError("no latency has been measured")
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


def counted(moments: Moments, ticks: int) -> list[float]:
    """Return the latencies in ms of the ticks that count."""
    return [(seen - start) / 1e6 for start, seen in moments[WARM : WARM + ticks]]


@dataclass
class Contestant:
    """Something that passes a watermark through a chain."""

    name: str
    go: Callable[[int, int], list[float]]
    """Given the number of stages and of ticks that count, the latency of each in ms."""
    rounds: dict[int, list[list[float]]] = field(default_factory=dict[int, list[list[float]]])
    """Latencies of each round by the number of stages."""
    processor_ms: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """Processor time of the service for a tick, likewise; nothing for others."""

    def at(self, stages: int, percent: int) -> float:
        """Return the percentile over all rounds."""
        return percentile(list(itertools.chain(*self.rounds[stages])), percent)

    def by_round(self, stages: int, percent: int) -> list[float]:
        return [percentile(each, percent) for each in self.rounds[stages]]


def _of_flink(running: Flink, settings: str) -> Contestant:
    def go(stages: int, ticks: int) -> list[float]:
        return counted(running.run(_job(settings, stages, ticks)), ticks)

    return Contestant(f"Flink, {settings}", go)


def _outside_flink(running: Flink) -> Contestant:
    def go(stages: int, ticks: int) -> list[float]:
        job = _job("tuned", stages, ticks, _TUNED_FETCH_MS)
        return counted(running.run_read_outside(job, RANGES), ticks)

    return Contestant("Flink, tuned, by REST", go)


def _job(settings: str, stages: int, ticks: int, fetch_ms: int = DEFAULT_FETCH_MS) -> Job:
    return Job(settings, stages, WARM + ticks + REST, 1_000 // RATE, fetch_ms)


def _commits(folder: Path) -> Contestant:
    files = itertools.count()

    def go(stages: int, ticks: int) -> list[float]:
        # The source's stage has a watermark, too.
        return latencies_ms(folder / f"commits-{next(files)}.db", stages + 1, ticks)

    return Contestant("commits alone", go)


def _of_ours(name: str, server: Service) -> Contestant:
    jobs = itertools.count()

    def go(stages: int, ticks: int) -> list[float]:
        numbers = (str(stages), str(RATE), str(WARM + ticks))
        module = "benchmarks.flink.chain"
        before = processor_seconds(server.pid)
        done = subprocess.run(
            [sys.executable, "-m", module, server.url, f"chain-{next(jobs)}", *numbers],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2_000:])
        spent = (processor_seconds(server.pid) - before) * 1e3 / (WARM + ticks)
        made.processor_ms.setdefault(stages, []).append(spent)
        return json.loads(done.stdout)[WARM:]

    made = Contestant(name, go)
    return made


def _measure(plan: Plan, stages: int, contestants: list[Contestant]) -> None:
    """Measure all of them in each round, in another order each time; the first round only warms up."""
    ticks = round(plan.seconds * RATE)
    for index in range(plan.rounds + 1):
        turn = index % len(contestants)
        for one in contestants[turn:] + contestants[:turn]:
            found = one.go(stages, ticks)
            if index:
                one.rounds.setdefault(stages, []).append(found)


def _through(stages: int) -> str:
    return f"{stages} stage{'s' if stages > 1 else ''}"


def _latencies(stages: int, contestants: list[Contestant]) -> Iterator[Figure]:
    for one in contestants:
        medians = one.by_round(stages, 50)
        detail = (
            f"p99 {one.at(stages, 99):.2f} ms; medians of {len(medians)} rounds "
            f"{min(medians):.2f}-{max(medians):.2f}"
        )
        if stages in one.processor_ms:
            spent = statistics.median(one.processor_ms[stages])
            detail += f"; {spent:.1f} ms of the service's processor for a tick"
        name = f"{_through(stages)}, {one.name}: median"
        yield Figure(name, one.at(stages, 50), "ms", None, False, detail)


def _ratio(stages: int, percent: int, ours: Contestant, theirs: Contestant) -> Figure:
    us, them = ours.at(stages, percent), theirs.at(stages, percent)
    pairs = zip(ours.by_round(stages, percent), theirs.by_round(stages, percent), strict=True)
    ratios = [one / other for one, other in pairs]
    what = "median" if percent == 50 else f"p{percent}"
    detail = f"{us:.1f} ms to {them:.1f} ms, rounds {min(ratios):.2f}-{max(ratios):.2f}"
    name = f"{_through(stages)}, {ours.name} / {theirs.name}: {what}"
    return Figure(name, us / them, "ratio", 1, False, detail)


def _outside(plan: Plan, running: Flink) -> Figure:
    """Return the time until Flink's REST API shows the watermark, by its own settings."""
    stages = LENGTHS[-1]
    ticks = (_OUTSIDE_S if plan is FULL else _OUTSIDE_S // 2) * RATE
    found = counted(running.run_read_outside(_job("default", stages, ticks), RANGES), ticks)
    name = f"{_through(stages)}, Flink, default, by REST: median"
    detail = f"p99 {percentile(found, 99):.1f} ms; metrics collected every {DEFAULT_FETCH_MS:,} ms"
    return Figure(name, percentile(found, 50), "ms", None, False, detail)


def figures(plan: Plan, folder: Path) -> Iterator[Figure]:
    """Every figure, or one line with the reason why Flink cannot be had."""
    with ExitStack() as stack:
        try:
            running = stack.enter_context(flink(folder / "flink", _progress))
        except FlinkUnavailableError as error:
            yield Figure("Flink", None, "ratio", None, False, f"skipped: {error}")
            return
        embedded = stack.enter_context(service(folder / "embedded"))
        production = stack.enter_context(stack.enter_context(stores(folder / "stores")).replica())
        ours = [_of_ours("embedded", embedded), _of_ours("Redis and Postgres", production)]
        theirs = [*(_of_flink(running, each) for each in _SETTINGS), _outside_flink(running)]
        everyone = [*ours, *theirs, _commits(folder)]
        for stages in LENGTHS:
            _measure(plan, stages, everyone)
            yield from _latencies(stages, everyone)
            for one, other in itertools.product(ours, theirs):
                for percent in (50, 99):
                    yield _ratio(stages, percent, one, other)
        yield _outside(plan, running)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

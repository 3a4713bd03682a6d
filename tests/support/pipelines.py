"""Simulated pipelines in virtual time: how an output watermark moves over wall time.

Each has a seed, so the same one can be made again. A day of the flights passes in 86.4 seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from service.frontier.estimate import (
    INTERVALS,
    NEWEST,
    WINDOWS_MS,
    Estimate,
    Observation,
    Trace,
    better,
    estimate,
    settled,
)
from service.frontier.timestamps import MIN

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
Floats = NDArray[np.float64]
Random = np.random.Generator


@dataclass(frozen=True)
class Run:
    """Publications of a pipeline: outputs that rise, and when."""

    at_ms: Floats
    output: Floats

    def output_at(self, now_ms: float) -> float:
        return float(self.output[np.searchsorted(self.at_ms, now_ms, "right") - 1])

    def reached_ms(self, output: float) -> float | None:
        """When it got there; None: not in this run."""
        index = int(np.searchsorted(self.output, output))
        return None if index == len(self.output) else float(self.at_ms[index])

    def rows(self, now_ms: int) -> NDArray[np.int64]:
        """Return the rows left in the ledger: after a day, the last of each minute."""
        at_ms = self.at_ms[: int(np.searchsorted(self.at_ms, now_ms, "right"))]
        minutes, fine = at_ms // MINUTE, at_ms >= now_ms - DAY
        return np.flatnonzero(np.append(minutes[1:] != minutes[:-1], True) | fine)

    def newest(self, now_ms: int) -> list[Observation]:
        """The newest of these."""
        return [
            Observation(at - at % MINUTE, at, int(self.output[i]), int(i) + 1)
            for i in self.rows(now_ms)[-NEWEST:].tolist()
            for at in [int(self.at_ms[i])]
        ]

    def history(self, from_ms: int, now_ms: int) -> list[Observation]:
        """The last of each interval."""
        index = self.rows(now_ms)
        at_ms = self.at_ms[index]
        number = np.ceil((at_ms - from_ms) * INTERVALS / (now_ms - from_ms)).clip(min=0)
        chosen = np.append(number[1:] != number[:-1], True)
        return [
            Observation(
                MIN if not n else from_ms + int((n - 1) * (now_ms - from_ms) // INTERVALS),
                int(self.at_ms[i]),
                int(self.output[i]),
                int(i) + 1,
            )
            for i, n in zip(index[chosen].tolist(), number[chosen].tolist(), strict=True)
        ]

    def estimate(self, now_ms: int, target: int) -> Estimate:
        """As `service.aggregator.history` does it."""
        newest = self.newest(now_ms)
        found = estimate(Trace(newest), now_ms, target)
        for window_ms in WINDOWS_MS:
            from_ms = now_ms - window_ms
            if settled(found) or newest[0].at_ms <= self.at_ms[0]:
                break
            if from_ms < newest[0].at_ms:
                older = estimate(Trace(self.history(from_ms, now_ms)), now_ms, target)
                found = better(found, older)
                if from_ms < self.at_ms[0]:
                    break
        return found


def _run(at_ms: Floats, output: Floats) -> Run:
    output = np.maximum.accumulate(output)
    rises = np.append(True, output[1:] > output[:-1])
    return Run(np.floor(at_ms[rises]), np.floor(output[rises]))


def _ticks(random: Random, count: int) -> Floats:
    return np.cumsum(random.uniform(8_000, 12_000, count))


def steady(random: Random) -> Run:
    """A batch every ten seconds, some twenty seconds behind the clock."""
    at_ms = _ticks(random, 6_000)
    return _run(at_ms, at_ms - random.uniform(20_000, 30_000, len(at_ms)))


def bursty(random: Random) -> Run:
    """Steps of very different sizes after pauses of very different lengths."""
    count = 4_000
    pauses = random.lognormal(np.log(10_000), 1.0, count)
    return _run(np.cumsum(pauses), np.cumsum(random.lognormal(np.log(10_000), 1.2, count)))


def stalled(random: Random) -> Run:
    """Like the steady one, but about once an hour it stands for ten minutes or so, then catches up."""
    at_ms: list[float] = []
    output: list[float] = []
    now, reached, next_stall = 0.0, -20_000.0, random.exponential(HOUR)
    while now < 2 * DAY:
        now += random.uniform(8_000, 12_000)
        if now > next_stall:
            now += random.exponential(10 * MINUTE)
            next_stall = now + random.exponential(HOUR)
        reached = max(reached, min(now - random.uniform(20_000, 30_000), reached + 40_000))
        at_ms.append(now)
        output.append(reached)
    return _run(np.array(at_ms), np.array(output))


def _changing(random: Random, rates: Floats) -> Run:
    at_ms = _ticks(random, len(rates))
    gains = np.diff(at_ms, prepend=0.0) * rates * random.lognormal(0.0, 0.3, len(rates))
    return _run(at_ms, np.cumsum(gains))


def accelerating(random: Random) -> Run:
    """Old data, read faster and faster: seven times as fast in the end."""
    return _changing(random, 20 * np.exp(np.linspace(0, 2, 3_000)))


def slowing(random: Random) -> Run:
    """Old data, read slower and slower."""
    return _changing(random, 150 * np.exp(-np.linspace(0, 2, 3_000)))


def uneven(random: Random) -> Run:
    """Its pace is another every hour or so: from half to twice the usual."""
    hours = np.exp(random.uniform(-0.7, 0.7, 40))
    return _changing(random, np.repeat(hours, 300))


def daily(random: Random) -> Run:
    """A job of every night: half an hour of steps, then nothing until the next."""
    days = np.arange(60)
    began = days * DAY + 2 * HOUR + random.normal(0, 15 * MINUTE, len(days))
    took = random.uniform(20 * MINUTE, 50 * MINUTE, len(days))
    steps = np.arange(1, 25)
    at_ms = began[:, None] + took[:, None] * steps / 24
    return _run(at_ms.ravel(), ((days[:, None] - 1) * DAY + steps * HOUR).ravel().astype(float))


FLIGHTS_SPEED, FLIGHTS_BOUND_MS = 1_000, 12 * HOUR


@cache
def _logs() -> Mapping[str, tuple[Floats, Floats]]:
    """For each log: when each line was written, and the newest departure that it had by then."""
    # Needs pandas and the flights, which are installed for the demonstration.
    from spark_agent.demo import flights as demo  # noqa: PLC0415

    table = demo.load_flights(demo.DAYS_IN_YEAR).table
    midnights = np.arange(0.0, (demo.DAYS_IN_YEAR + 1) * DAY, DAY)
    start = demo.START.replace(tzinfo=None)
    logs: dict[str, tuple[Floats, Floats]] = {}
    for names, log in table.groupby(["source", "log"]):
        source, carrier = cast("tuple[str, str]", names)
        departed, landed = (
            np.append(((log[name].dt.tz_localize(None) - start) / _MS).to_numpy(), midnights)
            for name in ("departed_at", "landed_at")
        )
        order = np.argsort(landed, kind="stable")
        logs[f"{source} {carrier}"] = landed[order], np.maximum.accumulate(departed[order])
    return logs


_MS = timedelta(milliseconds=1)


def _replay(random: Random, logs: Mapping[str, tuple[Floats, Floats]]) -> Run:
    """Read the logs at this speed, in batches that take one to three seconds."""
    batches = np.cumsum(random.uniform(1_000, 3_000, 20_000))
    batches = batches[batches < 366 * DAY / FLIGHTS_SPEED]
    lowest = np.full(len(batches), np.inf)
    for landed, newest in logs.values():
        read = np.searchsorted(landed / FLIGHTS_SPEED, batches, "right") - 1
        lowest = np.minimum(lowest, newest[np.maximum(read, 0)])
    return _run(batches, lowest - FLIGHTS_BOUND_MS)


def flights(random: Random) -> Run:
    """Every flight that left New York in 2013: the slowest of all logs, most days held to midnight."""
    return _replay(random, _logs())


def united(random: Random) -> Run:
    """The longest of the logs: United's at Newark."""
    name = "newark UA"
    return _replay(random, {name: _logs()[name]})


PIPELINES: Mapping[str, Callable[[Random], Run]] = {
    made.__name__: made
    for made in (steady, bursty, stalled, accelerating, slowing, uneven, daily, flights, united)
}


@dataclass(frozen=True)
class Question:
    """When will it be there? And when it was."""

    run: Run
    now_ms: int
    target: int
    reached_ms: float


def questions(name: str, worlds: int, each: int, *, first_seed: int = 0) -> list[Question]:
    """Ask at any time, for any distance from one step to a twentieth of the run."""
    asked: list[Question] = []
    for seed in range(first_seed, first_seed + worlds):
        random = np.random.default_rng(seed)
        run = PIPELINES[name](random)
        first, last = run.at_ms[0], run.at_ms[-1]
        whole = run.output[-1] - run.output[0]
        for _ in range(each):
            now_ms = int(random.uniform(0.7 * first + 0.3 * last, 0.1 * first + 0.9 * last))
            distance = np.exp(random.uniform(np.log(whole / len(run.output)), np.log(whole / 20)))
            target = int(run.output_at(now_ms) + distance)
            reached_ms = run.reached_ms(target)
            # Never so far that the run ends first.
            if reached_ms is not None:
                asked.append(Question(run, now_ms, target, reached_ms))
    return asked

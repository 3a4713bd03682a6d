"""`python -m benchmarks.lateness [--days 3] [--seed 0]`: bounds that are learned, against fixed bounds.

Rows are replayed in batches, in the order of their arrival, without Spark and without a clock. The rows
are the flights of the demo (a flight departs, and its line is written at the landing), and those of
simulated shards, which take a random time to arrive. Each row that is older than the promise of its
shard is late. The fixed bound is the one for all shards that would have made as many of the same rows
late, chosen in hindsight. A lag is the newest event time minus the promise, the mean over batches; the
slowest shard is the one with the greatest lag. Batches before the first promise are left out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_agent.demo.flights import DAYS_IN_YEAR, load_flights
from spark_agent.strategies import LearnedLateness, Rows

Times = NDArray[np.int64]
Shard = Sequence[Times]
"""The event times (ms) of each batch."""

QUANTILES = (0.99, 0.999, 0.9999)
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
ROWS_PER_SECOND = 20


def batches(event_ms: Times, arrival_ms: Times, every_ms: int) -> Shard:
    """Cut rows into batches by their arrival."""
    order = np.argsort(arrival_ms, kind="stable")
    number = arrival_ms[order] // every_ms
    cuts = np.flatnonzero(np.diff(number)) + 1
    return np.split(event_ms[order], cuts)


Delays = Callable[[np.random.Generator, Times], NDArray[np.float64]]
"""The time (ms) that rows of these event times take to arrive."""


def exponential(random: np.random.Generator, event_ms: Times) -> NDArray[np.float64]:
    return random.exponential(10 * SECOND, len(event_ms))


def pareto(random: np.random.Generator, event_ms: Times) -> NDArray[np.float64]:
    """Delays without a variance: the exponent of the tail is 1.5."""
    return random.pareto(1.5, len(event_ms)) * 10 * SECOND


def jump(random: np.random.Generator, event_ms: Times) -> NDArray[np.float64]:
    """Ten times the delays, in the second half of each day."""
    slow = event_ms % DAY >= DAY // 2
    return exponential(random, event_ms) * np.where(slow, 10.0, 1.0)


def cycle(random: np.random.Generator, event_ms: Times) -> NDArray[np.float64]:
    """From one to ten times the delays and back, each day."""
    return exponential(random, event_ms) * 10 ** (0.5 - 0.5 * np.cos(event_ms * 2 * np.pi / DAY))


def outages(random: np.random.Generator, event_ms: Times) -> NDArray[np.float64]:
    """Rows of a first minute in each six hours arrive up to half an hour late, together."""
    until_ms = np.where(event_ms % (6 * HOUR) < MINUTE, 30 * MINUTE, 0)
    return exponential(random, event_ms) + until_ms


def straggler(random: np.random.Generator, event_ms: Times) -> NDArray[np.float64]:
    return 20 * exponential(random, event_ms)


def simulated(delays: Sequence[Delays], days: int, seed: int) -> list[Shard]:
    """Simulate a shard for each of these delays, in batches of a minute."""
    random = np.random.default_rng(seed)
    made: list[Shard] = []
    for each in delays:
        count = days * DAY // SECOND * ROWS_PER_SECOND
        event_ms = np.sort(random.integers(0, days * DAY, count))
        arrival_ms = event_ms + each(random, event_ms).astype(np.int64)
        made.append(batches(event_ms, arrival_ms, MINUTE))
    return made


def flights(every_ms: int) -> list[Shard]:
    """Replay the lines of each carrier, in the order of the landings."""
    table: Any = load_flights(DAYS_IN_YEAR).table
    made: list[Shard] = []
    for _, lines in table.groupby("log"):
        event, arrival = (
            lines[name].dt.tz_convert(None).to_numpy().astype("datetime64[ms]").astype(np.int64)
            for name in ("departed_at", "landed_at")
        )
        made.append(batches(event, arrival, every_ms))
    return made


WORLDS: dict[str, Callable[[int, int], list[Shard]]] = {
    "exponential": lambda days, seed: simulated([exponential], days, seed),
    "Pareto, exponent 1.5": lambda days, seed: simulated([pareto], days, seed),
    "ten times later for half of each day": lambda days, seed: simulated([jump], days, seed),
    "daily cycle, from 1 to 10 times": lambda days, seed: simulated([cycle], days, seed),
    "a minute's rows half an hour late, every 6 h": lambda days, seed: simulated(
        [outages], days, seed
    ),
    "eight shards, one 20 times later": lambda days, seed: simulated(
        [*[exponential] * 7, straggler], days, seed
    ),
    "flights, batches of an hour": lambda _days, _seed: flights(HOUR),
    "flights, batches of a day": lambda _days, _seed: flights(DAY),
}


@dataclass
class Replay:
    """Shards under a strategy."""

    lags_ms: list[list[int]] = field(default_factory=list[list[int]])
    """The lags of each shard."""
    late: int = 0
    lateness_ms: list[Times] = field(default_factory=list[Times])
    """The lateness of the rows that arrived after the first promise of their shard."""
    without_promise: int = 0
    """Rows that arrived before."""
    state_bytes: int = 0
    digest_bytes: int = 0
    seconds: float = 0.0
    updates: int = 0

    def run(self, strategy: LearnedLateness, shard: Shard) -> None:
        state, newest_ms, promise_ms = None, 0, None
        lags_ms: list[int] = []
        for number, times_ms in enumerate(shard):
            if promise_ms is None:
                self.without_promise += len(times_ms)
            else:
                self.late += int((times_ms < promise_ms).sum())
                self.lateness_ms.append(np.maximum(newest_ms - times_ms, 0))
            packed = strategy.digest(times_ms)
            oldest_ms, latest_ms = int(times_ms.min()), int(times_ms.max())
            began = time.process_time()
            state = strategy.update(
                state, Rows(len(times_ms), oldest_ms, latest_ms, 0, digests=(packed,))
            )
            found_ms = strategy.promise(state)
            self.seconds, self.updates = (
                self.seconds + time.process_time() - began,
                self.updates + 1,
            )
            newest_ms = max(newest_ms, latest_ms) if number else latest_ms
            if found_ms is not None:
                # A published promise is never lowered.
                promise_ms = found_ms if promise_ms is None else max(promise_ms, found_ms)
                lags_ms.append(newest_ms - promise_ms)
            if number % 50 == 0:
                self.state_bytes = max(self.state_bytes, len(json.dumps(state)))
            self.digest_bytes = max(self.digest_bytes, len(packed))
        self.lags_ms.append(lags_ms)

    def fixed_ms(self) -> int:
        """Return the bound that makes as many of the same rows late."""
        lateness_ms = np.concatenate(self.lateness_ms)
        place = max(len(lateness_ms) - 1 - self.late, 0)
        return int(np.partition(lateness_ms, place)[place])


def replayed(quantile: float, shards: Sequence[Shard]) -> Replay:
    replay = Replay()
    for shard in shards:
        replay.run(LearnedLateness(quantile), shard)
    return replay


def line(name: str, quantile: float, replay: Replay) -> str:
    """Return a row of the table."""
    counted = sum(len(each) for each in replay.lateness_ms)
    before = f"{replay.without_promise / (replay.without_promise + counted):.0%}"
    if not counted:
        return f"| {name} | {quantile} | {before} | | | | | | |"
    share, fixed_ms = replay.late / counted, replay.fixed_ms()
    lag_ms = float(np.mean(np.concatenate(replay.lags_ms)))
    slowest_ms = max(float(np.mean(each)) for each in replay.lags_ms if each)
    lags = " | ".join(f"{each / SECOND:,.0f} s" for each in (lag_ms, slowest_ms, fixed_ms))
    return (
        f"| {name} | {quantile} | {before} | {share:.3%} | {share / (1 - quantile):.2f} | {lags}"
        f" | {lag_ms / fixed_ms:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lateness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--days", type=int, default=3, help="length of the simulations")
    parser.add_argument("--seed", type=int, default=0, help="others make other rows")
    parser.add_argument("--only", default="", help="the rows whose names contain this text")
    options = parser.parse_args()
    print(
        "| rows | quantile | before a promise | late | late ÷ (1 - quantile) | mean lag"
        " | lag of the slowest shard | fixed bound | mean lag ÷ fixed bound |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    replays: list[Replay] = []
    for name, world in WORLDS.items():
        if options.only not in name:
            continue
        shards = world(options.days, options.seed)
        for quantile in QUANTILES:
            replays.append(replayed(quantile, shards))
            print(line(name, quantile, replays[-1]), flush=True)
    seconds, updates = sum(each.seconds for each in replays), sum(each.updates for each in replays)
    print(
        f"state: {max(each.state_bytes for each in replays):,} bytes at most; digest:"
        f" {max(each.digest_bytes for each in replays):,} bytes at most; update and promise:"
        f" {1_000 * seconds / updates:.2f} ms"
    )


if __name__ == "__main__":
    main()

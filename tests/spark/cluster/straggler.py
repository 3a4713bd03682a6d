"""A task whose first attempt is slow, so that Spark runs a copy of it; and which of them wins.

It waits for what the other does, not for time: both leave marks in a folder.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark import TaskContext

from spark_agent import Strategy

_DEADLINE_S: Final = 90
_BATCH_PROPERTY: Final = "streaming.sql.batchId"
_EVERY: Final = 2
"""In every second batch there are races: by turns the copy wins them and the straggler."""
SOURCE: Final = "source"
KEYED: Final = "keyed"


@dataclass(frozen=True)
class Straggler:
    """Races of tasks with their copies. Travels to the executors."""

    folder: Path

    def pass_by(self, place: str) -> None:
        """Come by as some task's attempt, after its claim; in a race, wait for the other one."""
        task = TaskContext.get()
        batch = task and task.getLocalProperty(_BATCH_PROPERTY)
        if task is None or batch is None or int(batch) % _EVERY:
            return
        winner = "copy" if int(batch) % (2 * _EVERY) else "straggler"
        race = self.folder / f"{place}, won by the {winner}, in batch {batch}"
        race.mkdir(parents=True, exist_ok=True)
        if task.attemptNumber() == 0:
            if not _first_come(race / "straggler", task.partitionId()):
                return
            # Until its copy has claimed what it has claimed itself; and if the copy is to win, for
            # ever: Spark ends the one that is left.
            _wait(race / ("never" if winner == "copy" else "copy"))
        elif _partition(race / "straggler") == task.partitionId():
            (race / "copy").touch()
            if winner == "straggler":
                _wait(race / "never")

    def races(self) -> set[str]:
        """The races that were run, without their batches."""
        return {mark.parent.name.rpartition(", ")[0] for mark in self.folder.glob("*/copy")}


ALL_RACES: Final = {
    f"{place}, won by the {winner}" for place in (SOURCE, KEYED) for winner in ("copy", "straggler")
}


def _first_come(mark: Path, partition: int) -> bool:
    """Whether this partition is the one that straggles in this race."""
    try:
        with mark.open("x") as made:
            made.write(str(partition))
    except FileExistsError:
        return False
    return True


def _partition(mark: Path) -> int | None:
    return int(mark.read_text()) if mark.exists() else None


def _wait(mark: Path) -> None:
    end = time.monotonic() + _DEADLINE_S
    while not mark.exists() and time.monotonic() < end:
        time.sleep(0.01)


@dataclass(frozen=True)
class StragglingStrategy:
    """A strategy, which is asked between a task's claim and its report."""

    strategy: Strategy
    straggler: Straggler

    def promise_ms(self, newest_ms: int) -> int:
        self.straggler.pass_by(SOURCE)
        return self.strategy.promise_ms(newest_ms)

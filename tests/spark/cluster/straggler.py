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
"""In every second batch there are races. Which batches have rows at a place, nobody can say before."""
SOURCE: Final = "source"
KEYED: Final = "keyed"


@dataclass(frozen=True)
class Straggler:
    """Races of tasks with their copies. Travels to the executors."""

    folder: Path

    def pass_by(self, place: str) -> None:
        """Come by as some task's attempt, before its report; in a race, wait for the other one."""
        task = TaskContext.get()
        batch = task and task.getLocalProperty(_BATCH_PROPERTY)
        if task is None or batch is None or int(batch) % _EVERY:
            return
        race = self.folder / f"{place}, in batch {batch}"
        race.mkdir(parents=True, exist_ok=True)
        if task.attemptNumber() == 0:
            # By turns at each place.
            winner = "copy" if len(list(self.folder.glob(f"{place}, */copy"))) % 2 else "straggler"
            if not _first_come(race / "straggler", f"{task.partitionId()} {winner}"):
                return
            # Until its copy is as far; and if the copy is to win, for ever: Spark ends the one that is
            # left.
            _wait(race / ("never" if winner == "copy" else "copy"))
            return
        partition, winner = _said(race / "straggler")
        if partition == str(task.partitionId()):
            (race / "copy").touch()
            if winner == "straggler":
                _wait(race / "never")

    def races(self) -> set[str]:
        """The races that were run, without their batches."""
        return {
            f"{race.name.partition(',')[0]}, won by the {_said(race / 'straggler')[1]}"
            for race in (copy.parent for copy in self.folder.glob("*/copy"))
        }


ALL_RACES: Final = {
    f"{place}, won by the {winner}" for place in (SOURCE, KEYED) for winner in ("copy", "straggler")
}


def _first_come(mark: Path, said: str) -> bool:
    """Return whether this is the straggler of this race."""
    try:
        with mark.open("x") as made:
            made.write(said)
    except FileExistsError:
        return False
    return True


def _said(mark: Path) -> tuple[str, str]:
    """The partition that straggles, and who is to win; nothing where no race is on."""
    partition, _, winner = mark.read_text().partition(" ") if mark.exists() else ("", "", "")
    return partition, winner


def _wait(mark: Path) -> None:
    end = time.monotonic() + _DEADLINE_S
    while not mark.exists() and time.monotonic() < end:
        time.sleep(0.01)


@dataclass(frozen=True)
class StragglingStrategy:
    """A strategy, which is called before a task's report."""

    strategy: Strategy
    straggler: Straggler

    def promise_ms(self, newest_ms: int) -> int | None:
        self.straggler.pass_by(SOURCE)
        return self.strategy.promise_ms(newest_ms)

"""State functions: rows counted by key in blocks of six hours, told once a block is over.

A count is stamped with the *start* of its block, so it comes six hours behind the watermark: only
who wrote the function knows, and has to say so. Blocks that start in time are stamped so too: the
end is there for the processor whose event time Spark guards itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

BLOCK_MS: Final = 6 * 3_600_000
BLOCK: Final = "6 hours"
COUNTED: Final = "key string, started_at timestamp, ended_at timestamp, rows long"
OPEN: Final = "rows_by_end string"


def end_of_block(at_ms: int) -> int:
    """When the block of an instant is over."""
    return (at_ms // BLOCK_MS + 1) * BLOCK_MS


def count_blocks(
    key: tuple[str], frames: Iterable[pd.DataFrame], state: GroupState
) -> Iterator[pd.DataFrame]:
    """For `applyInPandasWithState`, with timeouts in event time."""
    counts: Counter[int] = Counter()
    if state.exists:
        (kept,) = state.get
        counts.update({int(end): rows for end, rows in json.loads(kept).items()})
    for frame in frames:
        counts.update(end_of_block(at.value // 1_000_000) for at in frame["at"])
    over = sorted(end for end in counts if end <= state.getCurrentWatermarkMs())
    told = {end: counts.pop(end) for end in over}
    if counts:
        state.update((json.dumps(counts),))
        state.setTimeoutTimestamp(min(counts))
    elif state.exists:
        state.remove()
    if told:
        yield pd.DataFrame(
            {
                "key": [key[0]] * len(told),
                "started_at": [pd.Timestamp(end - BLOCK_MS, unit="ms") for end in told],
                "ended_at": [pd.Timestamp(end, unit="ms") for end in told],
                "rows": list(told.values()),
            }
        )


class BlockCounter(StatefulProcessor):
    """For `transformWithState`, with timers in event time."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._rows = handle.getMapState("rows", "ended_at long", "rows long")

    def handleInputRows(  # noqa: N802  (Spark calls it so)
        self,
        key: Any,
        rows: Iterator[Any],
        timerValues: Any,  # noqa: N803  (Spark names it so)
    ) -> Iterator[Row]:
        counts = Counter(end_of_block(round(row["at"].timestamp() * 1_000)) for row in rows)
        for end, more in counts.items():
            self._rows.updateValue((end,), (self._rows_of(end) + more,))
            self._handle.registerTimer(end)
        return iter(())

    def handleExpiredTimer(  # noqa: N802  (Spark calls it so)
        self,
        key: Any,
        timerValues: Any,  # noqa: N803  (Spark names it so)
        expiredTimerInfo: Any,  # noqa: N803  (Spark names it so)
    ) -> Iterator[Row]:
        end = expiredTimerInfo.getExpiryTimeInMs()
        rows = self._rows_of(end)
        self._rows.removeKey((end,))
        yield Row(
            key=key[0], started_at=_instant(end - BLOCK_MS), ended_at=_instant(end), rows=rows
        )

    def _rows_of(self, end: int) -> int:
        found = self._rows.getValue((end,))
        return 0 if found is None else found[0]

    def close(self) -> None:
        """Nothing to do."""


def _instant(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1_000, UTC)


def passed_through(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """For `mapInPandas`: Spark cannot know that the rows are what they were."""
    yield from frames

"""The partitions that a watermark has passed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

from dagster import TimeWindowPartitionsDefinition

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last partition whose run was requested, and the job's generation then."""

    generation: int
    partition: str

    @classmethod
    def read(cls, text: str | None, generation: int) -> Self | None:
        """Return the cursor of a text; None if there is not one, or of another generation."""
        cursor = cls(**json.loads(text)) if text else None
        return cursor if cursor and cursor.generation == generation else None

    def text(self) -> str:
        """Return the form that Dagster keeps."""
        return json.dumps({"generation": self.generation, "partition": self.partition})


def check_partitions(partitions: object) -> TimeWindowPartitionsDefinition:
    """Return partitions that a watermark can complete. Raises `TypeError`, `ValueError`."""
    if not isinstance(partitions, TimeWindowPartitionsDefinition):
        raise TypeError(
            f"the partitions are {type(partitions).__name__}: a watermark completes partitions of time"
            " alone, such as HourlyPartitionsDefinition"
        )
    if partitions.end_offset > 0:
        raise ValueError(
            f"the partitions have end_offset={partitions.end_offset}: a partition that has not ended is"
            " not complete, so set end_offset=0"
        )
    return partitions


def complete_partitions(
    partitions: TimeWindowPartitionsDefinition,
    watermark_ms: int,
    now: datetime,
    after: str | None,
    limit: int,
) -> Sequence[str]:
    """Return at most `limit` partitions, the earliest first, that end at or before the watermark.

    `after` is the last partition that was returned before. A final stage has the end of time as its
    watermark, so partitions beyond `now` are not returned: their number is unbounded.
    """
    until = _EPOCH + timedelta(milliseconds=min(watermark_ms, _ms(now)))
    keys = partitions.get_partition_keys(current_time=until)
    # A key that is not there is one of former partitions. Dagster requests a run key once, so not one of
    # the partitions from the first on is repeated.
    begin = keys.index(after) + 1 if after in keys else 0
    return keys[begin : begin + limit]


def _ms(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(milliseconds=1)

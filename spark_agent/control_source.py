"""The control source: brings a stage's input watermark into Spark, as the only clock it closes by.

It is a streaming data source that yields one row whenever the watermark has moved, with the
watermark as its event time. `Pipeline.watermarked` unions it with the data in such a way that
Spark's own watermark is the newest control row's event time, and nothing else.

Why no row that the watermark covers comes too late, although Spark asks the data's source and
this one for their newest offsets one after the other, in either order: what the watermark W
covers was readable *before* W was published. If Spark asks here first, then it lists the data
after it has seen W, and everything that W covers is in the same batch or an earlier one. If it
asks here last, rows may arrive between the two, and they are in the next batch. That is still in
time: the control row of batch n becomes Spark's watermark at the end of batch n. Batch n + 1
closes windows by it, but only after it has taken in its own rows, and it drops rows as late by
the watermark of batch n, which was older. This holds as long as the data's source takes all there
is: one that is rate limited (`maxFilesPerTrigger`) and reads what *another query* wrote may leave
covered rows for a later batch, and must not be limited. (The source stage's own query may: there
the rows of a batch are promised only when they have been read.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from spark_agent.arrow import Batch, instant
from spark_agent.client import MAX_MS, AggregatorError, Client
from spark_agent.clock import Clock, SystemClock

FORMAT: Final = "tidegauge-control"
TIME_COLUMN: Final = "watermark"

END_MS: Final = 3_093_527_980_800_000
"""100000-01-01T00:00:00Z: what the end of time is to Spark. Later than the end of any window over
real times (which end with the year 9999), early enough for Spark to count in microseconds."""

_LONGEST_PAUSE_MS: Final = 5_000


def to_spark_ms(watermark_ms: int) -> int:
    """Turn a watermark into Spark's.

    >>> to_spark_ms(MAX_MS) == END_MS, to_spark_ms(5)
    (True, 5)
    """
    return END_MS if watermark_ms == MAX_MS else watermark_ms


def from_spark_ms(watermark_ms: int) -> int | None:
    """Turn Spark's watermark back; None where Spark has none yet, which it writes as 1970.

    >>> from_spark_ms(END_MS) == MAX_MS, from_spark_ms(5), from_spark_ms(0)
    (True, 5, None)
    """
    if watermark_ms <= 0:
        return None
    return MAX_MS if watermark_ms >= END_MS else watermark_ms


@dataclass(frozen=True)
class _ControlRow(InputPartition):
    watermark_ms: int


class ControlReader(DataSourceStreamReader):
    """Follows one stage's input watermark. Lives in a Python process beside the driver.

    An offset is `{"watermark": ms or null, "turn": n}`. Spark logs it, so that a repeated batch
    sees the same watermark again; and Spark tells us where it is, so that we never go back,
    whatever we are told (the job may have been reset, the query may come from an old checkpoint).
    """

    def __init__(self, client: Client, job: str, stage: str, poll_ms: int, clock: Clock) -> None:
        self._client = client
        self._job = job
        self._stage = stage
        self._poll_ms = poll_ms
        self._clock = clock
        self._next_poll_ms: int | None = None
        self._pause_ms = poll_ms
        self._etag: str | None = None
        self._newest_ms: int | None = None
        self._first = True

    def __getstate__(self) -> dict[str, Any]:
        """Leave all that follows the service behind: Spark pickles the reader for `read` alone."""
        return {}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Begin without a watermark."""
        return {"watermark": None, "turn": 0}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: ARG002, N802
        """Say how far the watermark is; `start` unchanged if it has not moved.

        The first time it takes a turn in any case: so each start of a query runs a batch, in
        which every range reports, even if the last epoch before a crash was never committed and
        no data comes.
        """
        self._poll()
        known_ms, newest_ms = start["watermark"], self._newest_ms
        moved = newest_ms is not None and (known_ms is None or newest_ms > known_ms)
        if not moved and not self._first:
            return start
        self._first = False
        return {"watermark": newest_ms if moved else known_ms, "turn": start["turn"] + 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan one row, if there is a watermark."""
        if start == end or end["watermark"] is None:
            return []
        return [_ControlRow(end["watermark"])]

    def read(self, partition: InputPartition) -> Iterator[Batch]:
        """Yield the row."""
        assert isinstance(partition, _ControlRow)  # noqa: S101
        yield instant(TIME_COLUMN, to_spark_ms(partition.watermark_ms))

    def _poll(self) -> None:
        """Ask the service, unless that was just done. An idle query comes here every 10 ms."""
        now_ms = self._clock.steady_ms()
        if self._next_poll_ms is not None and now_ms < self._next_poll_ms:
            return
        try:
            found = self._client.watermark(self._job, self._stage, self._etag)
        except AggregatorError:
            # An exception from here would end the query. Without news the watermark stands still,
            # which is always safe; and we ask less often until the service is back.
            self._pause_ms = min(2 * self._pause_ms, max(_LONGEST_PAUSE_MS, self._poll_ms))
        else:
            self._pause_ms = self._poll_ms
            if found is not None:
                self._etag, self._newest_ms = found.etag, found.input_ms
        self._next_poll_ms = self._clock.steady_ms() + self._pause_ms


class ControlSource(DataSource):
    """The control source, as Spark's registry knows it. Options: url, job, stage, pollMs."""

    @classmethod
    def name(cls) -> str:
        """Give the format's name."""
        return FORMAT

    def schema(self) -> str:
        """One column: the watermark."""
        return f"{TIME_COLUMN} timestamp"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        """Make the reader that the options ask for."""
        client = Client(self.options["url"], timeout_ms=1_000, patience_ms=1_000)
        poll_ms = int(self.options.get("pollMs", "100"))
        return ControlReader(
            client, self.options["job"], self.options["stage"], poll_ms, SystemClock()
        )

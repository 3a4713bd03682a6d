"""The control source: brings a stage's input watermark into Spark, where all windows close by it.

The control source is a streaming data source. It yields one row whenever the watermark has advanced,
with the watermark as the row's event time. `Pipeline.watermarked` unions the control source with the
data, so that Spark's own watermark is the newest control row's event time and depends on nothing else.
The driver determines the next row (`spark_agent.driver.watermark_feed`); the source requests it through
the link.

Rows that the watermark covers are never late, although Spark polls the latest offsets of the data's
source and of this source one after the other, in either order. The rows that a watermark W covers were
readable *before* W was published. If Spark polls this source first, the data is listed after W was read,
so the covered rows are in the same batch or an earlier one. If Spark polls this source last, rows that
arrive between the two polls are in the next batch, which is still in time: the control row of batch n
becomes Spark's watermark at the end of batch n. Batch n + 1 closes windows by it, but only after
processing its own rows, and batch n + 1 drops late rows by the watermark of batch n, which is older.

This requires that the data's source reads everything available. A rate-limited source that reads the
output of *another query* may leave covered rows for a later batch, and is rejected. (The source stage's
own query may be limited: rows are promised only once they have been read.) With `availableNow` a query
reads the data that was there at the start, so for other queries' stages it uses the watermarks from
before its start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from spark_agent.clock import Clock, SystemClock
from spark_agent.sources.control_row import Batch, control_row
from spark_agent.sources.driver_link import LinkClient, LinkError, Offset, RetryLater
from spark_agent.times import MAX_MS

FORMAT: Final = "tidegauge-control"

END_MS: Final = 3_093_527_980_800_000
"""100000-01-01T00:00:00Z, which stands for the end of time in Spark. It is later than the end of any
window over real times (until the year 9999), and still fits Spark's microseconds."""


def to_spark_ms(watermark_ms: int) -> int:
    """Convert a watermark to Spark's range.

    >>> to_spark_ms(MAX_MS) == END_MS, to_spark_ms(5)
    (True, 5)
    """
    return END_MS if watermark_ms == MAX_MS else watermark_ms


class ControlReader(SimpleDataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows one stage's input watermark. Runs in a Python process next to the driver.

    Its offsets are `spark_agent.sources.driver_link.Offset`. Spark logs the offsets, so a repeated batch
    has the same watermark again. A simple reader passes its rows to Spark together with the offset, so
    the task that reads the rows needs no Python. Only a batch that is repeated after a restart reads its
    row again.
    """

    def __init__(
        self,
        link: LinkClient,
        *,
        control: str,
        schema: StructType,
        event_time: str,
        delay_ms: int,
        poll_ms: int,
        clock: Clock,
    ) -> None:
        self._link = link
        self._poll_ms = poll_ms
        self._clock = clock
        self._ends_when_idle = False
        self._next_poll_ms: int | None = None
        self._polled_at_ms: int | None = None
        self._control = control
        self._schema = schema
        self._event_time = event_time
        self._delay_ms = delay_ms

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Start without a watermark."""
        return Offset(None, 0).to_dict()

    def read(self, start: dict[str, Any]) -> tuple[Iterator[Batch], dict[str, Any]]:
        """Request the next offset from the driver; `start` and no row if the watermark has not advanced.

        An exception raised here would end the query. If the driver does not answer, the watermark
        does not advance, which is always safe. An idle query calls this every 10 ms. Not every call
        sends a request, unless the run ends at the first trigger that finds nothing new.
        """
        end = self._next(start)
        return self.readBetweenOffsets(start, end), end

    def _next(self, start: dict[str, Any]) -> dict[str, Any]:
        now_ms, wall_ms = self._clock.steady_ms(), self._clock.wall_ms()
        # Sources by ingress time have promised the clock of the latest poll. If the clock has gone back
        # since, the batch that may be planned now has to wait, which the driver decides.
        went_back = self._polled_at_ms is not None and wall_ms < self._polled_at_ms
        if self._next_poll_ms is not None and now_ms < self._next_poll_ms and not went_back:
            return start
        self._polled_at_ms = wall_ms
        found = self._request(start)
        idle = found == start and not self._ends_when_idle
        self._next_poll_ms = self._clock.steady_ms() + self._poll_ms if idle else None
        return found

    def _request(self, start: dict[str, Any]) -> dict[str, Any]:
        """Request the next offset.

        While the driver answers `RetryLater`, Spark waits here and plans no batch.
        """
        at = Offset.from_dict(start)
        try:
            while isinstance(found := self._link.next(self._control, at), RetryLater):
                self._clock.pause(found.ms)
        except LinkError:
            return start
        return start if found == at else found.to_dict()

    def readBetweenOffsets(  # noqa: N802
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> Iterator[Batch]:
        """Make one row if the watermark has advanced."""
        if start == end or end["watermark"] is None:
            return iter(())
        time_ms = end["watermark"] + self._delay_ms
        return iter([control_row(self._schema, self._event_time, time_ms)])

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note that the run ends when idle. The driver caps such a run's watermark."""
        self._ends_when_idle = True


class ControlSource(DataSource):
    """The control source for Spark's registry.

    Options: stage, control, port, token, timeoutMs, pollMs, schema, eventTime, delayMs. Its rows have
    all columns of the data they are unioned with. With literals in their place, Spark's optimiser
    could prove that control rows never pass the data's filters.
    """

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the data's columns."""
        return StructType.fromJson(json.loads(self.options["schema"]))

    def simpleStreamReader(self, schema: StructType) -> SimpleDataSourceStreamReader:  # noqa: N802
        """Create the reader from the options."""
        link = LinkClient(
            int(self.options["port"]),
            self.options["token"],
            timeout_ms=int(self.options["timeoutMs"]),
        )
        return ControlReader(
            link,
            control=self.options["control"],
            schema=schema,
            event_time=self.options["eventTime"],
            delay_ms=int(self.options["delayMs"]),
            poll_ms=int(self.options["pollMs"]),
            clock=SystemClock(),
        )

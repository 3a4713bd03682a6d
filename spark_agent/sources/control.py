"""The control source: brings a stage's input watermark into Spark, where all windows close by it.

It is a streaming data source that yields one row whenever the watermark has advanced, with the
watermark as its event time. `Pipeline.watermarked` unions it with the data in such a way that
Spark's own watermark is the newest control row's event time and depends on nothing else. The driver
decides what to yield next (`spark_agent.driver.watermark_feed`); the source asks it through the link.

Why no row that the watermark covers is late, although Spark polls the data's source and this one
for their latest offsets one after the other, in either order: everything that a watermark W covers
was readable *before* W was published. If Spark polls this source first, it lists the data after it
has seen W, so everything that W covers is in the same batch or an earlier one. If it polls this
source last, rows that arrive between the two polls are in the next batch. That is still in time. The
control row of batch n becomes Spark's watermark at the end of batch n. Batch n + 1 closes windows by
it, but only after processing its own rows, and it drops late rows by the watermark of batch n, which
is older. All this holds only if the data's source reads everything available. One that is rate
limited and reads what *another query* wrote may leave covered rows for a later batch, and is refused.
(The source stage's own query may be limited: its rows are promised only once they have been read.)
With `availableNow` a query reads what was there at the start, so for other queries' stages it uses
the watermarks from before its start.
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
from spark_agent.sources.driver_link import Hold, LinkClient, LinkError, Offset
from spark_agent.times import MAX_MS

FORMAT: Final = "tidegauge-control"

END_MS: Final = 3_093_527_980_800_000
"""100000-01-01T00:00:00Z: how Spark is given the end of time. It is later than the end of any window
over real times (which end with the year 9999), and still fits Spark's microseconds."""


def to_spark_ms(watermark_ms: int) -> int:
    """Convert a watermark to Spark's range.

    >>> to_spark_ms(MAX_MS) == END_MS, to_spark_ms(5)
    (True, 5)
    """
    return END_MS if watermark_ms == MAX_MS else watermark_ms


class ControlReader(SimpleDataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows one stage's input watermark. Runs in a Python process next to the driver.

    Its offsets are `spark_agent.sources.driver_link.Offset`. Spark logs them, so a repeated batch sees
    the same watermark again. As a simple reader it passes its rows to Spark together with the offset,
    and the task that reads them needs no Python. Only a batch repeated after a restart reads its row
    again.
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
        self._control = control
        self._schema = schema
        self._event_time = event_time
        self._delay_ms = delay_ms

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Start without a watermark."""
        return Offset(None, 0).to_dict()

    def read(self, start: dict[str, Any]) -> tuple[Iterator[Batch], dict[str, Any]]:
        """Ask the driver for the next offset; `start` and no row if the watermark has not advanced.

        An exception raised here would end the query. If the driver does not answer, the watermark
        does not advance, which is always safe. An idle query calls this every 10 ms; not every call
        asks the driver, unless the run ends at the first trigger that finds nothing new.
        """
        end = self._next(start)
        return self.readBetweenOffsets(start, end), end

    def _next(self, start: dict[str, Any]) -> dict[str, Any]:
        now_ms = self._clock.steady_ms()
        if self._next_poll_ms is not None and now_ms < self._next_poll_ms:
            return start
        found = self._ask(start)
        idle = found == start and not self._ends_when_idle
        self._next_poll_ms = self._clock.steady_ms() + self._poll_ms if idle else None
        return found

    def _ask(self, start: dict[str, Any]) -> dict[str, Any]:
        """Ask the driver. While it says to hold, Spark waits here and plans no batch."""
        at = Offset.from_dict(start)
        try:
            while isinstance(found := self._link.next(self._control, at), Hold):
                self._clock.pause(found.ms)
        except LinkError:
            return start
        return start if found == at else found.to_dict()

    def readBetweenOffsets(  # noqa: N802
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> Iterator[Batch]:
        """Make one row, if there is a watermark."""
        if start == end or end["watermark"] is None:
            return iter(())
        time_ms = end["watermark"] + self._delay_ms
        return iter([control_row(self._schema, self._event_time, time_ms)])

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note that the run ends when idle. The driver caps such a run's watermark."""
        self._ends_when_idle = True


class ControlSource(DataSource):
    """The control source, as registered with Spark.

    Options: stage, control, port, token, timeoutMs, pollMs, schema, eventTime, delayMs. Its rows have
    all columns of the data they are unioned with. With literals in their place, Spark's optimiser
    could prove that no control row passes the data's filters.
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

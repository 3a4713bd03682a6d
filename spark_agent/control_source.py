"""The control source: brings a stage's input watermark into Spark, as the only clock it closes by.

It is a streaming data source that yields one row whenever the watermark has moved, with the
watermark as its event time. `Pipeline.watermarked` unions it with the data in such a way that
Spark's own watermark is the newest control row's event time, and nothing else. What to yield next
the driver decides (`spark_agent.feed`); the source asks it through the link.

Why no row that the watermark covers comes too late, although Spark asks the data's source and
this one for their newest offsets one after the other, in either order: what the watermark W
covers was readable *before* W was published. If Spark asks here first, then it lists the data
after it has seen W, and everything that W covers is in the same batch or an earlier one. If it
asks here last, rows may arrive between the two, and they are in the next batch. That is still in
time: the control row of batch n becomes Spark's watermark at the end of batch n. Batch n + 1
closes windows by it, but only after it has taken in its own rows, and it drops rows as late by
the watermark of batch n, which was older. This holds as long as the data's source takes all there
is: one that is rate limited and reads what *another query* wrote may leave covered rows for a later
batch, and is refused. (The source stage's own query may: there the rows of a batch are promised
only when they have been read.) With `availableNow` the data is what was there at the start, so
watermarks of other queries' stages are taken as they were before that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from spark_agent.arrow import Batch, control_row
from spark_agent.client import MAX_MS
from spark_agent.clock import Clock, SystemClock
from spark_agent.link import LinkClient, LinkError, Offset

FORMAT: Final = "tidegauge-control"

END_MS: Final = 3_093_527_980_800_000
"""100000-01-01T00:00:00Z: what the end of time is to Spark. Later than the end of any window over
real times (which end with the year 9999), early enough for Spark to count in microseconds."""


def to_spark_ms(watermark_ms: int) -> int:
    """Turn a watermark into Spark's.

    >>> to_spark_ms(MAX_MS) == END_MS, to_spark_ms(5)
    (True, 5)
    """
    return END_MS if watermark_ms == MAX_MS else watermark_ms


class ControlReader(SimpleDataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows one stage's input watermark. Lives in a Python process beside the driver.

    Its offsets are `spark_agent.link.Offset`. Spark logs them, so that a repeated batch sees the
    same watermark again. It is a simple reader, whose rows go to Spark together with the offset: the
    task that reads them needs no Python. Only a batch that a restart repeats reads its row again.
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
        """Begin without a watermark."""
        return Offset(None, 0).to_dict()

    def read(self, start: dict[str, Any]) -> tuple[Iterator[Batch], dict[str, Any]]:
        """Ask the driver how far the watermark is; `start` and no row if it has not moved.

        An exception from here would end the query. Without news the watermark stands still,
        which is always safe. An idle query comes here every 10 ms, which is not passed on each time;
        but a run that ends at the first trigger without news is told at once.
        """
        end = self._next(start)
        return self.readBetweenOffsets(start, end), end

    def _next(self, start: dict[str, Any]) -> dict[str, Any]:
        now_ms = self._clock.steady_ms()
        if self._next_poll_ms is not None and now_ms < self._next_poll_ms:
            return start
        try:
            found = self._link.next(self._control, Offset.from_dict(start)).to_dict()
        except LinkError:
            found = start
        idle = found == start and not self._ends_when_idle
        self._next_poll_ms = self._clock.steady_ms() + self._poll_ms if idle else None
        return found

    def readBetweenOffsets(  # noqa: N802
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> Iterator[Batch]:
        """Make one row, if there is a watermark."""
        if start == end or end["watermark"] is None:
            return iter(())
        time_ms = end["watermark"] + self._delay_ms
        return iter([control_row(self._schema, self._event_time, time_ms)])

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note that the run ends when idle. The driver knows how far such a run may go."""
        self._ends_when_idle = True


class ControlSource(DataSource):
    """The control source, as Spark's registry knows it.

    Options: stage, control, port, token, timeoutMs, pollMs, schema, eventTime, delayMs. Its rows
    have all columns of the data that they are unioned with, so that nothing in them is a literal by
    which Spark's optimiser could prove that the data's filters let none of them through.
    """

    @classmethod
    def name(cls) -> str:
        """Give the format's name."""
        return FORMAT

    def schema(self) -> StructType:
        """Give the data's columns."""
        return StructType.fromJson(json.loads(self.options["schema"]))

    def simpleStreamReader(self, schema: StructType) -> SimpleDataSourceStreamReader:  # noqa: N802
        """Make the reader that the options ask for."""
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

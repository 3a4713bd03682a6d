"""The clock of sources whose rows are dated when Spark reads them: a batch waits while it is behind."""

from __future__ import annotations

import logging
from typing import Final

from spark_agent.client.client import Client
from spark_agent.exceptions import AggregatorError
from spark_agent.started_query import StartedQuery
from spark_agent.strategies import IngressTime
from spark_agent.times import MAX_MS, instant_text

_log: Final = logging.getLogger("spark_agent")


class IngressClock:
    """Holds batches of a query back while the clock is behind what its sources have promised.

    Spark dates a batch's rows after it has polled all sources, by the clock of this machine. So a batch
    that is planned now has no row before now. Not thread-safe: the feed calls it under a lock.
    """

    def __init__(self, query: StartedQuery, client: Client) -> None:
        self._job = query.job
        self._query = query.name
        self._stages = [
            stage for stage, each in query.clocks.items() if isinstance(each, IngressTime)
        ]
        self._client = client
        self._promised_ms: int | None = None
        """The furthest promise of the sources; None: still to be read from the service."""
        self._logged: str | None = None

    def reason_to_wait(self, now_ms: int) -> str | None:
        """Return why the next batch has to wait at this time of the clock; None: it may run."""
        if not self._stages:
            return None
        reason = self._reason(now_ms)
        if reason is not None and self._logged is None:
            _log.warning("query %s waits before its next batch: %s", self._query, reason)
        self._logged = reason
        return reason

    def _reason(self, now_ms: int) -> str | None:
        if self._promised_ms is None:
            try:
                self._promised_ms = self._read_promised()
            except AggregatorError as error:
                return (
                    f"the service has not answered, and what {', '.join(self._stages)} has promised "
                    f"is unknown, so its rows could be dated too early: {error}"
                )
        if now_ms < self._promised_ms:
            return (
                f"the clock is at {instant_text(now_ms)}, and {', '.join(self._stages)} has promised "
                f"not to have a row before {instant_text(self._promised_ms)}: the clock was set back, "
                f"or that of another driver was ahead"
            )
        self._promised_ms = now_ms
        return None

    def _read_promised(self) -> int:
        found = self._client.watermarks(self._job)
        outputs = [found[stage].output_ms for stage in self._stages if stage in found]
        return max((ms for ms in outputs if ms is not None and ms != MAX_MS), default=0)

"""Early results: a query that closes its windows by a percentile of its input, ahead of the watermark.

Such a query promises nothing and reports nothing: what it writes is corrected by the query that follows
the input watermark itself. So it has no run, no epochs and no supervisor.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from spark_agent.client.client import Client
from spark_agent.client.poller import Poller
from spark_agent.clock import Clock
from spark_agent.soundness.query_stages import EarlyStage
from spark_agent.sources.control import to_spark_ms
from spark_agent.sources.driver_link import Offset
from spark_agent.times import instant_text

_log: Final = logging.getLogger("spark_agent")

_MISSING_AFTER_MS: Final = 30_000
"""So long an input may have no percentile watermark before that is logged."""


class EarlyFeed:
    """Serves the control sources of one early query. `next` is thread-safe."""

    def __init__(
        self,
        job: str,
        early: EarlyStage,
        *,
        stays: bool,
        poll_ms: int,
        client: Client,
        clock: Clock,
    ) -> None:
        """`stays`: the query keeps to the position of its input at the start, as an `availableNow` query
        reads only rows that were there then.
        """
        self._job = job
        self._early = early
        self._stays = stays
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._percentile: Poller[int | None] = Poller(self._fetch, poll_ms=poll_ms, clock=clock)
        self._missing_since_ms: int | None = None
        self._is_missing_logged = False
        self._is_away_logged = False
        self._is_checked = False

    @property
    def stage(self) -> str:
        """The stage whose early results the query writes."""
        return self._early.stage

    def next(self, at: Offset) -> Offset:
        """Return a control source's next offset, or `at` itself if the percentile has not advanced."""
        with self._lock:
            now_ms = self._clock.steady_ms()
            latest_ms = self._percentile.latest()
            self._log_away()
            if latest_ms is None:
                self._log_missing(now_ms)
                return at
            target_ms = to_spark_ms(latest_ms)
            self._check_checkpoint(at.watermark_ms, target_ms)
        if at.watermark_ms is not None and target_ms <= at.watermark_ms:
            return at
        return Offset(target_ms, at.turn + 1)

    def _fetch(self, latest_ms: int | None, _: int) -> int | None:
        """Return the least percentile of the inputs; the latest one while an input has none."""
        if self._stays and latest_ms is not None:
            return latest_ms
        found = [
            self._client.percentile_ms(self._job, each, self._early.percentile)
            for each in sorted(self._early.inputs)
        ]
        known = [each for each in found if each is not None]
        return min(known) if len(known) == len(found) else latest_ms

    def _log_away(self) -> None:
        error = self._percentile.error
        if error is not None and not self._is_away_logged:
            _log.warning(
                "stage %s: early results wait for the service, and the query goes on: %s",
                self.stage,
                error,
            )
        self._is_away_logged = error is not None

    def _check_checkpoint(self, at_ms: int | None, target_ms: int) -> None:
        """Log, once after the start, that the job is behind the query's checkpoint."""
        if self._is_checked:
            return
        self._is_checked = True
        if at_ms is not None and target_ms < at_ms:
            _log.warning(
                "stage %s: the checkpoint of its early results is at %s, but its input's percentile "
                "is only at %s: the job was reset, or its live store was lost. What is older than the "
                "checkpoint is missing from the early results. To start over, give the query a new "
                "checkpoint and an empty output",
                self.stage,
                instant_text(at_ms),
                instant_text(target_ms),
            )

    def _log_missing(self, now_ms: int) -> None:
        if self._is_missing_logged:
            return
        if self._missing_since_ms is None:
            self._missing_since_ms = now_ms
        if now_ms - self._missing_since_ms >= _MISSING_AFTER_MS:
            self._is_missing_logged = True
            _log.warning(
                "stage %s: %s has no percentile watermark yet, so no early results come out: each of "
                "its ranges must have reported its rows in flight. Shards that a query reports with "
                "source() do so after their first rows; key ranges that Spark executes never do",
                self.stage,
                " or ".join(sorted(self._early.inputs)),
            )

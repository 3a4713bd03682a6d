"""Early results: a query that closes its windows by a percentile of its input, ahead of the watermark.

Such a query promises nothing and reports nothing: what it writes is corrected by the query that follows
the input watermark itself. So it has no run, no epochs and no supervisor.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from spark_agent.client.client import Client
from spark_agent.clock import Clock
from spark_agent.exceptions import AggregatorError
from spark_agent.sources.control import to_spark_ms
from spark_agent.sources.driver_link import Offset
from spark_agent.times import instant_text

_log: Final = logging.getLogger("spark_agent")

_LONGEST_PAUSE_MS: Final = 5_000
_MISSING_AFTER_MS: Final = 30_000
"""So long an input may have no percentile watermark before that is logged."""


@dataclass(frozen=True, slots=True)
class EarlyConfig:
    """Facts about a started query of early results."""

    job: str
    stage: str
    inputs: Collection[str]
    """The nearest stages above it."""
    percentile: int
    stays: bool
    """True if the query keeps to the position of its input at the start, as an `availableNow` query
    reads only rows that were there then."""
    poll_ms: int


class EarlyFeed:
    """Serves the control sources of one early query. `next` is thread-safe."""

    def __init__(self, config: EarlyConfig, *, client: Client, clock: Clock) -> None:
        self._config = config
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._latest_ms: int | None = None
        self._pause_ms = config.poll_ms
        self._next_ms: int | None = None
        self._missing_since_ms: int | None = None
        self._has_logged = False
        self._is_away = False
        self._checked = False

    @property
    def stage(self) -> str:
        """The stage whose early results the query writes."""
        return self._config.stage

    def next(self, at: Offset) -> Offset:
        """Return a control source's next offset, or `at` itself if the percentile has not advanced."""
        with self._lock:
            now_ms = self._clock.steady_ms()
            if self._next_ms is None or now_ms >= self._next_ms:
                self._refresh()
                self._next_ms = self._clock.steady_ms() + self._pause_ms
            self._log_missing(now_ms)
            target_ms = None if self._latest_ms is None else to_spark_ms(self._latest_ms)
            self._check_checkpoint(at.watermark_ms, target_ms)
        if target_ms is None or (at.watermark_ms is not None and target_ms <= at.watermark_ms):
            return at
        return Offset(target_ms, at.turn + 1)

    def _refresh(self) -> None:
        config = self._config
        if config.stays and self._latest_ms is not None:
            return
        try:
            found = [
                self._client.percentile_ms(config.job, each, config.percentile)
                for each in sorted(config.inputs)
            ]
        except AggregatorError as error:
            if not self._is_away:
                self._is_away = True
                _log.warning(
                    "stage %s: early results wait for the service, and the query goes on: %s",
                    config.stage,
                    error,
                )
            self._pause_ms = min(2 * self._pause_ms, max(_LONGEST_PAUSE_MS, config.poll_ms))
            return
        self._pause_ms, self._is_away = config.poll_ms, False
        known = [each for each in found if each is not None]
        if len(known) == len(found):
            self._latest_ms = min(known)

    def _check_checkpoint(self, at_ms: int | None, target_ms: int | None) -> None:
        """Log, once after the start, that the job is behind the query's checkpoint."""
        if self._checked or target_ms is None:
            return
        self._checked = True
        if at_ms is not None and target_ms < at_ms:
            _log.warning(
                "stage %s: the checkpoint of its early results is at %s, but its input's percentile "
                "is only at %s: the job was reset, or its live store was lost. What is older than the "
                "checkpoint is missing from the early results. To start over, give the query a new "
                "checkpoint and an empty output",
                self._config.stage,
                instant_text(at_ms),
                instant_text(target_ms),
            )

    def _log_missing(self, now_ms: int) -> None:
        if self._latest_ms is not None or self._has_logged:
            return
        if self._missing_since_ms is None:
            self._missing_since_ms = now_ms
        if now_ms - self._missing_since_ms >= _MISSING_AFTER_MS:
            self._has_logged = True
            _log.warning(
                "stage %s: %s has no percentile watermark yet, so no early results come out: each of "
                "its ranges must have said what it has in flight. Shards that a query reports with "
                "source() do that after their first rows; key ranges that Spark executes never do",
                self._config.stage,
                " or ".join(sorted(self._config.inputs)),
            )

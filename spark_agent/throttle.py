"""Decides in the driver whether a query's next batch has to wait, because its sources are throttled.

The service asks single shards to pause (they are ahead of their group), or to read more slowly (a stage
downstream lags). Spark plans one batch for all sources of a query, so the query waits as a whole, and
only while each of its shards that belongs to a group is asked to pause, is idle, or is final. Any other
may be the one that the paused shards wait for: if it were held back as well, none would ever go on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from spark_agent.client import Client, Throttle
from spark_agent.clock import Clock
from spark_agent.errors import AggregatorError
from spark_agent.link import HeldBack
from spark_agent.running import CommittedBatch

_log: Final = logging.getLogger("spark_agent")

_LONGEST_PAUSE_MS: Final = 5_000
_LONGEST_REST_MS: Final = 60_000
"""The longest wait between two batches that a rate can lead to."""
_STATUSES_HOLD_MS: Final = 1_000
_MOST_SHARDS: Final = 10_000
"""A stage with more shards is never held back: their statuses do not come in one answer."""
_NOT_WAITED_FOR: Final = frozenset({"idle", "final"})


@dataclass(frozen=True, slots=True)
class ThrottleConfig:
    """What is known of a started query."""

    job: str
    query: str
    sources: Sequence[str]
    """The source stages that it executes."""
    poll_ms: int
    keep_ms: int
    """How long the service's last answer counts if no other comes."""
    patience_ms: int | None = None
    """After this long without progress of those it waits for, it goes on anyway. None: never."""


class SourceThrottle:
    """Holds one query back. Not thread-safe: its feed calls it under a lock."""

    def __init__(self, config: ThrottleConfig, *, client: Client, clock: Clock) -> None:
        self._config = config
        self._client = client
        self._clock = clock
        self._answer = _Answer(config, client, clock)
        self._waited_for: dict[str, tuple[int, frozenset[str] | None]] = {}
        self._epoch = -1
        self._batch_ended_ms = clock.steady_ms()
        self._wait: tuple[int, str] | None = None
        self._stuck = _Stuck(config.query, config.patience_ms)

    def refresh_soon(self) -> None:
        """Ask the service on the next call: an epoch was committed, which may change its answer."""
        self._answer.refresh_soon()

    def reason_to_wait(self, latest: CommittedBatch | None) -> str | None:
        """Return why the next batch has to wait; None: it may run."""
        now_ms = self._clock.steady_ms()
        epoch = -1 if latest is None else latest.epoch
        if epoch != self._epoch:
            self._epoch, self._batch_ended_ms = epoch, now_ms
        throttle = self._answer.latest()
        if throttle is None:
            return None
        because = self._ahead(throttle, now_ms) or self._resting(throttle, latest, now_ms)
        if because is not None:
            if self._wait is None:
                _log.info("query %s waits before its next batch: %s", self._config.query, because)
            since_ms = now_ms if self._wait is None else self._wait[0]
            self._wait = since_ms, because
        return because

    def end_wait(self) -> HeldBack | None:
        """Return how long the batch that may run now has waited, and why; None: it has not."""
        if self._wait is None:
            return None
        (since_ms, because), self._wait = self._wait, None
        return HeldBack(self._clock.steady_ms() - since_ms, because)

    def _ahead(self, throttle: Throttle, now_ms: int) -> str | None:
        """Return why every shard has to pause; None: one of them need not."""
        own = set(self._config.sources)
        groups = [group for group in throttle.groups if own & set(group["stages"])]
        stages = sorted({stage for group in groups for stage in group["stages"]} & own)
        reasons = [because for stage in stages for because in _pauses(throttle, stage)]
        if not reasons or any(self._is_waited_for(throttle, each, now_ms) for each in stages):
            return None
        limits = [group["limit"] for group in groups]
        return None if self._stuck.may_run(limits, reasons[0], now_ms) else reasons[0]

    def _is_waited_for(self, throttle: Throttle, stage: str, now_ms: int) -> bool:
        """Return whether the paused shards may be waiting for one of this stage's."""
        read_at_ms, waited_for = self._waited_for.get(stage, (None, None))
        if read_at_ms is None or now_ms - read_at_ms >= _STATUSES_HOLD_MS:
            waited_for = self._read_statuses(stage)
            self._waited_for[stage] = now_ms, waited_for
        paused = {name for name, asked in throttle.shards.get(stage, {}).items() if asked["pause"]}
        return waited_for is None or not waited_for <= paused

    def _read_statuses(self, stage: str) -> frozenset[str] | None:
        """Return a stage's shards that are neither idle nor final; None if that is not known."""
        try:
            found = self._client.ranges(self._config.job, stage, limit=_MOST_SHARDS)["ranges"]
        except AggregatorError:
            return None
        if len(found) >= _MOST_SHARDS:
            return None
        return frozenset(each["range"] for each in found if each["status"] not in _NOT_WAITED_FOR)

    def _resting(
        self, throttle: Throttle, latest: CommittedBatch | None, now_ms: int
    ) -> str | None:
        """Return why a query whose sources all have to read more slowly waits now.

        A source of any kind reads at a rate of 0.5 if as much time passes between its batches as in
        them.
        """
        if latest is None or latest.read_nothing:
            return None
        rates = [_slowest(throttle, stage) for stage in self._config.sources]
        rate, because = max(rates, default=(1.0, ""))
        rest_ms = min(int(latest.duration_ms * (1 / rate - 1)), _LONGEST_REST_MS)
        return because if now_ms - self._batch_ended_ms < rest_ms else None


def _pauses(throttle: Throttle, stage: str) -> Iterator[str]:
    for shard, asked in throttle.shards.get(stage, {}).items():
        if asked["pause"]:
            yield f"shard {shard} of {stage} is throttled: {asked['because']}"


def _slowest(throttle: Throttle, stage: str) -> tuple[float, str]:
    """Return the least rate that is asked of a stage's shards, and why."""
    rates = [
        (
            float(asked["rate"]),
            f"{stage} is to read at a rate of {asked['rate']}: {asked['because']}",
        )
        for asked in throttle.shards.get(stage, {}).values()
    ]
    return min(rates, default=(1.0, ""))


class _Answer:
    """What the service asks for, polled no more often than necessary."""

    def __init__(self, config: ThrottleConfig, client: Client, clock: Clock) -> None:
        self._config = config
        self._client = client
        self._clock = clock
        self._latest: Throttle | None = None
        self._heard_ms = 0
        self._pause_ms = config.poll_ms
        self._next_ms: int | None = None

    def refresh_soon(self) -> None:
        if self._pause_ms <= self._config.poll_ms:
            self._next_ms = None

    def latest(self) -> Throttle | None:
        """Return what it asks for; None if it has not answered for too long to go by that."""
        now_ms = self._clock.steady_ms()
        if self._next_ms is None or now_ms >= self._next_ms:
            self._refresh()
            now_ms = self._clock.steady_ms()
            self._next_ms = now_ms + self._pause_ms
        return self._latest if now_ms - self._heard_ms < self._config.keep_ms else None

    def _refresh(self) -> None:
        etag = None if self._latest is None else self._latest.etag
        try:
            found = self._client.throttle_since(self._config.job, etag)
        except AggregatorError:
            self._pause_ms = min(2 * self._pause_ms, max(_LONGEST_PAUSE_MS, self._config.poll_ms))
            return
        self._pause_ms = self._config.poll_ms
        self._heard_ms = self._clock.steady_ms()
        self._latest = found or self._latest


class _Stuck:
    """Lets a query go on while those that it waits for make no progress.

    A query that ends by itself may wait for one that runs only tomorrow, and that nobody has told to be
    final. Ahead of its group it costs memory; waiting for ever, it would never end.
    """

    def __init__(self, query: str, patience_ms: int | None) -> None:
        self._query = query
        self._patience_ms = patience_ms
        self._limits: Sequence[int | None] | None = None
        self._since_ms = 0
        self._logged = False

    def may_run(self, limits: Sequence[int | None], because: str, now_ms: int) -> bool:
        """Return whether the next batch may run, with the groups' limits as they are."""
        if self._patience_ms is None:
            return False
        if limits != self._limits:
            self._limits, self._since_ms = limits, now_ms
        if now_ms - self._since_ms < self._patience_ms:
            return False
        if not self._logged:
            self._logged = True
            _log.warning(
                "query %s goes on, although %s. That shard has made no progress for %d s, and this "
                "query has an end: it cannot wait for ever",
                self._query,
                because,
                self._patience_ms // 1_000,
            )
        return True

"""Decides in the driver whether a query's next batch has to wait, because its sources are throttled.

The service asks single shards to pause (they are ahead of their group), or to read more slowly (a stage
downstream lags). Spark plans one batch for all sources of a query, so the query waits as a whole, and
only while each of its shards that belongs to a group is asked to pause, is idle, or is final. Any other
may be the one that the paused shards wait for: if it were held back as well, none would ever go on.

A shard that the next batch would take past its group's limit, if it brings as much as the last one,
waits as if it were asked to: else the query would be ahead by the drift and one batch. The query that
reads the slowest shard of a group never waits for that group's sake, so somebody always goes on. The
service knows nothing of such a wait, and could take a waiting shard for a quiet one. So where a source
has an idle policy, its query waits only when it is asked to.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from spark_agent.advances import Advances, Promises
from spark_agent.answers import MAX_MS, GroupAnswer
from spark_agent.client import Client, Throttle
from spark_agent.clock import Clock
from spark_agent.errors import AggregatorError
from spark_agent.link import HeldBack
from spark_agent.running import CommittedBatch
from spark_agent.times import instant_text

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
    looks_ahead: bool = False
    """Whether it waits before a batch that would take it past its limit. Never with an idle policy."""


class SourceThrottle:
    """Holds one query back. Not thread-safe: its feed calls it under a lock."""

    def __init__(self, config: ThrottleConfig, *, client: Client, clock: Clock) -> None:
        self._config = config
        self._client = client
        self._clock = clock
        self._answer = _Answer(config, client, clock)
        self._waited_for: dict[str, tuple[int, int, Promises | None]] = {}
        """By stage: when they were read, after which epoch, and the promises of what is waited for."""
        self._advances = {stage: Advances() for stage in config.sources}
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
        """Return why every shard has to wait; None: one of them need not."""
        own = set(self._config.sources)
        groups = [group for group in throttle.groups if own & set(group["stages"])]
        stages = sorted({stage for group in groups for stage in group["stages"]} & own)
        paused = {stage: _pauses(throttle, stage) for stage in stages}
        if not (any(paused.values()) or (self._config.looks_ahead and groups)):
            return None
        reasons: list[str] = []
        for stage in stages:
            waited_for = self._promises(stage, now_ms)
            if waited_for is None:
                return None
            held = {**self._would_pass(groups, stage, waited_for), **paused[stage]}
            if not waited_for.keys() <= held.keys():
                return None
            reasons += held.values()
        limits = [group["limit"] for group in groups]
        if not reasons or self._stuck.may_run(limits, reasons[0], now_ms):
            return None
        return reasons[0]

    def _would_pass(
        self, groups: Sequence[GroupAnswer], stage: str, promises: Promises
    ) -> dict[str, str]:
        """Return which shards the next batch would take past their limits, with the reason."""
        if not self._config.looks_ahead:
            return {}
        found: dict[str, str] = {}
        for group in groups:
            limit_ms, slowest = group["limit"], group["held_by"]
            if stage not in group["stages"] or limit_ms is None or slowest is None:
                continue
            if slowest["stage"] in self._config.sources:
                continue
            for shard, promise_ms in promises.items():
                if promise_ms is None or promise_ms == MAX_MS:
                    continue
                if self._advances[stage].after_next(shard, promise_ms) > limit_ms:
                    found[shard] = (
                        f"shard {shard} of {stage} is at {instant_text(promise_ms)}, and its last batch "
                        f"brought {self._advances[stage].step_ms(shard) / 1_000:g} s: another one would "
                        f"take it past {instant_text(limit_ms)}, too far ahead of shard "
                        f"{slowest['range']} of {slowest['stage']}"
                    )
        return found

    def _promises(self, stage: str, now_ms: int) -> Promises | None:
        """Return the promises of the shards that the group may wait for; None: they are not known."""
        read_at_ms, epoch, waited_for = self._waited_for.get(stage, (None, None, None))
        if read_at_ms is None or epoch != self._epoch or now_ms - read_at_ms >= _STATUSES_HOLD_MS:
            waited_for = self._read_promises(stage)
            self._waited_for[stage] = now_ms, self._epoch, waited_for
            if waited_for is not None:
                self._advances[stage].record(self._epoch, waited_for)
        return waited_for

    def _read_promises(self, stage: str) -> Promises | None:
        """Return the promises of a stage's shards that are neither idle nor final."""
        try:
            found = self._client.ranges(self._config.job, stage, limit=_MOST_SHARDS)["ranges"]
        except AggregatorError:
            return None
        if len(found) >= _MOST_SHARDS:
            return None
        return {
            each["range"]: each["promise"]
            for each in found
            if each["status"] not in _NOT_WAITED_FOR
        }

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


def _pauses(throttle: Throttle, stage: str) -> Mapping[str, str]:
    """Return the shards that are asked to pause, with the reason."""
    return {
        shard: f"shard {shard} of {stage} is throttled: {asked['because']}"
        for shard, asked in throttle.shards.get(stage, {}).items()
        if asked["pause"]
    }


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

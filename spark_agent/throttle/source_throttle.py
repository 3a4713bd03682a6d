"""Decides in the driver whether a query's next batch has to wait, because its sources are throttled.

The service's advice pauses single shards (they are ahead of their group), or slows them down (a stage
downstream lags). Spark plans one batch for all sources of a query, so the query waits as a whole, and
only while each of its shards that belongs to a group is paused, idle, or final. Any other shard may be
the one that the paused shards wait for: if it were held back as well, none would ever go on.

Logs in folders (`spark_agent.sources`) request before each batch what each of their shards may read.
There a shard waits by itself, and the others go on: `SourceThrottle.admit`.

A shard that the next batch would take past its group's limit, if it brings as much as the last one,
waits as if it were paused: else the query would be ahead by the drift and one batch. The query that
reads the slowest shard of a group never waits for that group's sake, so one query always goes on. The
service does not see such a wait, and could take the shards of a waiting query for quiet ones. So where
a source has an idle policy, its query waits only for the service's advice. Logs in folders report which
shards have something unread, and the service takes none of those for quiet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from spark_agent.client.client import Client, Throttle
from spark_agent.client.poller import Poller, long_poll_s
from spark_agent.client.responses import GroupAnswer
from spark_agent.clock import Clock
from spark_agent.exceptions import AggregatorError, Unavailable
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.sources.admission import Admission, ShardLimit, Wanted
from spark_agent.sources.driver_link import HeldBack
from spark_agent.started_query import StartedQuery
from spark_agent.throttle.alignment import Advances, Promises, past_limit, pauses, slowest_rate
from spark_agent.throttle.rests import LONGEST_REST_MS, Rests, files_at

_log: Final = logging.getLogger("spark_agent")

_STATUSES_HOLD_MS: Final = 1_000
_MOST_SHARDS: Final = 10_000
"""A stage with more shards is never held back: their statuses do not come in one answer."""
WAIT_TIMEOUT_MS: Final = 30_000
"""Timeout of the wait of a query that ends, for shards that make no progress."""
_NOT_WAITED_FOR: Final = frozenset({"idle", "final"})


class SourceThrottle:
    """Holds one query back. Not thread-safe: its feed calls it under a lock."""

    def __init__(self, query: StartedQuery, *, client: Client, clock: Clock) -> None:
        self._job = query.job
        self._query = query.name
        self._sources = [stage.name for stage in query.stages.sources]
        self._by_shard = query.stages.by_shard
        # A run of what is there now ends soon, and the shards that it would wait for may run only later.
        self._shards_look_ahead = not query.trigger.is_available_now
        self._looks_ahead = self._shards_look_ahead and not query.stages.watched
        self._keep_ms = query.timing.ttl_ms
        self._client = client
        self._clock = clock
        self._advice = Poller(
            self._fetch_advice,
            poll_ms=query.timing.poll_ms,
            clock=clock,
            wait_s=long_poll_s(self._keep_ms),
        )
        self._waited_for: dict[str, tuple[int, int, Promises | None]] = {}
        """By stage: when they were read, after which epoch, and the promises of what is waited for."""
        self._advances = {stage: Advances() for stage in self._sources}
        self._epoch = -1
        self._batch_ended_ms = clock.steady_ms()
        self._wait: tuple[int, str] | None = None
        self._timeout = WaitTimeout(query.name, WAIT_TIMEOUT_MS if query.ends else None)
        self._rests = Rests()
        self._exhausted: dict[str, Wanted] = {}
        """Requests of sources that read only what was there at the start."""

    def refresh_soon(self) -> None:
        """Poll on the next call: an epoch was committed, which may change the service's advice."""
        self._advice.refresh_soon()

    def _fetch_advice(self, latest: Throttle | None, wait_s: int) -> Throttle:
        etag = None if latest is None else latest.etag
        found = self._client.throttle_since(self._job, etag, wait_s=wait_s) or latest
        if found is None:
            raise Unavailable("the service has answered 304 to a request without an ETag")
        return found

    def _latest_advice(self) -> Throttle | None:
        """Return the latest advice; None once it is older than a lease."""
        found, received_ms = self._advice.latest(), self._advice.received_ms
        is_old = received_ms is None or self._clock.steady_ms() - received_ms >= self._keep_ms
        return None if is_old else found

    def reason_to_wait(self, latest: CommittedBatch | None) -> str | None:
        """Return why the next batch has to wait; None: it may run."""
        now_ms = self._note(latest)
        throttle = self._latest_advice()
        if throttle is None:
            return None
        because = self._ahead(throttle, now_ms) or self._resting(throttle, latest, now_ms)
        if because is not None:
            if self._wait is None:
                _log.info("query %s waits before its next batch: %s", self._query, because)
            since_ms = now_ms if self._wait is None else self._wait[0]
            self._wait = since_ms, because
        return because

    def end_wait(self) -> HeldBack | None:
        """Return how long the batch that may run now has waited, and why; None: it has not."""
        if self._wait is None:
            return None
        (since_ms, because), self._wait = self._wait, None
        return HeldBack(self._clock.steady_ms() - since_ms, because)

    def admit(self, stage: str, wanted: Wanted, latest: CommittedBatch | None) -> Admission:
        """Return what the shards of a source may read in the next batch."""
        now_ms = self._note(latest)
        if wanted.ends:
            self._exhausted[stage] = wanted
        throttle = self._latest_advice()
        limits: dict[str, ShardLimit] = {}
        if throttle is not None:
            slow = self._slow(throttle, stage, wanted, now_ms)
            held = self._held(throttle, stage, wanted, now_ms)
            limits = slow | {shard: ShardLimit(0, because) for shard, because in held.items()}
        reading = [shard for shard in wanted.unread if shard not in limits or limits[shard].files]
        self._rests.plan(stage, frozenset(reading))
        return Admission(limits)

    def _note(self, latest: CommittedBatch | None) -> int:
        """Note when the latest batch ended; return the time."""
        now_ms = self._clock.steady_ms()
        epoch = -1 if latest is None else latest.epoch
        if epoch != self._epoch:
            self._epoch, self._batch_ended_ms = epoch, now_ms
            self._rests.end_batch(now_ms, 0 if latest is None else latest.duration_ms)
        return now_ms

    def _own_groups(self, throttle: Throttle) -> list[GroupAnswer]:
        own = set(self._sources)
        return [group for group in throttle.groups if own & set(group["stages"])]

    def _ahead(self, throttle: Throttle, now_ms: int) -> str | None:
        """Return why every shard has to wait; None: one of them need not."""
        own = set(self._sources)
        groups = self._own_groups(throttle)
        stages = sorted({stage for group in groups for stage in group["stages"]} & own)
        paused = {stage: pauses(throttle, stage) for stage in stages}
        if not (any(paused.values()) or (self._looks_ahead and groups)):
            return None
        # A query that reads the shard which a group waits for must go on, whatever its others do.
        others = [
            group
            for group in groups
            if group["held_by"] is not None and group["held_by"]["stage"] not in own
        ]
        reasons: list[str] = []
        for stage in stages:
            waited_for = self._promises(stage, now_ms)
            if waited_for is None:
                return None
            held = dict(paused[stage])
            if self._looks_ahead:
                held = {**past_limit(others, stage, waited_for, self._advances[stage]), **held}
            if not waited_for.keys() <= held.keys():
                return None
            reasons += held.values()
        if not reasons or self._timeout.expired(_limits(groups), reasons[0], now_ms):
            return None
        return reasons[0]

    def _held(self, throttle: Throttle, stage: str, wanted: Wanted, now_ms: int) -> dict[str, str]:
        """Return the shards with unread files that read none of them in the next batch, and why."""
        groups = [
            group
            for group in throttle.groups
            if stage in group["stages"] and not self._waits_in_vain(group)
        ]
        if not groups:
            return {}
        held = dict(pauses(throttle, stage))
        if self._shards_look_ahead:
            promises = self._promises(stage, now_ms) or {}
            held = {**past_limit(groups, stage, promises, self._advances[stage]), **held}
        held = {shard: held[shard] for shard in sorted(wanted.unread) if shard in held}
        if not held:
            return {}
        [because, *_] = held.values()
        limits = _limits(self._own_groups(throttle))
        return {} if self._timeout.expired(limits, because, now_ms) else held

    def _waits_in_vain(self, group: GroupAnswer) -> bool:
        """Return whether a group waits for a shard of this query that will not move in this run."""
        slowest = group["held_by"]
        wanted = None if slowest is None else self._exhausted.get(slowest["stage"])
        return wanted is not None and slowest is not None and slowest["range"] not in wanted.unread

    def _slow(
        self, throttle: Throttle, stage: str, wanted: Wanted, now_ms: int
    ) -> dict[str, ShardLimit]:
        """Return the shards that have to read more slowly, and what they may read now."""
        rest_rate, _ = self._rest_rate(throttle)
        found: dict[str, ShardLimit] = {}
        for shard, advice in throttle.shards.get(stage, {}).items():
            # A rest of the whole query is the shard's rest, too.
            rate = float(advice["rate"]) / rest_rate
            if rate >= 1 or shard not in wanted.unread:
                continue
            because = (
                f"shard {shard} of {stage} is to read at a rate of {advice['rate']}: "
                f"{advice['because']}"
            )
            if self._rests.is_resting(stage, shard, rate, wanted.most, now_ms):
                found[shard] = ShardLimit(0, because)
            elif wanted.most is not None:
                found[shard] = ShardLimit(files_at(rate, wanted.most), because)
        return found

    def _promises(self, stage: str, now_ms: int) -> Promises | None:
        """Return the promises of the shards that the group may wait for; None: they cannot be read."""
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
            found = self._client.ranges(self._job, stage, limit=_MOST_SHARDS)["ranges"]
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
        rate, because = self._rest_rate(throttle)
        rest_ms = min(int(latest.duration_ms * (1 / rate - 1)), LONGEST_REST_MS)
        return because if now_ms - self._batch_ended_ms < rest_ms else None

    def _rest_rate(self, throttle: Throttle) -> tuple[float, str]:
        """Return the rate that the query as a whole keeps to by resting, and why.

        Where each shard slows down by itself, none.
        """
        if set(self._sources) <= set(self._by_shard):
            return 1.0, ""
        rates = [slowest_rate(throttle, stage) for stage in self._sources]
        return max(rates, default=(1.0, ""))


def _limits(groups: Sequence[GroupAnswer]) -> list[int | None]:
    return [group["limit"] for group in groups]


class WaitTimeout:
    """Timeout of a query's wait for shards that make no progress.

    A query that ends by itself may wait for a query that runs only tomorrow, and whose source was never
    made final. Running ahead of its group costs memory; without a timeout, the query would never end.
    """

    def __init__(self, query: str, patience_ms: int | None) -> None:
        self._query = query
        self._patience_ms = patience_ms
        self._limits: Sequence[int | None] | None = None
        self._since_ms = 0
        self._logged = False

    def expired(self, limits: Sequence[int | None], because: str, now_ms: int) -> bool:
        """Return whether the limits of the groups have not moved for longer than the timeout."""
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
